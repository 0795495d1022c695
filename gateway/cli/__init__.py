"""The command `paceline`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from gateway.cli.commands import PROGRAM, paceline
from paceline.command_line import COMPLETION_VARIABLE, describe_usage_error


class CommandError(Exception):
    """A command cannot go on; the message is one sentence for a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = tuple(sys.argv[1:] if argv is None else argv)
    try:
        exit_code = _run(arguments)
        sys.stdout.flush()
        return exit_code
    except click.UsageError as error:
        sys.stderr.write(f"{_terminal_line(describe_usage_error(error))}\n")
        sys.exit(2)
    except CommandError as error:
        sys.exit(_terminal_line(error))
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        from gateway.errors import StartupError  # noqa: PLC0415  # loads pydantic: not for `--help`

        if not isinstance(error, StartupError):
            raise
        sys.stderr.write(f"{_terminal_line(error)}\n")
        return 2


def _run(arguments: Sequence[str]) -> int:
    """Run one command, print its help or complete it."""
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from click.shell_completion import shell_complete  # noqa: PLC0415  # seldom needed

        return shell_complete(paceline, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    # Not by `main` of click, which has its own ways with Ctrl-C and closed pipes.
    try:
        with paceline.make_context(PROGRAM, list(arguments), obj=arguments) as context:
            exit_code: int = paceline.invoke(context)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    return exit_code


def _terminal_line(message: object) -> str:
    from paceline.terminal import printable  # noqa: PLC0415  # loads `logging`: not for `--help`

    return printable(f"{PROGRAM}: {message}")
