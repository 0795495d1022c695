"""Show pools, workers and draft acceptance of a gateway, as a table or as JSON."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli import CommandError
from gateway.cli.client import connect, plain_table, print_json

_LOAD = ("Busy", "Waiting", "Requests", "Tokens", "Accepted", "Per step")
_KEYS_SHOWN = 8
_STATE_STYLES = {"ready": "green"} | dict.fromkeys(
    ("starting", "draining", "cordoned", "busy", "probation"), "yellow"
)


_LONG_TOKENS = 1000
"""Of a prompt that takes long to read."""
_ABSENCES = {
    "restarting": "stopped at {since}; it is being started again.",
    "silent": "has sent nothing since {since}. It may be asleep, switched off or cut off.",
    "left": "signed off at {since}.",
}


def run(*, url: str, as_json: bool) -> int:
    """Print the state of a gateway; return 0 if it is ready, else 1."""
    gateway = connect(url)
    state = gateway.read("GET", "/v1/status")
    if as_json:
        print_json(state)
    else:
        keys: Sequence[Mapping[str, Any]] = ()
        with contextlib.suppress(CommandError):  # an older gateway
            keys = gateway.read("GET", "/v1/usage").get("keys", ())
        Console(highlight=False).print(_render(state), *_keys(keys))
    return 0 if state["gateway"]["ready"] else 1


def _render(state: Mapping[str, Any]) -> Group:
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
        ("Edits are refused", state["store"].get("file_problem", "")),
    ):
        if why:
            lines.append(Text(f"{what}: {why}", style="red"))
    lines += [line for name, one in state["workers"].items() for line in _trouble(name, one)]
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


def _trouble(name: str, worker: Mapping[str, Any]) -> list[Text]:
    """Return why a worker gets no requests, or the prompts that it reads, if there are any."""
    since = datetime.fromtimestamp(int(worker["absence"]["unix_s"])).astimezone()
    sentence = _ABSENCES.get(worker["absence"]["kind"], "").format(since=since)
    style = "dim" if worker["absence"]["kind"] == "left" else "red"
    if not sentence and worker["problem"]:
        sentence = f"has a problem: {worker['problem']}"
    elif reason := worker["ejection"]["reason"]:
        sentence = f"gets no requests for a while: {reason}."
    elif start := worker["start"]["description"]:
        sentence, style = f"is starting: {start}.", "yellow"
    lines = [Text(f"{name} {sentence}", style=style)] if sentence else []
    for lane in worker["lanes"].values():
        if (tokens := lane["pending_prefill_tokens"]) >= _LONG_TOKENS:
            seconds = tokens / (lane["prefill_tokens_per_s"] or float("inf"))
            left = f", for about {seconds:.0f} s" if seconds else ""
            lines.append(Text(f"{name} reads prompts: {tokens:,} tokens more{left}.", style="dim"))
    return lines


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


def _keys(keys: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Draw the keys that use most, if any was used in the last hour."""
    if not keys:
        return
    table = plain_table("Key, last minute / hour", numbers=("Now", "Requests", "Tokens", "Waited"))
    for key in keys[:_KEYS_SHOWN]:
        minute, hour = key["last_minute"], key["last_hour"]
        counts = (f"{minute[name]} / {hour[name]}" for name in ("requests", "tokens"))
        waited = f"{minute['waited_ms'] / 1000:.0f} / {hour['waited_ms'] / 1000:.0f} s"
        name = key["name"] or key["key"] or "without a key"
        table.add_row(name, str(key["running"]), *counts, waited)
    yield ""
    yield table


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
