"""Sums at the end: of clients, of the access log, of the usage of keys and of the status."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any, Final

from bench.attack.attack import Tally, Target
from bench.attack.stack import ACCESS_LOG

NAME: Final = "sums"
PROMISE: Final = "requests, outcomes, tokens and usage of keys are equal wherever counted"
_SETTLED_S: Final = 120.0
_TOKENS: Final = ("prompt_tokens", "completion_tokens", "cached_tokens")


async def check_sums(target: Target, tally: Tally) -> None:
    """Compare all counts once no request is running and all lines are written."""
    status, lines = await _settled(target)
    ids = Counter(line["request"] for line in lines)
    for request_id in target.sent:
        tally.inputs += 1
        if ids[request_id] != 1:
            tally.fail(f"{ids[request_id]} lines of one request", request_id)
    by_id = {line["request"]: line for line in lines}
    for request_id, read in target.read.items():
        line = by_id.get(request_id, {})
        if read != (line.get("prompt_tokens"), line.get("completion_tokens")):
            tally.fail("other tokens than the client read", (request_id, read, line))
    _compare("outcomes", status["outcomes"], Counter(line["outcome"] for line in lines), tally)
    usage = await target.admin("usage")
    used, logged = usage.json()["keys"], _by_key(lines)
    for key in sorted(used.keys() | logged.keys()):
        counted = {name: used.get(key, {}).get(name, 0) for name in _TOKENS}
        _compare(f"usage of {key}", counted, logged.get(key, Counter()), tally)
    models = Counter[str]()
    for model in status["models"].values():
        models.update({f"{name}_tokens": count for name, count in model["tokens"].items()})
    total = sum(logged.values(), Counter[str]())
    _compare("tokens of all models", models, total, tally)
    tally.notes.append(f"{len(lines):,} requests in the access log and in the status")


async def _settled(target: Target) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the status and the lines of the access log, once their numbers agree or time is up."""
    until_s = time.monotonic() + _SETTLED_S
    while True:
        status = (await target.request("/v1/status", key=target.key)).json()
        lines = [json.loads(line) for line in (target.home / ACCESS_LOG).open("rb")]
        idle = not status["gateway"]["requests_in_flight"]
        if time.monotonic() > until_s or (idle and sum(status["outcomes"].values()) == len(lines)):
            return status, lines
        await asyncio.sleep(0.5)


def _by_key(lines: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    sums: dict[str, Counter[str]] = {}
    for line in lines:
        tokens = {name: line[name] for name in _TOKENS}
        if any(tokens.values()):
            sums.setdefault(line["key"], Counter()).update(tokens)
    return sums


def _compare(name: str, counted: Any, logged: Any, tally: Tally) -> None:
    tally.inputs += 1
    differences = {
        field: (counted.get(field, 0), logged.get(field, 0))
        for field in counted.keys() | logged.keys()
        if counted.get(field, 0) != logged.get(field, 0)
    }
    if differences:
        tally.fail(f"{name}: status and log differ", differences)
