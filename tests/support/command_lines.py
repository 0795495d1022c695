"""Command lines: those of the documentation, and the parser that each must satisfy."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from gateway.cli.commands import PROGRAM, paceline
from workers.doctor.__main__ import doctor
from workers.server.main import read_settings, worker_command

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
PRODUCT = sorted(
    path
    for folder in ("gateway", "workers", "paceline", "policies", "deploy", "docs/grafana")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".js", ".html", ".yaml", ".yml", ".sh"} and "vendor" not in path.parts
)
"""Files whose sentences name commands too."""
SHELL = {"sh", "bash", "zsh", "shell", "console"}
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_ASSIGNED = re.compile(r"([A-Z_]+)=")


class CommandLine(NamedTuple):
    """A command of a page, such as `paceline status`."""

    page: str
    text: str
    program: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    """Those that the line sets for its command."""


def _split(page: Path, text: str) -> CommandLine:
    words = shlex.split(text, comments=True)
    variables = []
    while (assigned := _ASSIGNED.match(words[0])) is not None:
        variables.append((assigned[1], words.pop(0)[assigned.end() :]))
    program, *arguments = words
    name = str(page.relative_to(ROOT))
    program = program.removeprefix(".venv/bin/")
    return CommandLine(name, text, program, tuple(arguments), tuple(variables))


def lines_of_blocks() -> Iterator[CommandLine]:
    """Yield each command in the blocks of shell of all pages."""
    for page in PAGES:
        for language, block in _BLOCK.findall(page.read_text()):
            if language in SHELL:
                lines = map(str.strip, block.replace("\\\n", " ").splitlines())
                yield from (_split(page, line) for line in lines if line and line[0] != "#")


def lines_in_sentences() -> Iterator[CommandLine]:
    """Yield each command of Paceline that a page, a message or an alert has in its sentences."""
    for page in (*PAGES, *PRODUCT):
        prose = _BLOCK.sub("", page.read_text())
        for code in re.findall(r"`(\S[^`]*)`", prose):
            text = " ".join(code.split())
            if re.fullmatch(rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?{PROGRAM} [^={{$][^{{$]*", text):
                yield _split(page, text)


def check_usage(arguments: Sequence[str]) -> None:
    """Parse the arguments of `paceline`; raise `UsageError` or `InvalidSettings` if it would."""
    command: click.Command = paceline
    context = click.Context(paceline, info_name=PROGRAM)
    rest = list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name, *rest = rest
        if name not in command.commands:
            raise click.NoSuchCommand(name, ctx=context)
        command = {"worker": worker_command(print), "doctor": doctor}.get(
            name, command.commands[name]
        )
        context = click.Context(command, context, info_name=name)
    try:
        # `make_context` empties the list that it gets.
        command.make_context(context.info_name, [*rest], context.parent)
        if command.name == "worker":
            read_settings(rest)
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        return  # a version, a help, or the name of a group
