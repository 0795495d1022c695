"""Settings of a worker, with the defaults of its name and address."""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import socket
import stat
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from paceline.addresses import WILDCARDS, is_loopback
from paceline.config_file import InvalidSettings, check_private, make_private
from paceline.names import Label
from paceline.protocol import MAX_LABELS
from workers.engine.types import LaneName, WeightType
from workers.group.hosts import Backend, Split

logger = logging.getLogger(__name__)

_DEFAULT_HOST = "127.0.0.1"
_NOT_OF_A_GROUP = frozenset(
    ("task", "lanes", "adapter", "dtype", "draft_tokens", "mtp", "spec_prefill")
)


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
    )

    model: str = ""
    """A folder or a Hugging Face repository; empty: the demo checkpoint."""
    task: Literal["generate", "embeddings", "rerank"] | None = None
    """What the model is served for; None: what its folder tells."""
    lanes: Annotated[tuple[LaneName, ...], NoDecode] = (LaneName.TEXT_MTP, LaneName.VLM)
    host: str = ""
    """Empty: loopback, or all addresses if it joins a gateway on another machine."""
    port: int = Field(9200, ge=0, le=65535)
    join: str = ""
    """URL of the gateway that receives the heartbeats."""
    token: SecretStr | None = Field(None, validation_alias="PACELINE_JOIN_TOKEN")
    id: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    labels: Annotated[tuple[Label, ...], NoDecode] = Field((), max_length=MAX_LABELS)
    """Labels for pools of the policy; comma-separated in the environment."""
    adapter: str = ""
    """A folder or a Hugging Face repository of a LoRA adapter; empty: the model alone."""
    dtype: WeightType | None = None
    """Type of the weights that are not quantised; None: as they are stored."""
    context: int | None = Field(None, ge=256, le=1 << 30)
    """Limit of prompt and answer together, in tokens; None: what the model was trained for."""
    rows: int = Field(8, ge=1, le=64)
    """Requests that decode together in one lane."""
    prefill_chunk: int = Field(1024, ge=64, le=65_536)
    """Tokens of a prompt in one pass while no row decodes."""
    draft_tokens: int = Field(2, ge=0, le=8)
    mtp: str = ""
    """A folder or a Hugging Face repository with an MTP head for the model."""
    prefix_cache_dir: Path | None = None
    """Folder that stores the prefix cache across restarts; None: one in the state folder."""
    prefix_cache_bytes: int | None = Field(None, ge=0)
    """Limit of the prefix cache in memory; None: a share of what the weights leave."""
    kv_bits: KvBits = KvBits.SIXTEEN
    """Bits of the keys and values that the prefix cache keeps; 16: as the model computes them."""
    prefix_cache_gb: float = Field(20.0, ge=0, le=100_000)
    """Limit of the prefix cache on disk, in units of a billion bytes; 0 stores nothing there."""
    spec_prefill: str = ""
    """A folder or a Hugging Face repository of a draft model with the same vocabulary."""
    spec_prefill_threshold: int = Field(8192, ge=1)
    spec_prefill_keep: float = Field(0.3, gt=0, le=1)
    state_dir: Path = Field(Path("~/.paceline"), validation_alias="PACELINE_STATE_DIR")
    """Holds the prefix cache, and its secret where there is no join token."""
    group: Path | None = None
    """Host file of the machines that serve the model together; None: this machine alone."""
    backend: Backend = Backend.RING
    split: Split | None = None
    """How they divide the model; None: by tensors where it can be, else by layers."""
    leash: bool = False
    """Shut down when standard input closes, so that no worker outlives its parent process."""

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
                "PACELINE_JOIN_TOKEN, or use --token"
            )
        return self

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        if self.group is None:
            if self.model_fields_set & {"backend", "split"}:
                raise ValueError("--backend and --split are of a group: use --group HOSTS.json")
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

    None: memory only. The default folder is of the state folder; if it cannot be used, that is
    logged. The secret is derived from the join token; without one it is a file of the state folder.
    Raises `InvalidSettings` if a folder that the owner names cannot be kept from other users.
    """
    if not settings.prefix_cache_gb:
        return None, b""
    given = settings.prefix_cache_dir
    folder = settings.state_dir.expanduser() / "prefix-cache" if given is None else given
    try:
        return folder, _prefix_cache_secret(settings, folder)
    except InvalidSettings as error:
        if given is not None:
            raise
        logger.warning("prefix_cache.memory_only reason=%s", error)
        return None, b""


def _prefix_cache_secret(settings: WorkerSettings, folder: Path) -> bytes:
    try:
        make_private(folder)
        if stat.S_IMODE(folder.stat().st_mode) != stat.S_IRWXU:
            folder.chmod(stat.S_IRWXU)
        if settings.token is not None:
            token = settings.token.get_secret_value().encode()
            return hmac.digest(token, b"paceline prefix cache", "sha256")
        folder = settings.state_dir.expanduser()
        make_private(folder)
        path = folder / "prefix-cache-secret"
        if not path.exists():
            draft = folder / f".prefix-cache-secret-{os.getpid()}"
            draft.touch(mode=0o600)
            draft.write_text(secrets.token_hex(32))
            draft.replace(path)
        check_private(path)
        secret = path.read_bytes()
    except OSError as error:
        raise InvalidSettings(
            f"The prefix cache cannot use the folder {folder}: {error.strerror}."
        ) from error
    if not secret:
        raise InvalidSettings(f"{path} is empty. Delete the file to create a new one.")
    return secret


def default_worker_id(hostname: str, port: int) -> str:
    """Return a name made of host name and port: stable over restarts, unique on its machine."""
    short = re.sub(r"[^A-Za-z0-9-]+", "-", hostname.partition(".")[0]).strip("-") or "worker"
    return f"{short[:50]}-{port}"
