"""Show pools, workers and draft acceptance of a gateway, as a table or as JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.cli.client import Gateway, GatewayUnavailable, connect, plain_table, print_json
from paceline.terminal import printable

_WATCH_TIMEOUT_S = 5.0
_LOAD = ("Busy", "Waiting", "Requests", "Tokens", "Accepted", "Per step")
_STATE_STYLES = {"ready": "green"} | dict.fromkeys(
    ("starting", "draining", "cordoned", "busy", "probation"), "yellow"
)


def run(*, url: str, as_json: bool, watch: float | None) -> int:
    """Print the state of a gateway; return 0 if it is ready, else 1."""
    gateway = connect(url)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(gateway, watch, as_json=as_json)
        return 0
    state = gateway.read("GET", "/v1/status")
    if as_json:
        print_json(state)
    else:
        Console(highlight=False).print(render(state))
    return 0 if state["gateway"]["ready"] else 1


def render(state: Mapping[str, Any]) -> Group:
    """Draw pools above workers, each with the acceptance of its drafts."""
    lines = [_headline(state)]
    mtp = state["mtp"]
    if mtp["enabled"] and mtp["attempted"]:
        positions = ", ".join(f"{rate:.0%}" for rate in mtp["acceptance_rate_per_position"])
        lines.append(
            Text(
                f"{mtp['acceptance_rate']:.1%} of drafts accepted (by position: {positions}), "
                f"{mtp['mean_acceptance_length']:.2f} tokens a step"
            )
        )
    for what, why in (
        ("The policy file is not in force", state["policy"]["file_problem"]),
        ("This gateway does not share all state with others", state["store"]["problem"]),
    ):
        if why:
            lines.append(Text(f"{what}: {why}", style="red"))
    pools = plain_table("Pool", "Workers", no_wrap=("Pool",), numbers=_LOAD)
    for name, pool in state["pools"].items():
        pools.add_row(name, str(len(pool["workers"])), *_load(pool))
    return Group(*lines, "", pools, "", _workers(state["workers"]))


def _headline(state: Mapping[str, Any]) -> Text:
    gateway = state["gateway"]
    word = "stopping" if gateway["stopping"] else "ready" if gateway["ready"] else "no worker"
    reasons = state["decisions"]["bypass_counts"]
    bypassed = ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "none"
    return Text.assemble(
        (word, "green" if word == "ready" else "yellow"),
        f" for {gateway['uptime_s']:.0f} s, {gateway['requests_in_flight']} in flight, "
        f"{state['decisions']['total']} routed; bypassed the speculative lane: {bypassed}",
    )


def _workers(workers: Mapping[str, Any]) -> Table:
    table = plain_table("Worker", "Lane", no_wrap=("Lane",), numbers=_LOAD)
    for name, worker in workers.items():
        state = Text(worker["state"], style=_STATE_STYLES.get(worker["state"], "red"))
        # The name is in the row of the first lane, the model in that of the second.
        labels = [Text.assemble(name, " ", state), Text(worker["model"], style="dim")]
        rows = [(lane_name, *_load(lane)) for lane_name, lane in worker["lanes"].items()]
        for label, row in itertools.zip_longest(labels, rows, fillvalue=()):
            table.add_row(label or "", *row)
    return table


def _load(lane: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the load and the counters of a lane or pool; tokens per step is 1 without drafts."""
    mtp = lane["mtp"]
    drafted = mtp["enabled"] and mtp["attempted"]
    answers = lane["requests"]
    none = "unknown" if lane["unreported"]["drafts"] else "-"
    return (
        # Our workers report requests of all gateways; for static ones this gateway counts its own.
        f"{max(lane['running'], lane['in_flight'])}/{lane['slots']}",
        str(lane["waiting"]),
        str(lane["requests"]),
        "unknown" if lane["unreported"]["usage"] >= answers > 0 else str(lane["completion_tokens"]),
        f"{mtp['acceptance_rate']:.1%}" if drafted else none,
        f"{mtp['mean_acceptance_length']:.2f}" if drafted else none,
    )


def _watch(gateway: Gateway, every_s: float, *, as_json: bool) -> None:
    """Print the state until Ctrl-C: one screen on a terminal, one report after another to a pipe.

    If the gateway goes away, its last state stays on the screen, marked as old.
    """
    if as_json:
        for state, problem in _states(gateway, every_s):
            if state is None:
                sys.stderr.write(printable(f"paceline: {problem}\n"))
            else:
                print(json.dumps(state), flush=True)  # noqa: T201
        return
    console = Console(highlight=False)
    if console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for screen in _screens(gateway, every_s):
                live.update(screen, refresh=True)
    for screen in _screens(gateway, every_s):
        console.print(screen, "")


def _screens(gateway: Gateway, every_s: float) -> Iterator[RenderableType]:
    """Draw each state under a line with its time."""
    last: tuple[datetime, Mapping[str, Any]] | None = None
    for state, problem in _states(gateway, every_s):
        now = datetime.now().astimezone()
        head = Text(f"{gateway.url}  {now:%H:%M:%S}  every {every_s:g} s", style="dim")
        if state is not None:
            last = now, state
            yield Group(head, render(state))
        elif last is None:
            yield Group(head, Text(problem, style="red"))
        else:
            notice = Text(f"{problem} The state at {last[0]:%H:%M:%S} was:", style="red")
            yield Group(head, notice, render(last[1]))


def _states(gateway: Gateway, every_s: float) -> Iterator[tuple[Mapping[str, Any] | None, str]]:
    """Yield a state, or the reason for its absence, at each interval."""
    while True:
        try:
            yield gateway.read("GET", "/v1/status", timeout=_WATCH_TIMEOUT_S), ""
        except GatewayUnavailable as reason:
            yield None, str(reason)
        time.sleep(every_s)
