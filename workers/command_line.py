"""The commands of this package, each in its own process, which replaces `paceline NAME`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import shell_complete

from paceline.command_line import COMPLETION_VARIABLE, Command, describe_usage_error
from paceline.installation import missing_worker
from paceline.protocol import ExitCode
from paceline.terminal import printable


def run_command(command: Command, arguments: Sequence[str]) -> int:
    """Run a command, print its help or complete it; return the exit code."""
    name = f"paceline {command.name}"
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        program = click.Group("paceline", {str(command.name): command})
        return shell_complete(program, {}, "paceline", COMPLETION_VARIABLE, instruction)
    try:
        with command.make_context(name, list(arguments)) as context:
            if lack := missing_worker():
                sys.stderr.write(printable(f"{name}: {lack}\n"))
                return ExitCode.SETTINGS
            exit_code: int = command.invoke(context)
    except click.exceptions.Exit as end:  # after `--help`
        return end.exit_code
    except click.UsageError as error:
        sys.stderr.write(printable(f"{name}: {describe_usage_error(error)}\n"))
        return ExitCode.SETTINGS
    return exit_code
