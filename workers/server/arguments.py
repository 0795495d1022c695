"""The command line of a worker; flags win over the environment, that over `paceline.yaml`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from workers.server.settings import UnusableSettings, WorkerSettings

_DEFAULT_FILE = Path("paceline.yaml")
_SECTION = "worker"
_SPELLED = {"labels": "--label"}
"""Flags that are not called as their settings are."""


def read_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Read flags, environment and file; raise `UnusableSettings` naming each wrong setting.

    The file is `--config`, else `PACELINE_CONFIG`, else `paceline.yaml` where it exists.
    """
    flags = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value}
    written = _read_section(flags.pop("config", None) or os.environ.get("PACELINE_CONFIG"))

    class Layered(WorkerSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, written)

    try:
        return Layered(**flags)
    except ValidationError as invalid:
        raise UnusableSettings(_sentence(invalid, flags, written)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline worker",
        description="Serve one MLX model on this machine, with a lane that speculates and one "
        "that sees pictures.",
        argument_default=None,
    )
    add = parser.add_argument
    add("--model", help="folder or Hugging Face name of an MLX model (default: a toy model)")
    add("--lanes", help="comma-separated lanes to run (default: text-mtp,vlm)")
    add("--host", help="address to listen on (default: loopback, or the one facing the gateway)")
    add("--port", help="port to listen on (default: 9200; 0 takes a free one)")
    add("--join", metavar="URL", help="gateway to report to")
    add("--token", help="join token of the gateway (better: PACELINE_JOIN_TOKEN)")
    add("--id", help="name of this worker (default: machine and port)")
    add("--label", action="append", dest="labels", help="what a policy may choose it by; repeat it")
    add("--draft-tokens", metavar="K", help="tokens drafted a step, 0 to 8 (default: 2)")
    add("--snapshot-dir", metavar="DIR", help="keep read system prompts across restarts")
    add("--snapshot-bytes", metavar="N", help="for read system prompts (default: 1 GiB)")
    add("--spec-prefill", metavar="DRAFT", help="small model that chooses what to read of prompts")
    add("--spec-prefill-threshold", metavar="N", help="shortest prompt it is for (default: 8192)")
    add("--spec-prefill-keep", metavar="SHARE", help="share that is read, up to 1 (default: 0.3)")
    add("--config", metavar="FILE", help="settings file, section 'worker' (default: paceline.yaml)")
    add("--leash", action="store_true", help="end when standard input closes")
    return parser


def _read_section(named: str | None) -> dict[str, Any]:
    file = Path(named) if named else _DEFAULT_FILE
    try:
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise UnusableSettings(f"The configuration file {file} does not exist.") from None
        return {}
    except (OSError, ValueError, yaml.YAMLError):
        raise UnusableSettings(f"The configuration file {file} cannot be read as YAML.") from None
    section = written.get(_SECTION) if isinstance(written, Mapping) else written
    if section is not None and not isinstance(section, Mapping):
        raise UnusableSettings(f"'{_SECTION}' in {file} must be a mapping.")
    return dict(section or {})


def _sentence(
    invalid: ValidationError, flags: Mapping[str, object], written: Mapping[str, object]
) -> str:
    """Name each wrong setting as the user wrote it; never its value, which may be a secret."""
    problems = []
    for error in invalid.errors(include_input=False, include_url=False):
        name = str(error["loc"][0]) if error["loc"] else ""
        text = error["msg"].removeprefix("Value error, ")
        if not name:
            problems.append(text)
            continue
        spelled = f"'{name}' in the section '{_SECTION}' of the configuration file"
        if name in flags:
            spelled = _SPELLED.get(name, f"--{name.replace('_', '-')}")
        elif name not in written:
            spelled = name if name.startswith("PACELINE_") else f"PACELINE_WORKER_{name.upper()}"
        problems.append(f"{spelled}: {text}")
    return "The settings are not usable: " + "; ".join(problems) + "."
