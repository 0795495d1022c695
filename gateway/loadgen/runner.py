"""Measurements: levels of load on one endpoint, or on two in alternation.

A level is a fixed concurrency, or a request rate with random arrivals.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from gateway.loadgen.client import Endpoint, RawResponse, read_answer
from gateway.loadgen.prompts import Prompt, sample_prompts
from gateway.loadgen.stats import summarize

OnEnd = Callable[[RawResponse], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of load; exactly one of the two fields is set."""

    concurrency: int | None = None
    """The number of concurrent requests; the end of one starts the next."""
    rate: float | None = None
    """Requests per second, regardless of how many are still running."""

    @property
    def name(self) -> str:
        """Return a short name, such as "4 concurrent"."""
        return f"{self.concurrency} concurrent" if self.concurrency else f"{self.rate:g} per second"


async def send_all(
    endpoint: Endpoint, prompts: Sequence[Prompt], level: Level, *, random: Random, on_end: OnEnd
) -> list[RawResponse]:
    """Send every prompt and return the responses in the order of the prompts.

    At a rate, each prompt is sent when it is due, and latencies count from that time.
    """
    began_s = time.perf_counter()
    due_s: Iterable[float | None] = itertools.repeat(None, len(prompts))
    if level.rate is not None:
        due_s = [began_s + time_s for time_s in arrivals_s(level.rate, len(prompts), random)]
    slots = asyncio.Semaphore(level.concurrency or len(prompts))

    async def send(prompt: Prompt, due_s: float | None) -> RawResponse:
        async with slots:
            if due_s is not None:
                await asyncio.sleep(due_s - time.perf_counter())
            response = await endpoint.send(prompt, due_s=due_s)
            on_end(response)
            return response

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(*request)) for request in zip(prompts, due_s, strict=True)]
    return [task.result() for task in tasks]


def arrivals_s(rate: float, count: int, random: Random) -> list[float]:
    """Return `count` arrival times of a Poisson process, in seconds, scaled to this mean rate."""
    times = list(itertools.accumulate(random.expovariate(rate) for _ in range(count)))
    # The sum of a few random intervals may miss the rate by far, so the last arrival fixes it.
    return [time_s * count / rate / times[-1] for time_s in times]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a benchmark."""

    levels: Sequence[Level]
    prompts: tuple[Prompt, ...]
    requests: int | None
    """The number per measurement; None selects it by level."""
    repetitions: int

    def requests_at(self, level: Level) -> int:
        """Return the requests of one measurement: by default four rounds, at least 16."""
        return self.requests or max(16, 4 * (level.concurrency or 0))

    def random(self, level: Level, repetition: int) -> Random:
        """Return the random generator of a repetition, the same for all endpoints."""
        return Random(f"{level.name}/{repetition}")  # noqa: S311 - reproducible


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The results of one repetition at one level on one endpoint."""

    endpoint: str
    """`A`, or `B` for the second endpoint of a comparison."""
    level: Level
    repetition: int
    figures: Mapping[str, Any]
    """The fields of `vllm bench serve --save-result`."""
    problems: tuple[str, ...]
    """The distinct reasons of failed requests."""

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON."""
        load = {"max_concurrency": self.level.concurrency, "request_rate": self.level.rate}
        return {
            "endpoint": self.endpoint,
            "repetition": self.repetition,
            **{name: value for name, value in load.items() if value is not None},
            **self.figures,
            "problems": list(self.problems),
        }


ProgressReporter = Callable[[str, int], OnEnd]
"""Starts a progress display of a title and a number of requests; its result advances it."""


async def measure_all(
    endpoints: Sequence[Endpoint], plan: Plan, progress: ProgressReporter
) -> AsyncIterator[Measurement]:
    """Yield the measurements of each level, alternating between endpoints, with the same prompts.

    The alternation (A B A B) distributes the effects of a warm or busy machine. One round per level
    and endpoint warms up and does not count.
    """
    for level in plan.levels:
        for endpoint in endpoints:
            random = plan.random(level, 0)
            prompts = sample_prompts(plan.prompts, level.concurrency or 1, random)
            on_end = progress(f"warming up, {level.name}", len(prompts))
            await send_all(endpoint, prompts, level, random=random, on_end=on_end)
        for repetition in range(1, plan.repetitions + 1):
            for name, endpoint in zip("AB", endpoints, strict=False):
                prefix = f"{name}{repetition}, " if len(endpoints) > 1 else ""
                on_end = progress(f"{prefix}{level.name}", plan.requests_at(level))
                # Each repetition has other prompts, because the server may cache complete prompts.
                random = plan.random(level, repetition)
                prompts = sample_prompts(plan.prompts, plan.requests_at(level), random)
                before = await endpoint.read_counters()
                began_s, cpu_began_s = time.perf_counter(), time.process_time()
                responses = await send_all(endpoint, prompts, level, random=random, on_end=on_end)
                cpu_s, wall_s = time.process_time() - cpu_began_s, time.perf_counter() - began_s
                after = await endpoint.read_counters()
                # Parsing during the streams would delay the arrivals that are measured.
                answers = [read_answer(response) for response in responses]
                yield Measurement(
                    endpoint=name,
                    level=level,
                    repetition=repetition,
                    figures=summarize(
                        answers,
                        counters=after.since(before) if before and after else None,
                        client_busy=cpu_s / wall_s,
                    ),
                    problems=tuple(
                        dict.fromkeys(answer.problem for answer in answers if answer.problem)
                    ),
                )
