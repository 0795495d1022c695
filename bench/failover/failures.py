"""Workers that fail in a stream: killed, cut off at a byte, asleep, and with a cut link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.failover.fleet import Fleet, running_fleet
from bench.failover.streams import (
    KINDS,
    Comparison,
    FailingStream,
    body_of,
    near_tie,
    stream_and_fail,
)
from paceline.protocol import ANSWER_FIELD, TOKENS_LINE
from tests.support import failover_fleet as one_engine
from tests.support.failover_fleet import CHAT, Answer
from tests.support.fault_proxy import Fault
from tests.support.served_engine import running_engine

_WORKERS: Final = ("a", "b")
_EVENTS: Final = 30
"""A worker is killed after at most so many events with text; an answer has more."""
_TOKENS: Final = 40
_AFTER_EVENTS: Final = 5
_BACK_S: Final = 60.0
_NAMESPACE: Final = "paceline-bench"
_NEAR: Final = ("paceline-near", "10.213.7.1")
_FAR: Final = ("paceline-far", "10.213.7.2")

Advance = Callable[[], None]


@dataclass(slots=True)
class Seen:
    """What was seen of one kind of failure."""

    compared: Comparison = field(default_factory=Comparison)
    gaps_s: list[float] = field(default_factory=list)
    """From the failure to the next text."""
    ttfts_s: list[float] = field(default_factory=list)
    """The survivor's time to the first token for the same prefix."""
    line_bytes: list[float] = field(default_factory=list)
    """Bytes that the gateway keeps of each token."""
    backs_s: list[float] = field(default_factory=list)
    """From the end of the failure to the moment at which the gateway uses the worker again."""
    reached: int = 0
    """Streams that had not ended before the byte at which they were to be cut."""


async def kill_workers(kills: int, home: Path, advance: Advance) -> Seen:
    """Kill the worker of a stream after a random number of events, again and again.

    It starts again before the next stream: its start would take the processor from the survivor,
    which is another machine in truth.
    """
    seen, rng = Seen(), random.Random(7)  # chooses when
    async with running_fleet(home, _WORKERS) as fleet:
        number = 0
        while seen.compared.streams < kills:
            number += 1
            kind = list(KINDS)[number % len(KINDS)]
            body, after = body_of(kind, number=number), rng.randrange(1, _EVENTS)
            stream = await stream_and_fail(fleet.client, body, after, fleet.kill)
            if stream.failed_s:
                await _judge_kill(seen, fleet, stream, kind, number)
                await fleet.start(stream.worker)
                advance()
    return seen


async def _judge_kill(
    seen: Seen, fleet: Fleet, stream: FailingStream, kind: str, number: int
) -> None:
    """Compare a stream with that of a survivor, and its pause with the survivor's first token."""
    moved = stream.moved
    url = fleet.urls.get(moved[1].decode() if moved else "") or next(iter(fleet.urls.values()))
    body = body_of(kind, number=number)
    whole = await fleet.whole(url, body)
    answer, expected = Answer().read(stream.received), Answer().read(whole)
    lines = [event.split(b"\n")[0] for event in whole.split(b"\n\n")]
    lines = [line for line in lines if line.startswith(TOKENS_LINE)]
    if expected.usage:
        kept = sum(len(line) + 1 for line in lines)
        seen.line_bytes.append(kept / expected.usage["completion_tokens"])
    name = f"kill {number}, {kind}"
    if not seen.compared.add(name, answer, expected) and answer.done and kind == "greedy":
        tie = await near_tie(fleet.client, url, body, answer, expected)
        seen.compared.unlike[-1] += f" ({tie})"
    if moved and stream.next_s:
        # A prefix of this length that no worker has read.
        told = lines[: stream.received[: moved.start()].count(b'"content":"')]
        prefix = b";".join(line.removeprefix(TOKENS_LINE) for line in told).decode()
        other = {**body_of(kind, number=number + 1_000_000), ANSWER_FIELD: prefix}
        seen.gaps_s.append(stream.gap_s)
        seen.ttfts_s.append(await fleet.first_token_s(url, other))


