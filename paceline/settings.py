"""Settings from flags, the environment and `paceline.yaml`, alike for gateways and workers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, YamlConfigSettingsSource

from paceline.error_messages import closest, message_of
from paceline.terminal import printable

_DEFAULT_FILE = Path("paceline.yaml")
# ${NAME} anywhere, or $NAME as the whole or as the first part of a path.
_REFERENCE = re.compile(r"\$\{\w+[^}]*\}|^\$[A-Z_][A-Z0-9_]*(/|$)")
# Variables that are no settings: of both processes, of a stack with Docker, and of clients.
_OTHERS = ("config", "terminal", "publish", "key")
_NO_ALIASES: Mapping[str, str] = {}

AnySettings = TypeVar("AnySettings", bound=BaseSettings)


class InvalidSettings(Exception):
    """Settings that cannot work; the message is written for the person who starts the process."""


def load_layered(
    settings: type[AnySettings],
    flags: Mapping[str, object],
    config: Path | None = None,
    *,
    section: str | None = None,
    flag_names: Mapping[str, str] = _NO_ALIASES,
) -> AnySettings:
    """Return the settings: flags win over the environment, and both over the file.

    The file is `config`, else `PACELINE_CONFIG`, else `paceline.yaml` if it exists; `section` is
    the part of it that holds these settings (None: all). `flag_names` maps settings to flags of
    another name. Raises `InvalidSettings`, which names each wrong setting as the user wrote it.
    """
    if config is None and os.environ.get("PACELINE_CONFIG"):
        config = Path(os.environ["PACELINE_CONFIG"])
    if config is not None and not config.is_file():
        raise InvalidSettings(f"The configuration file {config} does not exist.")
    for variable, value in os.environ.items():
        if variable.startswith("PACELINE_") and _REFERENCE.search(value):
            raise InvalidSettings(f"{variable} names a variable, which Paceline does not expand.")
    file = _file_source(settings, config or _DEFAULT_FILE, section)

    class Layered(settings):  # type: ignore[valid-type, misc]  # mypy takes no variable for a base
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],  # noqa: ARG003
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            **_: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, *file

    try:
        return Layered(**flags)
    except ValidationError as invalid:
        raise InvalidSettings(_describe(invalid, settings, flags, section, flag_names)) from None


def unknown_variables(settings: type[BaseSettings]) -> list[str]:
    """Return a warning for each unknown variable with the prefix of these settings."""
    prefix, known = settings.model_config.get("env_prefix", ""), settings.model_fields
    warnings = []
    for name in sorted(os.environ):
        rest = name.lower().removeprefix(prefix.lower())
        own = name.upper().startswith(prefix) and rest not in known
        # Keys of engines have any name; a worker warns of its variables itself.
        if not own or rest in _OTHERS or rest.endswith("_api_key") or rest.startswith("worker_"):
            continue
        near = closest(rest, known).upper()
        advice = f"did you mean {prefix}{near}?" if near else "and it has no effect."
        warnings.append(f"{printable(name[:128])} is not a setting, {advice}")
    return warnings


def _file_source(
    settings: type[BaseSettings], file: Path, section: str | None
) -> tuple[YamlConfigSettingsSource] | tuple[()]:
    try:
        source = YamlConfigSettingsSource(settings, yaml_file=file, yaml_config_section=section)
        for path, text in _texts(source(), ()):
            if _REFERENCE.search(text):
                raise InvalidSettings(
                    f"'{path}' in the configuration file {file} names a variable, which "
                    "Paceline does not expand. Write the value, or set it in the environment."
                )
        return (source,)
    except KeyError:  # the section is not in the file
        return ()
    except (AttributeError, OSError, TypeError, ValueError, yaml.YAMLError):
        within = f"'{section}' in the" if section else "The"
        raise InvalidSettings(
            f"{within} configuration file {file} is not a YAML mapping."
        ) from None


def _texts(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the texts within a value of YAML, each with its path."""
    if isinstance(value, str):
        yield ".".join(path), value
    elif isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(part, (*path, str(name)))


def _describe(
    invalid: ValidationError,
    settings: type[BaseSettings],
    flags: Mapping[str, object],
    section: str | None,
    flag_names: Mapping[str, str],
) -> str:
    """Name each wrong setting as the user wrote it; never its value, which may be a secret."""
    prefix = settings.model_config.get("env_prefix", "")
    problems = []
    for error in invalid.errors(include_input=False, include_url=False):
        problem = message_of(error)
        if error["type"] == "extra_forbidden":
            near = closest(str(error["loc"][0]), settings.model_fields)
            problem = f"unknown setting, did you mean '{near}'?" if near else "unknown setting"
        if not error["loc"]:
            problems.append(problem)
            continue
        name = str(error["loc"][0])
        variable = name if name.startswith("PACELINE_") else f"{prefix}{name.upper()}"
        if name in flags:
            source = f"--{flag_names.get(name, name).replace('_', '-')}"
        elif variable in os.environ:
            source = variable
        else:
            path = ".".join(str(part) for part in error["loc"])
            within = f"section '{section}' of the" if section else "the"
            source = f"'{path}' in {within} configuration file"
        problems.append(f"{source}: {problem}")
    text = f"Invalid settings: {'; '.join(problems)}"
    return text if text.endswith("?") else f"{text}."
