"""Show pools, workers and draft acceptance of a gateway, as a table or as JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli import CommandError
from gateway.cli.client import connect, plain_table, print_json, print_output
from gateway.cli.explain import KEPT_OUT

_LOAD = ("Busy", "Waiting", "Requests", "Tokens", "Accepted", "Per step")
_RARE_LANES = frozenset(("embeddings", "rerank"))
_KEYS_SHOWN = 8
_STATE_STYLES = {"ready": "green"} | dict.fromkeys(
    ("starting", "draining", "cordoned", "busy", "probation"), "yellow"
)


_LONG_TOKENS = 1000
"""Of a prompt that takes long to read."""
_ABSENCES = {
    "restarting": "stopped at {since} and is being restarted.",
    "silent": "has sent nothing since {since}. It may be asleep, switched off or disconnected.",
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
        tables = _pools(state["pools"]), "", _workers(state["workers"])
        print_output(*_lines(state), "", *tables, *_keys(keys))
    return 0 if state["gateway"]["ready"] else 1


def _lines(state: Mapping[str, Any]) -> list[Text]:
    """Show the state of the gateway, the acceptance of drafts, and problems."""
    lines = [_headline(state)]
    if kept_out := state["decisions"]["bypass_counts"]:
        named = ", ".join(f"{KEPT_OUT.get(one, one)} ({count})" for one, count in kept_out.items())
        lines.append(Text(f"Requests without drafts of text-mtp: {named}"))
    mtp = state["mtp"]
    if mtp["enabled"] and mtp["attempted"]:
        positions = ", ".join(f"{rate:.0%}" for rate in mtp["acceptance_rate_per_position"])
        lines.append(
            Text(
                f"{mtp['acceptance_rate']:.1%} of draft tokens accepted; by position, of all "
                f"drafts: {positions}; {mtp['mean_acceptance_length']:.2f} tokens a step"
            )
        )
    for what, why in (
        ("The policy file is not active", state["policy"]["file_problem"]),
        ("This gateway is not sharing all state with others", state["store"]["problem"]),
        ("Edits are refused", state["store"].get("file_problem", "")),
        ("Stored records are not active", state["store"].get("record_problem", "")),
    ):
        if why:
            lines.append(Text(f"{what}: {why}", style="red"))
    lines += [line for name, one in state["workers"].items() for line in _trouble(name, one)]
    return lines


def _headline(state: Mapping[str, Any]) -> Text:
    gateway = state["gateway"]
    word = "stopping" if gateway["stopping"] else "ready" if gateway["ready"] else "no worker"
    return Text.assemble(
        (word, "green" if word == "ready" else "yellow"),
        f", up for {_duration(gateway['uptime_s'])}; {gateway['requests_in_flight']} in flight, "
        f"{state['decisions']['total']} routed",
    )


def _duration(seconds: float) -> str:
    """Return a time with the largest unit that it has twice."""
    units = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((one for one in units if seconds >= 2 * one[0]), units[-1])
    return f"{seconds / size:.0f} {unit}"


def _pools(pools: Mapping[str, Any]) -> Table:
    table = plain_table("Pool", "Workers", numbers=_LOAD)
    for name, pool in pools.items():
        # Most fleets have no embedder and no reranker, and the shipped policy has pools for both.
        if pool["workers"] or pool["requests"] or not _RARE_LANES.issuperset(pool["lanes"]):
            table.add_row(name, str(len(pool["workers"])), *_load(pool))
    return table


def _trouble(name: str, worker: Mapping[str, Any]) -> list[Text]:
    """Return why a worker gets no requests, or the prompts that it reads, if there are any."""
    since = datetime.fromtimestamp(int(worker["absence"]["unix_s"])).astimezone()
    sentence = _ABSENCES.get(worker["absence"]["kind"], "").format(since=since)
    style = "dim" if worker["absence"]["kind"] == "left" else "red"
    if not sentence and worker["problem"]:
        sentence = f"has a problem: {worker['problem']}"
    elif reason := worker["ejection"]["reason"]:
        sentence = f"gets no requests for now: {reason}."
    elif start := worker["start"]["description"]:
        sentence, style = f"is starting: {start}.", "yellow"
    lines = [Text(f"{name} {sentence}", style=style)] if sentence else []
    for lane in worker["lanes"].values():
        if (tokens := lane["pending_prefill_tokens"]) >= _LONG_TOKENS:
            seconds = tokens / (lane["prefill_tokens_per_s"] or float("inf"))
            left = f", for about {seconds:.0f} s" if seconds else ""
            lines.append(Text(f"{name} reads prompts: {tokens:,} tokens left{left}.", style="dim"))
    return lines


def _workers(workers: Mapping[str, Any]) -> Table:
    table = plain_table("Worker", "Lane", numbers=_LOAD)
    for name, worker in workers.items():
        state = Text(worker["state"], style=_STATE_STYLES.get(worker["state"], "red"))
        model = f"{worker['model']}, TLS" if worker.get("tls") else worker["model"]
        label = Text.assemble(name, " ", state, "\n", (model, "dim"))
        lanes = [(lane_name, *_load(lane)) for lane_name, lane in worker["lanes"].items()]
        table.add_row(label, *map("\n".join, zip(*lanes, strict=True)))
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
