"""The settings of a worker, and which of them cannot go together.

Who a worker is on the network: its name, and the address others reach it at.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from policies.base import Label
from workers.config_file import InvalidSettings
from workers.engine.types import LaneName
from workers.protocol import is_loopback

DEFAULT_HOST = "127.0.0.1"
_WILDCARDS = frozenset(("0.0.0.0", "::", ""))  # noqa: S104 - recognised, not listened on


def default_worker_id(hostname: str, port: int) -> str:
    """Name a worker after its machine and port: stable over restarts, two on one host differ."""
    short = re.sub(r"[^A-Za-z0-9-]+", "-", hostname.partition(".")[0]).strip("-") or "worker"
    return f"{short[:50]}-{port}"


def source_address_towards(url: str) -> str:
    """Return this machine's address as the host of `url` sees it; raise OSError without a way."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, protocol, _, address = socket.getaddrinfo(
        parts.hostname, port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket only picks a route here, nothing is sent
        return str(probe.getsockname()[0])


def advertised_url(host: str, port: int, gateway_url: str | None) -> str:
    """Return the URL a gateway reaches this worker at, when it listens on `host`."""
    if host in _WILDCARDS:
        host = source_address_towards(gateway_url) if gateway_url else socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


DEFAULT_PORT = 9200


class WorkerSettings(BaseSettings):
    """Everything a worker is told at its start."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_WORKER_",  # PACELINE_HOST and PACELINE_PORT are the gateway's
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
    )

    model: str = ""
    """A folder or a Hugging Face repository; empty stands for the demo checkpoint."""
    lanes: Annotated[tuple[LaneName, ...], NoDecode] = (LaneName.TEXT_MTP, LaneName.VLM)
    host: str = ""
    """Empty: loopback, or the address towards the gateway when that is another machine."""
    port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    join: str = ""
    """URL of the gateway to report to."""
    token: SecretStr | None = Field(None, validation_alias="PACELINE_JOIN_TOKEN")
    id: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    labels: Annotated[tuple[Label, ...], NoDecode] = ()
    """What the policy may choose it by; with commas between, in the environment."""
    draft_tokens: int = Field(2, ge=0, le=8)
    prefix_cache_dir: Path | None = None
    """Where what was read of system prompts outlives the process."""
    prefix_cache_bytes: int = Field(1 << 30, ge=0)
    """For snapshots of system prompts: this much memory, and this much disk."""
    spec_prefill: str = ""
    """A folder or a Hugging Face repository of a small model with the same vocabulary."""
    spec_prefill_threshold: int = Field(8192, ge=1)
    spec_prefill_keep: float = Field(0.3, gt=0, le=1)
    leash: bool = False
    """End when standard input closes: how a parent takes its worker along, however it dies."""

    @field_validator("lanes", mode="before")
    @classmethod
    def _split_lanes(cls, value: object) -> object:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names:
            raise ValueError("name at least one lane")
        return tuple(dict.fromkeys(str(name).strip() for name in names))

    @field_validator("labels", mode="before")
    @classmethod
    def _split_labels(cls, value: object) -> object:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            raise ValueError("must be a list of labels")
        return tuple(dict.fromkeys(str(name).strip() for name in names))

    @field_validator("join")
    @classmethod
    def _check_join(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must be the URL of a gateway, as http://192.168.1.10:8000")
        return value.rstrip("/")

    @field_validator("token")
    @classmethod
    def _empty_token_is_none(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value and value.get_secret_value() else None

    @model_validator(mode="after")
    def _guard_the_network(self) -> Self:
        if self.joins_another_machine and is_loopback(self.host):
            raise ValueError(
                f"the gateway at {self.join} cannot reach {self.host}: leave --host out, or name "
                "an address of this machine"
            )
        open_to_others = self.joins_another_machine or not is_loopback(self.host or DEFAULT_HOST)
        if open_to_others and self.token is None:
            raise ValueError(
                "a worker that other machines reach needs the join token of its gateway: give "
                "--token, or set PACELINE_JOIN_TOKEN"
            )
        return self

    @property
    def joins_another_machine(self) -> bool:
        """Say whether the gateway runs elsewhere."""
        return bool(self.join) and not is_loopback(urlsplit(self.join).hostname or "")

    def listening_host(self) -> str:
        """Return the host to listen on; raise `InvalidSettings` where no way leads out."""
        if self.host or not self.joins_another_machine:
            return self.host or DEFAULT_HOST
        try:
            return source_address_towards(self.join)
        except OSError as error:
            raise InvalidSettings(f"No way leads to the gateway at {self.join}.") from error
