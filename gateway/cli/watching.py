"""Look at a gateway again and again: one screen on a terminal, one report after another to a pipe.

A gateway that goes away is no end: what it last said stays on the screen, marked as old, and the
first answer after its return takes its place.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.cli.client import NoAnswer, read_gateway

Draw = Callable[[Mapping[str, Any]], RenderableType]
_PATIENCE_S = 5.0


def watch(url: str, every_s: float, *, draw: Draw | None) -> int:
    """Show the state of a gateway until Ctrl-C, which is the good end of it.

    Without `draw` each state is printed as one line of JSON.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if draw is None:
            _print_lines(url, every_s)
        else:
            _show(Console(highlight=False), _pictures(url, every_s, draw))
    return 0


def _show(console: Console, pictures: Iterator[RenderableType]) -> None:
    if console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for shown in pictures:
                live.update(shown, refresh=True)
    else:
        for shown in pictures:
            console.print(shown, "")


def _print_lines(url: str, every_s: float) -> None:
    for state, problem in _looks(url, every_s):
        if state is None:
            sys.stderr.write(f"paceline: {problem}\n")
        else:
            sys.stdout.write(json.dumps(state) + "\n")
            sys.stdout.flush()


def _pictures(url: str, every_s: float, draw: Draw) -> Iterator[RenderableType]:
    """Draw each state under a line that says when it was; an old one is dim."""
    last: tuple[datetime, Mapping[str, Any]] | None = None
    for state, problem in _looks(url, every_s):
        now = datetime.now().astimezone()
        head = Text(f"{url}  {now:%H:%M:%S}  every {every_s:g} s", style="dim")
        if state is not None:
            last = now, state
            yield Group(head, draw(state))
            continue
        away = Text(problem, style="red")
        if last is None:
            yield Group(head, away)
        else:
            away.append(f" This is how it was at {last[0]:%H:%M:%S}:")
            yield Group(head, away, draw(last[1]))


def _looks(url: str, every_s: float) -> Iterator[tuple[Mapping[str, Any] | None, str]]:
    """Yield a state, or why there is none, at each turn."""
    while True:
        try:
            yield read_gateway(url, "GET", "/v1/status", timeout=_PATIENCE_S), ""
        except NoAnswer as reason:
            yield None, str(reason)
        time.sleep(every_s)
