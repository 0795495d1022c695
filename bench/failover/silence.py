"""Workers that fall silent in a stream: one that sleeps, and one whose link is cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.failover.fleet import Fleet, Place, running_fleet
from bench.failover.streams import Comparison, body_of, stream_and_fail
from tests.support.failover_fleet import Answer

_NAMESPACE: Final = "paceline-bench"
_NEAR: Final = ("paceline-near", "10.213.7.1")
_FAR: Final = ("paceline-far", "10.213.7.2")
_WORKERS: Final = ("a", "b")
_AFTER_EVENTS: Final = 5
_BACK_S: Final = 60.0


@dataclass(slots=True, kw_only=True)
class Silence:
    """What was seen of one kind of silence."""

    compared: Comparison = field(default_factory=Comparison)
    gaps_s: list[float] = field(default_factory=list)
    """From the beginning of the silence to the next text."""
    backs_s: list[float] = field(default_factory=list)
    """From the end of the silence to the moment at which the gateway uses the worker again."""


async def sleeping_workers(times: int, home: Path, advance: Callable[[], None]) -> Silence:
    """Stop the process of a worker in a stream, again and again, as a Mac that falls asleep."""
    seen = Silence()
    async with running_fleet(home, _WORKERS) as fleet:
        for number in range(times):

            async def fall_asleep(name: str) -> None:
                os.kill(fleet.workers[name].pid, signal.SIGSTOP)

            async def wake(name: str) -> None:
                os.kill(fleet.workers[name].pid, signal.SIGCONT)

            await _try_silence(seen, fleet, number, fall_asleep, wake)
            advance()
    return seen


def can_cut_links() -> bool:
    """Return whether this process may create network namespaces."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None


async def cut_links(times: int, home: Path, advance: Callable[[], None]) -> Silence:
    """Cut the link of a worker in a network namespace of its own, again and again."""
    seen = Silence()
    with _linked_namespace():
        async with running_fleet(home, _WORKERS[:1], host=_NEAR[1]) as fleet:
            place = Place(host=_FAR[1], namespace=Path("/run/netns", _NAMESPACE))
            await fleet.start(_WORKERS[1], place)
            for number in range(times):

                async def cut(_: str) -> None:
                    await fleet.cordon(_WORKERS[0], on=False)
                    _link(up=False)

                async def restore(_: str) -> None:
                    _link(up=True)

                # The stream is to begin at the far worker, and to go on at the near one.
                await fleet.cordon(_WORKERS[0], on=True)
                await _try_silence(seen, fleet, number, cut, restore)
                advance()
    return seen


async def _try_silence(
    seen: Silence,
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
    expected = Answer().read(await fleet.whole(fleet.workers[name].url, body))
    seen.compared.add(f"silence {number}", Answer().read(stream.received), expected)


def _link(*, up: bool) -> None:
    """Cut the link at its far end, as if its cable were pulled, or restore it."""
    _ip("-n", _NAMESPACE, "link", "set", _FAR[0], "up" if up else "down")


@contextlib.contextmanager
def _linked_namespace() -> Iterator[None]:
    """Create a network namespace with one link to this one."""
    _ip("netns", "add", _NAMESPACE)
    try:
        _ip("link", "add", _NEAR[0], "type", "veth", "peer", "name", _FAR[0], "netns", _NAMESPACE)
        _ip("address", "add", f"{_NEAR[1]}/30", "dev", _NEAR[0])
        _ip("link", "set", _NEAR[0], "up")
        _ip("-n", _NAMESPACE, "address", "add", f"{_FAR[1]}/30", "dev", _FAR[0])
        _ip("-n", _NAMESPACE, "link", "set", "lo", "up")
        _ip("-n", _NAMESPACE, "link", "set", _FAR[0], "up")
        yield
    finally:
        _ip("netns", "delete", _NAMESPACE)  # and the link with it


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
