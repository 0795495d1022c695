"""Settings of the gateway: flags override `PACELINE_*`, which override `paceline.yaml`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.config.static_workers import StaticWorker
from gateway.errors import StartupError
from paceline.settings import InvalidSettings, load_layered


def _origin(value: str) -> str:
    if not _ORIGIN.fullmatch(value):
        raise ValueError("must be an origin such as https://app.example.com, without a path")
    if _DEFAULT_PORT.fullmatch(value):
        raise ValueError(f"'{value}' never matches, because browsers omit the default port")
    return value


def _host(value: str) -> str:
    name = value.lower().removesuffix(".")
    if not _HOST.fullmatch(name):
        raise ValueError(
            f"'{value[:100]}' must be a host name such as paceline.example.com, without '*', "
            "scheme, port or path"
        )
    return name


# Desktop apps and extensions of browsers have schemes of their own, such as `chrome-extension`.
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]{0,31}://([a-z0-9.-]{1,253}|\[[0-9a-f:]{2,45}\])(:[0-9]{1,5})?"
)
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?|[0-9a-f]{0,4}:[0-9a-f:.]{1,43}")
Host = Annotated[str, AfterValidator(_host)]
Origin = Annotated[str, AfterValidator(_origin)]


class Settings(BaseSettings):
    """The settings of one gateway process; they do not change while it runs."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        defer_build=True,  # `load_layered` builds a subclass
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 chooses a free port."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    """A separate port for the admin API; None serves it on `port`."""
    allowed_hosts: Annotated[tuple[Host, ...], NoDecode] = ()
    """Host names that clients may use, besides addresses and the names of this machine."""
    allowed_origins: Annotated[tuple[Origin, ...], NoDecode] = Field(default=(), max_length=64)
    """Origins of web pages that may use the data plane in a browser, such as https://example.com."""
    announce: bool = True
    """Announce the gateway on the local network, so that `paceline join` finds it, unless it
    listens only on loopback."""
    policy: Path | None = None
    """The policy file; None starts with the shipped policy."""
    state_dir: Path = Path("~/.paceline")
    """The folder of the join token, the admin key, policy versions, API keys and their usage."""

    api_key: SecretStr | None = None
    """An API key without limits, in addition to the keys of admins."""
    admin_key: SecretStr | None = None
    """The key of the admin API; created in `state_dir` if not set."""
    join_token: SecretStr | None = None
    """The secret that workers join with; created in `state_dir` if not set."""

    redis_url: SecretStr | None = None
    """The Redis that several gateways share, with keys, policy, workers, limits and counts; None:
    no sharing. It may contain a password."""

    traces: Literal["off", "otlp"] = "off"
    """`otlp` sends spans to the OpenTelemetry collector at `OTEL_EXPORTER_OTLP_ENDPOINT`; needs the
    extra `otel`."""
    access_log: str = ""
    """A file for one JSON line per request, `-` for standard output, or empty for none."""

    workers: Annotated[tuple[StaticWorker, ...], NoDecode] = ()
    """Static workers: OpenAI-compatible servers."""
    worker: object = None
    """The section of the file that `paceline worker` reads; a gateway ignores it."""

    body_limit_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    """Enough for a dozen photographs as base64."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    connect_timeout_s: float = Field(default=2.0, gt=0)
    answer_timeout_s: float = Field(default=600.0, gt=0)
    """For a complete response, or the first byte of a stream: a long prompt on a small Mac takes
    minutes."""
    idle_timeout_s: float = Field(default=120.0, gt=0)
    """The longest pause within a stream."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """For a complete request, from its body to the last byte of the response."""
    requests_limit: int = Field(default=1024, gt=0)
    """Concurrent generating requests; further ones are rejected at once."""
    lame_duck_s: float = Field(default=5.0, ge=0)
    """After SIGTERM, new requests are served this long, until load balancers stop sending them."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """The longest time for running requests to finish during shutdown."""

    @field_validator("allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """Split a comma-separated list, as in the environment."""
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def load_settings(config: Path | None = None, **flags: object) -> Settings:
    """Read flags (None: not given), environment and file; raise `StartupError` if invalid."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return load_layered(Settings, given, config)
    except InvalidSettings as invalid:
        raise StartupError(str(invalid)) from None
