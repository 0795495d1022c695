"""Command lines: limits of their values, and wrong usage in plain words; imports only click."""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

CONTEXT: Mapping[str, Any] = {"help_option_names": ("-h", "--help"), "max_content_width": 100}
COMPLETION_VARIABLE = "_PACELINE_COMPLETE"


class Command(click.Command):
    """A command whose errors name it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raise `UsageError` for a surplus one and for an empty value too."""
        ctx.allow_extra_args = True
        try:
            surplus = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        if surplus and not ctx.resilient_parsing:
            raise click.UsageError(f"unexpected argument '{surplus[0]}'.", ctx)
        for option in self.params:
            # As of a variable of the shell that is not set.
            if ctx.params.get(option.name or "") in ("", ("",)) and option.default != "":
                raise click.BadParameter("the value is empty", ctx, option)
        return surplus


_LONGEST_S = 3600
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def model_problem(named: str) -> str:
    """Return the problem with the folder or Hugging Face name of a model, or an empty text."""
    try:
        folder = Path(named).expanduser()
        if named and folder.is_dir():
            known = any(folder.glob("*config.json"))
            return "" if known else f"The folder {named} has no model: its config.json is missing."
    except (OSError, RuntimeError, ValueError):  # no name of a file, or of a user's folder
        pass
    if _REPOSITORY.fullmatch(named):
        return ""
    return f"'{named}' is neither a folder nor the name of a Hugging Face repository."


def is_own(host: str) -> bool:
    """Return whether a host is this machine: a server can listen on all its addresses."""
    from paceline.addresses import WILDCARDS, is_loopback  # noqa: PLC0415  # pydantic: not for help

    if host in WILDCARDS or is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
    except (OSError, UnicodeError):
        return False
    return True


def seconds_from(lowest_s: float) -> Callable[[str], float]:
    """Return a parser of a time limit between this and an hour."""

    def parse(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not lowest_s <= seconds <= _LONGEST_S:
            raise click.BadParameter(
                f"'{text}' is not a time between {lowest_s:g} and {_LONGEST_S} seconds"
            )
        return seconds

    return parse


def describe_usage_error(error: click.UsageError) -> str:
    """Return the problem with a command line, and the command that shows its help."""
    match error:
        case click.NoSuchCommand(command_name=name, possibilities=known):
            problem = f"There is no command '{name}'{_meant(name, known)}"
        case click.NoSuchOption(option_name=name, possibilities=known):
            problem = f"There is no option '{name}'{_meant(name, known)}"
        case click.MissingParameter(param=click.Parameter() as parameter):
            problem = f"{_name(parameter)} is missing."
        case click.BadParameter(param=click.Parameter() as parameter):
            problem = f"{_name(parameter)}: {error.message.removesuffix('.')}."
        case click.BadOptionUsage(ctx=click.Context() as context, option_name=name):
            problem = f"{name} {'takes no' if _is_flag(context, name) else 'needs a'} value."
        case _:
            problem = error.message
    return f"{problem} See `{error.ctx.command_path} --help`." if error.ctx else problem


def _meant(name: str, known: Iterable[str] | None) -> str:
    """Return the end of a sentence on an unknown name: the most similar known one."""
    # Without the dashes, which make all options alike.
    by_word = {one.lstrip("-"): one for one in known or ()}
    close = difflib.get_close_matches(name.lstrip("-"), by_word, 1)
    return f"; did you mean '{by_word[close[0]]}'?" if close else "."


def _name(parameter: click.Parameter) -> str:
    """Return a parameter as the user writes it."""
    is_option = isinstance(parameter, click.Option)
    return max(parameter.opts, key=len) if is_option else parameter.human_readable_name


def _is_flag(context: click.Context, name: str) -> bool:
    return any(
        isinstance(option, click.Option) and option.is_flag and name in option.opts
        for option in context.command.params
    )
