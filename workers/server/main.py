"""`paceline worker`: its command line, with a flag for each setting."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from paceline.command_line import CONTEXT, Command, model_problem
from paceline.protocol import ExitCode
from paceline.settings import InvalidSettings, load_layered, unknown_variables
from paceline.terminal import configure_logging, printable
from workers.command_line import run_command
from workers.settings import WorkerSettings

_FLAGS = {"labels": "label"}
"""Flags that are not named as their setting."""


def main(arguments: Sequence[str]) -> int:
    """Run a worker until its end; return the exit code."""
    configure_logging(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    return run_command(worker_command(_run), arguments)


def _run(**given: Any) -> int:
    try:
        settings = _settings_of(**given)
    except InvalidSettings as error:
        sys.stderr.write(printable(f"paceline worker: {error}\n"))
        return ExitCode.SETTINGS
    for named in (settings.model, settings.adapter, settings.mtp, settings.spec_prefill):
        if named and (problem := model_problem(named)):
            sys.stderr.write(printable(f"paceline worker: {problem}\n"))
            return ExitCode.MODEL
    for warning in unknown_variables(WorkerSettings):
        sys.stderr.write(f"paceline worker: {warning}\n")
    from workers.server.start import start  # noqa: PLC0415  # takes a second: not for a wrong flag

    return start(settings)


def read_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Return the settings of a command line; raise `InvalidSettings` naming each wrong one."""
    command = worker_command(_settings_of)
    with command.make_context("paceline worker", list(arguments)) as context:
        settings: WorkerSettings = command.invoke(context)
    return settings


def _settings_of(*, config: str | None, **given: Any) -> WorkerSettings:
    flags = {name: value for name, value in given.items() if value}
    file = Path(config) if config else None
    return load_layered(WorkerSettings, flags, file, section="worker", flag_names=_FLAGS)


def worker_command(run: Callable[..., Any]) -> Command:
    """Return the command of a worker, whose flags are the settings with their docstrings.

    The flags are text, and None if absent: `WorkerSettings` checks the values, wherever they come
    from.
    """
    fields = WorkerSettings.model_fields.items()
    flags = [_flag(name, field) for name, field in fields if name not in ("nodes_key", "state_dir")]
    file = click.Option(
        ["--config"], metavar="FILE", help="Settings file (default: paceline.yaml)."
    )
    return Command(
        "worker",
        callback=run,
        context_settings={**CONTEXT},
        help="Serve a model on this machine: text with speculative decoding, and images if the "
        "model supports them.",
        params=[*flags, file],
    )


def _flag(name: str, field: FieldInfo) -> click.Option:
    text = " ".join((field.description or "").split())
    if field.default and "(default: " not in text:
        default = f"{field.default:g}" if isinstance(field.default, float) else field.default
        text = f"{text.removesuffix('.')} (default: {default})."
    flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
    if field.annotation is bool:
        return click.Option([flag, name], is_flag=True, help=text)
    metavar = name.rpartition("_")[2].upper()
    return click.Option([flag, name], multiple=name in _FLAGS, metavar=metavar, help=text)
