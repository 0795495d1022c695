"""One measurement after another: a level of load, on one endpoint or on two in turn.

When requests are sent: so many at a time, or as they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

from gateway.loadgen.client import Endpoint, RawResponse, read_answer
from gateway.loadgen.prompts import Prompt, draw_prompts
from gateway.loadgen.stats import Figures, figures

OnEnd = Callable[[RawResponse], None]


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
) -> list[RawResponse]:
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
) -> list[RawResponse]:
    waiting = iter(enumerate(prompts))
    heard: dict[int, RawResponse] = {}

    async def one_after_another() -> None:
        for place, prompt in waiting:
            heard[place] = await endpoint.send(prompt)
            on_end(heard[place])

    await _together([one_after_another() for _ in range(min(concurrency, len(prompts)))])
    return [heard[place] for place in range(len(prompts))]


async def _arriving(
    endpoint: Endpoint, prompts: Sequence[Prompt], moments_s: Sequence[float], on_end: OnEnd
) -> list[RawResponse]:
    """Send each at its moment. Times are taken from there, also where this process was late."""
    began_s = time.perf_counter()
    heard: dict[int, RawResponse] = {}

    async def one(place: int, prompt: Prompt, due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        heard[place] = await endpoint.send(prompt, due_s=due_s)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    levels: tuple[Level, ...]
    prompts: tuple[Prompt, ...]
    requests: int | None
    """At each level; None: enough for each level."""
    repetitions: int
    seed: int

    def requests_at(self, level: Level) -> int:
        """Return how many requests a measurement takes: four rounds, and never under sixteen."""
        return self.requests or max(16, 4 * (level.concurrency or 0))

    def random(self, level: Level, turn: int) -> Random:
        """Return the chance of one turn at one level: the same for whoever is measured in it."""
        return Random(f"{self.seed}/{level.name}/{turn}")  # noqa: S311 - to be drawn again


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was found at one level on one endpoint, once."""

    endpoint: str
    """`A`, or `B` where two are compared."""
    level: Level
    repetition: int
    figures: Figures
    problems: tuple[str, ...]
    """Why requests failed, each reason once."""

    def to_json(self) -> dict[str, Any]:
        """Render for the record."""
        load = {"max_concurrency": self.level.concurrency, "request_rate": self.level.rate}
        return {
            "endpoint": self.endpoint,
            "repetition": self.repetition,
            **{name: value for name, value in load.items() if value is not None},
            **self.figures.as_json(),
            "problems": list(self.problems),
        }


ProgressReporter = Callable[[str, int], OnEnd]
"""Told of what is measured now and of how many requests; it gives what hears each end."""


async def measure_all(
    endpoints: Sequence[Endpoint], plan: Plan, telling: ProgressReporter
) -> AsyncIterator[Measurement]:
    """Measure each level on all endpoints in turn, again and again, with the same prompts.

    Turns (A B A B) let a machine that grows warm or busy slow both alike. Each level is warmed up
    on each endpoint by one round that does not count.
    """
    for level in plan.levels:
        for endpoint in endpoints:
            random = plan.random(level, 0)
            prompts = draw_prompts(plan.prompts, level.concurrency or 1, random)
            on_end = telling(f"warming up, {level.name}", len(prompts))
            await send_all(endpoint, prompts, level, random=random, on_end=on_end)
        for repetition in range(1, plan.repetitions + 1):
            for name, endpoint in zip("AB", endpoints, strict=False):
                turn = f"{name}{repetition}, " if len(endpoints) > 1 else ""
                on_end = telling(f"{turn}{level.name}", plan.requests_at(level))
                # Prompts of their own for each turn, else a cache of whole prompts would answer.
                random = plan.random(level, repetition)
                prompts = draw_prompts(plan.prompts, plan.requests_at(level), random)
                found, problems = await _measure(endpoint, prompts, level, random, on_end)
                yield Measurement(
                    endpoint=name,
                    level=level,
                    repetition=repetition,
                    figures=found,
                    problems=problems,
                )


async def _measure(
    endpoint: Endpoint, prompts: Sequence[Prompt], level: Level, random: Random, on_end: OnEnd
) -> tuple[Figures, tuple[str, ...]]:
    before = await endpoint.read_counters()
    began_s, computed_s = time.perf_counter(), time.process_time()
    heard = await send_all(endpoint, prompts, level, random=random, on_end=on_end)
    computed_s, took_s = time.process_time() - computed_s, time.perf_counter() - began_s
    after = await endpoint.read_counters()
    # Read only now: what reads while others stream would move the very moments that it reads.
    answers = [read_answer(each) for each in heard]
    found = figures(
        answers,
        counters=after.since(before) if before is not None and after is not None else None,
        client_busy=computed_s / took_s,
    )
    return found, tuple(dict.fromkeys(answer.problem for answer in answers if answer.problem))
