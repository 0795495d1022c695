"""`paceline status`: lanes, workers and acceptance, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gateway.cli.asking import add_gateway_url, ask_gateway

HELP = "show lanes, workers and what speculation brings"
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    add_gateway_url(parser)
    parser.add_argument("--json", action="store_true", help="print /v1/status as it is")


def run(options: argparse.Namespace) -> int:
    """Print the state of the line; 0 if it takes requests, 1 if it does not."""
    state = ask_gateway(options.url, "GET", "/v1/status")
    if options.json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
    else:
        Console(highlight=False).print(render(state))
    return 0 if state["gateway"]["ready"] else 1


def render(state: Mapping[str, Any]) -> Group:
    """Draw the pools over the workers, each with the acceptance of its drafts."""
    return Group(_headline(state), _pools(state["pools"]), _workers(state["workers"]))


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


def _pools(pools: Mapping[str, Any]) -> Table:
    table = _table("Pool", "Workers", "Running", "Waiting", "Requests", "Tokens")
    for name, pool in pools.items():
        table.add_row(
            name,
            str(len(pool["workers"])),
            f"{pool['running']}/{pool['slots']}",
            str(pool["waiting"]),
            str(pool["requests"]),
            str(pool["completion_tokens"]),
            *_acceptance(pool["mtp"]),
        )
    return table


def _workers(workers: Mapping[str, Any]) -> Table:
    table = _table("Worker", "State", "Model", "Lane", "Running", "Requests", "Tokens")
    for name, worker in workers.items():
        leading = [
            Text(name),
            Text(worker["state"], style=_STATE_STYLES.get(worker["state"], "red")),
            Text(worker["model"]),
        ]
        for lane_name, lane in worker["lanes"].items():
            table.add_row(
                *leading,
                lane_name,
                f"{lane['running']}/{lane['slots']}",
                str(lane["requests"]),
                str(lane["completion_tokens"]),
                *_acceptance(lane["mtp"]),
            )
            leading = [Text()] * 3  # a worker is named once
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (*columns, "Drafted", "Accepted", "Tokens/step"):
        words = column in {"Pool", "Worker", "State", "Model", "Lane"}
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


def _acceptance(mtp: Mapping[str, Any]) -> tuple[str, str, str]:
    if not mtp["enabled"]:
        return ("-", "-", "-")
    if not mtp["drafts"]:
        return ("0", "-", "-")
    return (
        str(mtp["attempted"]),
        f"{mtp['acceptance_rate']:.1%}",
        f"{mtp['mean_acceptance_length']:.2f}",
    )
