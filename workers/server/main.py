"""`paceline worker`: its command line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from paceline.command_line import describe_usage_error, worker_command
from paceline.config_file import InvalidSettings, load_layered
from paceline.protocol import ExitCode
from paceline.terminal import configure_logging, printable
from workers.server.settings import WorkerSettings


def main(arguments: Sequence[str]) -> int:
    """Run a worker until its end; return the exit code."""
    configure_logging(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    try:
        settings = read_settings(arguments)
    except click.exceptions.Exit as end:  # after `--help`
        return end.exit_code
    except (InvalidSettings, click.UsageError) as error:
        problem = describe_usage_error(error) if isinstance(error, click.UsageError) else error
        sys.stderr.write(printable(f"paceline worker: {problem}\n"))
        return ExitCode.SETTINGS
    from workers.server.start import start  # noqa: PLC0415  # takes a second: not for a wrong flag

    return start(settings)


def read_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Return the settings of a command line; raise `InvalidSettings` naming each wrong one."""
    command = worker_command()
    with command.make_context("paceline worker", list(arguments)) as context:
        flags = {name: value for name, value in context.params.items() if value}
    config = flags.pop("config", None)
    return load_layered(
        WorkerSettings,
        flags,
        Path(config) if config else None,
        section="worker",
        flag_names={"labels": "label"},
    )
