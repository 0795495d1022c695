"""Settings of the gateway: flags before `PACELINE_*` before `paceline.yaml` before defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    SettingsConfigDict,
)

from gateway.config.static_workers import StaticWorker
from gateway.errors import StartupError
from workers.config_file import InvalidSettings, load_layered


class Settings(BaseSettings):
    """What one gateway process is told at its start; nothing of it changes later."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_", env_ignore_empty=True, extra="forbid", frozen=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes any free port."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    """A port of its own for what only admins may do; None leaves that on `port`."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Names that clients may ask under, beside addresses and this machine's own names."""
    policy: Path | None = None
    """The policy file; None begins with the shipped one."""
    state_dir: Path = Path("~/.paceline")
    """Where the join token, the versions of the policy, keys and their usage are kept."""

    api_key: SecretStr | None = None
    """One key of the data plane without limits, beside those that admins make."""
    admin_key: SecretStr | None = None
    """Demanded on the admin plane; without it only this machine may use that plane."""
    join_token: SecretStr | None = None
    """Shared with the workers; made and kept in `state_dir` when it is not set."""

    redis_url: SecretStr | None = None
    """Where several gateways share keys, policy, workers, limits and counts; None shares nothing.
    It may hold a password."""

    traces: Literal["off", "otlp"] = "off"
    """Whether spans are sent to the OpenTelemetry collector that `OTEL_EXPORTER_OTLP_ENDPOINT`
    names; needs the extra `otel`."""
    access_log: str = ""
    """Where a line of JSON is written for each request: a file, `-` for standard output, or
    nowhere."""

    workers: Annotated[tuple[StaticWorker, ...], NoDecode] = ()
    """OpenAI-compatible servers that are listed by hand."""
    worker: object = None
    """The section of the file that `paceline worker` reads; a gateway ignores it."""

    head_timeout_s: float = Field(default=15.0, gt=0)
    """The longest that a client may take to send the headers of a request."""
    body_limit_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    """Room for a dozen photographs as base64."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    connect_timeout_s: float = Field(default=2.0, gt=0)
    answer_timeout_s: float = Field(default=600.0, gt=0)
    """A whole answer, or the first byte of a stream: a long prompt on a small Mac takes minutes."""
    idle_timeout_s: float = Field(default=120.0, gt=0)
    """The longest pause inside a stream."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """A whole request, from its body to the last byte of its answer."""
    write_timeout_s: float = Field(default=30.0, gt=0)
    """How long a client may read nothing of what waits for it."""
    requests_limit: int = Field(default=1024, gt=0)
    """Generating requests at a time; one more is refused at once."""
    lame_duck_s: float = Field(default=5.0, ge=0)
    """How long new requests are still served after SIGTERM, until load balancers have noticed."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long running answers may go on once the gateway was asked to end."""

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """Take names from the environment as people write them: with commas between."""
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    def with_join_token(self, token: str) -> Self:
        """Return the same settings with this join token."""
        return self.model_copy(update={"join_token": SecretStr(token)})


def load_settings(config: Path | None = None, **flags: object) -> Settings:
    """Read flags (None: not given), environment and file; raise `StartupError` naming the fault."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return load_layered(Settings, given, config)
    except InvalidSettings as invalid:
        raise StartupError(str(invalid)) from None
