"""Settings of a worker, with the defaults of its name and address."""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket
import stat
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from paceline.addresses import WILDCARDS, is_loopback
from paceline.names import Label
from paceline.pairing import stored_pairings
from paceline.private_files import check_private, make_private, replace_file
from paceline.protocol import MAX_LABELS
from workers.engine.types import LaneName, WeightType

logger = logging.getLogger(__name__)

_DEFAULT_HOST = "127.0.0.1"
_STATE_DIR = "~/.paceline"
_NOT_OF_A_GROUP = frozenset(
    ("task", "lanes", "adapter", "dtype", "prefill_chunk", "draft_tokens", "mtp", "spec_prefill")
)


class Split(StrEnum):
    """How the ranks of a group divide the model."""

    TENSOR = "tensor"
    """Every rank has a part of each layer."""
    PIPELINE = "pipeline"
    """Every rank has some of the layers."""


class KvBits(IntEnum):
    """Bits of a number in the prefix cache."""

    EIGHT = 8
    SIXTEEN = 16


class WorkerSettings(BaseSettings):
    """All settings of one worker process; they never change while it runs."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_WORKER_",  # PACELINE_HOST and PACELINE_PORT are the gateway's
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        defer_build=True,  # `load_layered` builds a subclass
        use_attribute_docstrings=True,  # of flags, and in docs/reference/settings.md
    )

    model: str = ""
    """Folder or Hugging Face name of a model (default: the demo checkpoint)."""
    task: Literal["generate", "embeddings", "rerank"] | None = None
    """Task of the model: `generate`, `embeddings` or `rerank` (default: as its folder says)."""
    lanes: Annotated[tuple[LaneName, ...], NoDecode] = (LaneName.TEXT_MTP, LaneName.VLM)
    """Lanes that it serves, with commas between them (default: `text-mtp,vlm`)."""
    host: str = ""
    """Address to listen on, and the one that gateways call (default: loopback, or all addresses
    with a gateway on another machine, which then gets the address that faces it)."""
    port: int = Field(9200, ge=0, le=65535)
    """Port to listen on; `0` takes a free one."""
    join: str = ""
    """URL of the gateway that receives its heartbeats; of all gateways, if the name has several
    addresses (default: none)."""
    token: SecretStr | None = Field(None, validation_alias="PACELINE_JOIN_TOKEN")
    """Join token of that gateway; the variable hides it from `ps`."""
    id: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    """Name of the worker (default: host name and port)."""
    labels: Annotated[tuple[Label, ...], NoDecode] = Field((), max_length=MAX_LABELS)
    """Label for the pools of the policy; repeat the flag, or separate labels by commas."""
    adapter: str = ""
    """Folder or Hugging Face name of a LoRA adapter of the model, as mlx-lm, mlx-vlm or PEFT writes
    it. The served name is that of the model, `+` and that of the adapter."""
    dtype: WeightType | None = None
    """Type of weights that are not quantised: `float16`, `bfloat16` or `float32` (default: as
    stored). `auto` takes `float16` on M1 and M2, which compute no `bfloat16`, except for Gemma. A
    CPU computes in `float32`."""
    context: int | None = Field(None, ge=256, le=1 << 30)
    """Most tokens of prompt and answer together (default: the trained context of the model)."""
    rows: int = Field(8, ge=1, le=64)
    """Requests that decode together in a lane, 1 to 64."""
    prefill_chunk: int = Field(1024, ge=64, le=65_536)
    """Tokens of a prompt in one pass while no row decodes, 64 to 65,536: models with experts may be
    faster with 2,048."""
    draft_tokens: int = Field(2, ge=0, le=8)
    """Draft tokens of the MTP head per step, 0 to 8; `0` also switches prompt lookup off."""
    mtp: str = ""
    """Folder or Hugging Face name of an MTP head for the model, such as
    `mlx-community/Qwen3.5-4B-MTP-4bit` (default: the model's own)."""
    prefix_cache_bytes: int | None = Field(None, ge=0)
    """Size of the prefix cache in memory (default: a quarter of the memory beside the weights).
    Requests that need the memory get it first."""
    kv_bits: KvBits = KvBits.SIXTEEN
    """Bits of the keys and values in the prefix cache: `16` keeps them as the model computes them;
    `8` takes about half the memory and disk, for a small error in answers that start from them."""
    prefix_cache_gb: float = Field(20.0, ge=0, le=100_000)
    """Size of the prefix cache in the folder `prefix-cache` of the state folder, in GB, for all
    workers of this machine; `0` writes nothing. They write at most four times as much in a day. A
    folder that is full or read-only is logged once, and only memory then holds the cache."""
    spec_prefill: str = ""
    """Folder or Hugging Face name of a draft model with the same vocabulary, which selects the
    tokens of long prompts (default: none)."""
    spec_prefill_threshold: int = Field(8192, ge=1)
    """Tokens from which a prompt is long."""
    spec_prefill_keep: float = Field(0.3, gt=0, le=1)
    """Share of a long prompt that is read."""
    nodes_key: str = ""
    """Token of a paired worker for the exchange of nodes of the prefix cache."""
    state_dir: Path = Field(Path(_STATE_DIR), validation_alias="PACELINE_STATE_DIR")
    group: Path | None = None
    """Host file of the machines that serve the model together (default: none)."""
    split: Split | None = None
    """How these machines divide the model: `tensor` or `pipeline` (default: `tensor` where the
    model can, else `pipeline`)."""
    leash: bool = False
    """Shut down when standard input closes, so that no worker outlives its parent process."""

    @model_validator(mode="before")
    @classmethod
    def _use_pairing(cls, given: Any) -> Any:
        """Take id and token from the pairing with the gateway, unless there is a join token."""
        token = given.get("PACELINE_JOIN_TOKEN") or given.get("token")
        if token or not isinstance(url := given.get("join"), str) or not url:
            return given
        state_dir = given.get("PACELINE_STATE_DIR") or given.get("state_dir") or _STATE_DIR
        try:
            kept = stored_pairings(Path(state_dir))
        except (OSError, ValueError):
            raise ValueError(f"the pairings in {state_dir} cannot be used") from None
        for one in kept:
            if one.gateway_url == url.rstrip("/") and given.get("id") in (None, "", one.worker_id):
                pair = {"id": one.worker_id, "token": one.token, "nodes_key": one.nodes_key}
                return {**given, **pair}
        return given

    @field_validator("lanes", "labels", mode="before")
    @classmethod
    def _split_names(cls, value: object, field: ValidationInfo) -> object:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            raise ValueError(f"must be a list of {field.field_name}")
        if field.field_name == "lanes" and not names:
            raise ValueError("name at least one lane")
        return tuple(dict.fromkeys(str(name).strip() for name in names))

    @field_validator("join")
    @classmethod
    def _check_join(cls, value: str) -> str:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if value and not usable:
            raise ValueError("must be the URL of a gateway, such as http://192.168.1.10:8000")
        return value.rstrip("/")

    @field_validator("token")
    @classmethod
    def _empty_token_is_none(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value and value.get_secret_value() else None

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        if self.joins_another_machine and is_loopback(self.host):
            raise ValueError(
                f"the gateway at {self.join} cannot reach {self.host}: omit --host, or set it to "
                "an address of this machine"
            )
        is_reachable = self.joins_another_machine or not is_loopback(self.host or _DEFAULT_HOST)
        if is_reachable and self.token is None:
            raise ValueError(
                "a worker that other machines can reach needs the join token of its gateway: set "
                "PACELINE_JOIN_TOKEN, use --token, or pair it with `paceline join`"
            )
        return self

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        if self.group is None:
            if self.split is not None:
                raise ValueError("--split is of a group: use --group HOSTS.json")
            return self
        given = self.model_fields_set & _NOT_OF_A_GROUP
        if given:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
            raise ValueError(f"{names} cannot be used with --group")
        return self

    @property
    def joins_another_machine(self) -> bool:
        """Whether the gateway runs on another machine."""
        return bool(self.join) and not is_loopback(urlsplit(self.join).hostname or "")

    @property
    def listening_host(self) -> str:
        """The host to listen on.

        All addresses for a gateway on another machine: the one that faces it may change.
        """
        if self.host or not self.joins_another_machine:
            return self.host or _DEFAULT_HOST
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # needs the token

    @property
    def follows_route(self) -> bool:
        """Whether gateways get the address that faces them, since the owner has set none."""
        return bool(self.join) and self.listening_host in WILDCARDS


def prefix_cache_on_disk(settings: WorkerSettings) -> tuple[Path | None, bytes]:
    """Return the folder of the prefix cache, and the secret that authenticates its files.

    None: memory only, as the settings say, or since other users may write the state folder or it
    cannot be used, which is logged. The secret is derived from the join token; without one it is a
    file of the state folder.
    """
    state = settings.state_dir.expanduser()
    folder = state / "prefix-cache"
    if not settings.prefix_cache_gb:
        return None, b""
    try:
        make_private(folder)
        if stat.S_IMODE(folder.stat().st_mode) != stat.S_IRWXU:
            folder.chmod(stat.S_IRWXU)
        if settings.token is not None:
            token = settings.token.get_secret_value().encode()
            return folder, hmac.digest(token, b"paceline prefix cache", "sha256")
        return folder, _stored_secret(state)
    except OSError as error:
        logger.warning("prefix_cache.memory_only folder=%s reason=%s", folder, error.strerror)
        return None, b""


def _stored_secret(state: Path) -> bytes:
    """Return the secret in the state folder, a new one at the first start; raise `OSError`."""
    make_private(state)
    path = state / "prefix-cache-secret"
    if not path.exists():
        replace_file(path, secrets.token_hex(32))
    check_private(path)
    if not (secret := path.read_bytes()):
        raise OSError(errno.EINVAL, f"{path} is empty; delete the file to create a new one")
    return secret
