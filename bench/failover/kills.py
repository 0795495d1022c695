"""Workers killed in a stream, and the first token after each kill."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.failover.fleet import Fleet, WorkerProcess, running_fleet
from bench.failover.streams import (
    KINDS,
    Comparison,
    FailingStream,
    body_of,
    near_tie,
    stream_and_fail,
)
from paceline.protocol import ANSWER_FIELD, TOKENS_LINE
from tests.support.failover_fleet import Answer

WORKERS: Final = ("a", "b")
_EVENTS: Final = 30
"""A worker is killed after at most so many events with text; an answer has more."""


@dataclass(slots=True, kw_only=True)
class Kills:
    """What was seen."""

    compared: Comparison = field(default_factory=Comparison)
    gaps_s: list[float] = field(default_factory=list)
    """From the end of the connections of a killed worker to the next text."""
    over_s: list[float] = field(default_factory=list)
    """By how much each exceeds 1.2 times the survivor's time to the first token for the prefix."""
    ratios: list[float] = field(default_factory=list)
    line_bytes: list[float] = field(default_factory=list)
    """Bytes that the gateway keeps of each token."""


async def kill_workers(
    kills: int, rng: random.Random, home: Path, advance: Callable[[], None]
) -> Kills:
    """Kill the worker of a stream after a random number of events, again and again.

    It starts again before the next stream: its start would take the processor from the survivor,
    which is another machine in truth.
    """
    seen = Kills()
    async with running_fleet(home, WORKERS) as fleet:
        number = 0
        while seen.compared.streams < kills:
            number += 1
            kind = list(KINDS)[number % len(KINDS)]
            stream = await stream_and_fail(
                fleet.client,
                body_of(kind, number=number),
                rng.randrange(1, _EVENTS),
                fleet.kill,
            )
            if stream.failed_s:
                await _judge(seen, fleet, stream, kind, number)
                await fleet.start(stream.worker)
                advance()
    return seen


async def _judge(seen: Kills, fleet: Fleet, stream: FailingStream, kind: str, number: int) -> None:
    """Compare a stream with that of a survivor, and its pause with the survivor's first token."""
    moved = stream.moved
    name = moved[1].decode() if moved else ""
    survivor = fleet.workers.get(name) or next(
        worker for worker in fleet.workers.values() if worker.url
    )
    body = body_of(kind, number=number)
    whole = await fleet.whole(survivor.url, body)
    answer, expected = Answer().read(stream.received), Answer().read(whole)
    lines = _lines_of(whole)
    if expected.usage:
        seen.line_bytes.append(sum(map(len, lines)) / expected.usage["completion_tokens"])
    name = f"kill {number}, {kind}"
    if not seen.compared.add(name, answer, expected) and answer.done and kind == "greedy":
        tie = await near_tie(fleet.client, survivor.url, body, answer, expected)
        seen.compared.unlike[-1] += f" ({tie})"
    if moved and stream.next_s:
        told = stream.received[: moved.start()].count(b'"content":"')
        ttft_s = await _prefix_ttft_s(fleet, survivor, kind, number, lines[:told])
        seen.gaps_s.append(stream.gap_s)
        seen.over_s.append(stream.gap_s - 1.2 * ttft_s)
        seen.ratios.append(stream.gap_s / ttft_s)


async def _prefix_ttft_s(
    fleet: Fleet, survivor: WorkerProcess, kind: str, number: int, lines: list[bytes]
) -> float:
    """Return the time to the first token for a prefix of this length that no worker has read."""
    body: Mapping[str, Any] = body_of(kind, number=number + 1_000_000)
    told = b";".join(line[len(TOKENS_LINE) : -1] for line in lines).decode()
    return await fleet.first_token_s(survivor.url, {**body, ANSWER_FIELD: told})


def _lines_of(stream: bytes) -> list[bytes]:
    """Return the lines that tell tokens, with their ends."""
    lines = (event.split(b"\n")[0] + b"\n" for event in stream.split(b"\n\n"))
    return [line for line in lines if line.startswith(TOKENS_LINE)]
