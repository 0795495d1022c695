"""When requests are sent: so many at a time, or as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from gateway.loadgen.answers import Heard
from gateway.loadgen.client import Endpoint
from gateway.loadgen.prompts import Prompt

OnEnd = Callable[[Heard], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How much load: exactly one of the two is set."""

    concurrency: int | None = None
    """So many at a time: the next is sent when one has ended."""
    rate: float | None = None
    """So many a second, however many are still running."""

    @property
    def name(self) -> str:
        """Say it in a few words."""
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g} a second"


async def send_all(
    endpoint: Endpoint, prompts: Sequence[Prompt], level: Level, *, random: Random, on_end: OnEnd
) -> list[Heard]:
    """Ask for every prompt and return what came, in the order of the prompts."""
    if level.concurrency:
        return await _at_once(endpoint, prompts, level.concurrency, on_end)
    assert level.rate is not None
    return await _arriving(endpoint, prompts, arrivals_s(level.rate, len(prompts), random), on_end)


def arrivals_s(rate: float, count: int, random: Random) -> list[float]:
    """Draw moments of arrival as those of independent people, `count` of them at just this rate."""
    moments = list(accumulate(random.expovariate(rate) for _ in range(count)))
    # The sum of few random pauses may miss the rate by a lot; the last one is put where it belongs.
    return [moment * count / rate / moments[-1] for moment in moments]


async def _at_once(
    endpoint: Endpoint, prompts: Sequence[Prompt], concurrency: int, on_end: OnEnd
) -> list[Heard]:
    waiting = iter(enumerate(prompts))
    heard: dict[int, Heard] = {}

    async def one_after_another() -> None:
        for place, prompt in waiting:
            heard[place] = await endpoint.ask(prompt)
            on_end(heard[place])

    await _together([one_after_another() for _ in range(min(concurrency, len(prompts)))])
    return [heard[place] for place in range(len(prompts))]


async def _arriving(
    endpoint: Endpoint, prompts: Sequence[Prompt], moments_s: Sequence[float], on_end: OnEnd
) -> list[Heard]:
    """Send each at its moment. Times are taken from there, also where this process was late."""
    began_s = time.perf_counter()
    heard: dict[int, Heard] = {}

    async def one(place: int, prompt: Prompt, due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        heard[place] = await endpoint.ask(prompt, due_s=due_s)
        on_end(heard[place])

    await _together(
        [
            one(place, prompt, began_s + moment_s)
            for place, (prompt, moment_s) in enumerate(zip(prompts, moments_s, strict=True))
        ]
    )
    return [heard[place] for place in range(len(prompts))]


async def _together(works: Sequence[Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)
