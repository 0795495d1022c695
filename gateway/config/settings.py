"""Settings of the gateway: flags before `PACELINE_*` before `paceline.yaml` before defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gateway.config.static_workers import ListedWorker
from gateway.errors import StartupError

_DEFAULT_FILE = Path("paceline.yaml")
# `paceline worker` reads the same file, and from it this section alone.
_SECTIONS_OF_OTHERS = frozenset(("worker",))


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

    workers: Annotated[tuple[ListedWorker, ...], NoDecode] = ()
    """OpenAI-compatible servers that are listed by hand."""

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
    """Read flags (None: not given), environment and file; raise `StartupError` naming the fault.

    The file is `config`, else `PACELINE_CONFIG`, else `paceline.yaml` where it exists.
    """
    named = config or (
        Path(os.environ["PACELINE_CONFIG"]) if os.getenv("PACELINE_CONFIG") else None
    )
    file = named or _DEFAULT_FILE
    if named is not None and not named.is_file():
        raise StartupError(f"The configuration file {named} does not exist.")
    written = _read_file(file)

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                init_settings,
                env_settings,
                InitSettingsSource(settings_cls, written),
            )

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Layered(**given)  # type: ignore[arg-type]  # checked by pydantic
    except ValidationError as invalid:
        raise StartupError(_sentence(invalid, given)) from None


def _read_file(file: Path) -> dict[str, Any]:
    """Read what the file says to the gateway; nothing where there is no file."""
    try:
        written = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
    except (OSError, ValueError, yaml.YAMLError):
        written = ()
    if not isinstance(written, dict | None):
        raise StartupError(f"The configuration file {file} is not a YAML mapping.")
    sections = written or {}
    return {str(name): sections[name] for name in sections if name not in _SECTIONS_OF_OTHERS}


def _sentence(invalid: ValidationError, flags: dict[str, object]) -> str:
    """Name each wrong setting as the user wrote it; never repeat its value, it may be a key."""
    problems = []
    for error in invalid.errors(include_input=False, include_url=False):
        name = ".".join(str(part) for part in error["loc"])
        variable = f"PACELINE_{name.upper()}"
        if name in flags:
            spelled = f"--{name.replace('_', '-')}"
        elif variable in os.environ:
            spelled = variable
        else:
            spelled = f"'{name}' in the configuration file"
        what = "unknown setting" if error["type"] == "extra_forbidden" else error["msg"]
        problems.append(f"{spelled}: {what}")
    return "The settings are not usable: " + "; ".join(problems) + "."
