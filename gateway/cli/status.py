"""`paceline status`: lanes, workers and acceptance, as a table or as JSON.

Look at a gateway again and again: one screen on a terminal, one report after another to a pipe.

A gateway that goes away is no end: what it last said stays on the screen, marked as old, and the
first answer after its return takes its place.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.cli.client import NoAnswer, add_gateway_url, ask_gateway, read_gateway

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


_STATE_STYLES = {"ready": "green"} | dict.fromkeys(
    ("starting", "draining", "cordoned", "busy", "probation"), "yellow"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    add_gateway_url(parser)
    parser.add_argument("--json", action="store_true", help="print /v1/status as it is")
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="look again and again, until Ctrl-C (every 2 s); to a pipe, print each time",
    )


def run(options: argparse.Namespace) -> int:
    """Print the state of the line; 0 if it takes requests, 1 if it does not."""
    if options.watch:
        return watch(options.url, options.watch, draw=None if options.json else render)
    state = ask_gateway(options.url, "GET", "/v1/status")
    if options.json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
    else:
        Console(highlight=False).print(render(state))
    return 0 if state["gateway"]["ready"] else 1


def render(state: Mapping[str, Any]) -> Group:
    """Draw the pools over the workers, each with the acceptance of its drafts."""
    troubles = (
        ("The policy file is refused", state["policy"]["file_problem"]),
        ("Not all is shared with other gateways", state["store"]["problem"]),
    )
    told = [Text(f"{trouble}: {why}", style="red") for trouble, why in troubles if why]
    tables = ("", _pools(state["pools"]), "", _workers(state["workers"]))
    return Group(_headline(state), *_drafted(state["mtp"]), *told, *tables)


def _headline(state: Mapping[str, Any]) -> Text:
    gateway = state["gateway"]
    word = "stopping" if gateway["stopping"] else "ready" if gateway["ready"] else "no worker"
    reasons = state["decisions"]["bypass_counts"]
    bypassed = ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "none"
    return Text.assemble(
        (word, "green" if word == "ready" else "yellow"),
        f" for {gateway['uptime_s']:.0f} s, {gateway['requests_in_flight']} in flight, "
        f"{state['decisions']['total']} routed; kept out of the speculative lane: {bypassed}",
    )


def _drafted(mtp: Mapping[str, Any]) -> list[Text]:
    """Say what drafts brought over the whole fleet, where there were any."""
    if not (mtp["enabled"] and mtp["attempted"]):
        return []
    positions = ", ".join(f"{rate:.0%}" for rate in mtp["acceptance_rate_per_position"])
    return [
        Text(
            f"{mtp['acceptance_rate']:.1%} of drafts accepted (by position: {positions}), "
            f"{mtp['mean_acceptance_length']:.2f} tokens a step"
        )
    ]


def _pools(pools: Mapping[str, Any]) -> Table:
    table = _table("Pool", "Workers")
    for name, pool in pools.items():
        table.add_row(name, str(len(pool["workers"])), *_figures(pool))
    return table


def _workers(workers: Mapping[str, Any]) -> Table:
    table = _table("Worker", "Lane")
    for name, worker in workers.items():
        state = Text(worker["state"], style=_STATE_STYLES.get(worker["state"], "red"))
        # Beside the first lane who it is, beside the second what it serves.
        beside = [Text.assemble(name, " ", state), Text(worker["model"], style="dim")]
        rows = [(lane_name, *_figures(lane)) for lane_name, lane in worker["lanes"].items()]
        for cell, row in itertools.zip_longest(beside, rows, fillvalue=()):
            table.add_row(cell or "", *row)
    return table


def _table(*leading: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in leading:
        table.add_column(column, overflow="fold", no_wrap=column in {"Pool", "Lane"})
    for column in ("Busy", "Waiting", "Requests", "Tokens", "Accepted", "Per step"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figures(lane: Mapping[str, Any]) -> tuple[str, ...]:
    """Show how busy a lane or pool is and what it did; tokens per step is 1 without drafts."""
    mtp = lane["mtp"]
    drafted = mtp["enabled"] and mtp["attempted"]
    return (
        # Workers know what all gateways sent them; of listed ones this one's own is known.
        f"{max(lane['running'], lane['in_flight'])}/{lane['slots']}",
        str(lane["waiting"]),
        str(lane["requests"]),
        str(lane["completion_tokens"]),
        f"{mtp['acceptance_rate']:.1%}" if drafted else "-",
        f"{mtp['mean_acceptance_length']:.2f}" if drafted else "-",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"'{text}' is not a time between 0.1 and 3600 seconds")
    return seconds