async def cut_streams(cuts: int, home: Path, advance: Advance) -> Seen:
    """Cut the connection of a stream at a random byte of its answer, again and again."""
    seen, rng = Seen(), random.Random(7)
    with running_engine() as engine:
        async with one_engine.running_fleet(engine, home) as fleet:
            bodies = {kind: body_of(kind, max_tokens=_TOKENS) for kind in KINDS}
            whole = {kind: (await fleet.ask(CHAT, body)).content for kind, body in bodies.items()}
            for number in range(cuts):
                kind = list(KINDS)[number // 2 % len(KINDS)]
                # The lines that tell tokens, which the client does not get, are some more bytes.
                at = rng.randrange(1, len(whole[kind]) * 21 // 20)
                fault, first = Fault(reset_after_bytes=at), "ab"[number % 2]
                response = await fleet.ask(CHAT, bodies[kind], fault, first=first)
                answer, expected = Answer().read(response.content), Answer().read(whole[kind])
                seen.compared.add(f"cut at byte {at}, {kind}", answer, expected)
                advance()
            seen.reached = fleet.faults
    return seen


async def sleeping_workers(times: int, home: Path, advance: Advance) -> Seen:
    """Stop the process of a worker in a stream, again and again, as a Mac that falls asleep."""
    seen = Seen()
    async with running_fleet(home, _WORKERS) as fleet:

        async def fall_asleep(name: str) -> None:
            os.kill(fleet.parts[name].pid, signal.SIGSTOP)

        async def wake(name: str) -> None:
            os.kill(fleet.parts[name].pid, signal.SIGCONT)

        for number in range(times):
            await _try_silence(seen, fleet, number, fall_asleep, wake)
            advance()
    return seen


def can_cut_links() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None


async def cut_links(times: int, home: Path, advance: Advance) -> Seen:
    """Cut the link of a worker in a network namespace of its own, again and again."""
    seen = Seen()
    near, far = _WORKERS
    with _linked_namespace():
        async with running_fleet(home, [near], host=_NEAR[1]) as fleet:
            within = ("ip", "netns", "exec", _NAMESPACE)
            await fleet.start(far, host=_FAR[1], within=within)

            async def cut(_: str) -> None:
                await fleet.cordon(near, on=False)
                _link(up=False)

            async def restore(_: str) -> None:
                _link(up=True)

            for number in range(times):
                # The stream is to begin at the far worker, and to go on at the near one.
                await fleet.cordon(near, on=True)
                await _try_silence(seen, fleet, number, cut, restore)
                advance()
    return seen


async def _try_silence(
    seen: Seen,
    fleet: Fleet,
    number: int,
    begin: Callable[[str], Awaitable[None]],
    end: Callable[[str], Awaitable[None]],
) -> None:
    body = body_of("greedy", number=number)
    stream = await stream_and_fail(fleet.client, body, _AFTER_EVENTS, begin)
    if stream.failed_s:
        away = not await fleet.joined_url(stream.worker)
        ended_s = time.perf_counter()
        await end(stream.worker)
        async with asyncio.timeout(_BACK_S):
            await fleet.wait_for_url(stream.worker)
        if away:
            seen.backs_s.append(time.perf_counter() - ended_s)
    moved = stream.moved
    if moved and stream.next_s:
        seen.gaps_s.append(stream.gap_s)
    # The stream without a failure, from the worker that went on.
    name = moved[1].decode() if moved else stream.worker
    expected = Answer().read(await fleet.whole(fleet.urls[name], body))
    seen.compared.add(f"silence {number}", Answer().read(stream.received), expected)


def _link(*, up: bool) -> None:
    """Cut the link at its far end, as if its cable were pulled, or restore it."""
    _ip(f"-n {_NAMESPACE} link set {_FAR[0]} {'up' if up else 'down'}")


@contextlib.contextmanager
def _linked_namespace() -> Iterator[None]:
    _ip(f"netns add {_NAMESPACE}")
    try:
        _ip(f"link add {_NEAR[0]} type veth peer name {_FAR[0]} netns {_NAMESPACE}")
        _ip(f"address add {_NEAR[1]}/30 dev {_NEAR[0]}")
        _ip(f"link set {_NEAR[0]} up")
        _ip(f"-n {_NAMESPACE} address add {_FAR[1]}/30 dev {_FAR[0]}")
        _ip(f"-n {_NAMESPACE} link set lo up")
        _link(up=True)
        yield
    finally:
        _ip(f"netns delete {_NAMESPACE}")  # and the link with it


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
