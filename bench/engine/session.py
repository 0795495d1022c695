"""Measurements of one server, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from bench.engine.measurements import (
    LIVE_STREAMS,
    LONG,
    STREAMS,
    Caller,
    RequestFailed,
    arrivals_s,
    burst_s,
    prefix_ttfts_s,
    stall,
    throughput,
)
from bench.harness.samples import Samples
from bench.harness.servers import Server
from gateway.loadgen.client import Answer, open_endpoint

MEASUREMENT_TIMEOUT_S: Final = 600.0
DRAFT_LENGTHS: Final = (0, 1, 2)
"""The k that requests name, in addition to the one that our worker chooses."""
REPETITIONS: Final = 3
"""Alternating repetitions of each k of our worker, for their comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of the measurements of one server."""

    streams: tuple[int, ...]
    prefix_tokens: int
    questions: int
    """Long questions; all are sent equally often, so that acceptance is comparable."""
    probes: int
    prefixes: int
    long_prompts: int

    def answers_for(self, streams: int) -> int:
        """Return the number of long answers for this number of streams."""
        return self.questions * -(-2 * streams // self.questions)


FULL: Final = Plan(
    streams=STREAMS, prefix_tokens=4096, questions=len(LONG), probes=20, prefixes=1, long_prompts=1
)
QUICK: Final = Plan(
    streams=(1, 4), prefix_tokens=512, questions=1, probes=5, prefixes=1, long_prompts=1
)


async def measure(
    server: Server,
    samples: Samples,
    plan: Plan,
    *,
    ours: bool,
    seed: int,
    count_tokens: Callable[[str], int],
) -> None:
    """Run all measurements of one server; record failures and continue."""
    samples.add("memory_loaded_bytes", server.resident_bytes())
    async with open_endpoint(server.url, model=server.model, fields={"temperature": 0}) as endpoint:
        caller = Caller(endpoint)
        async with _recording_failures(samples, "warm-up"):
            await _warm_up(caller, plan, count_tokens)
        for streams in plan.streams:
            async with _recording_failures(samples, f"{streams} streams"):
                await _streams(caller, samples, plan, streams, count_tokens, ours=ours)
        for running in (0, LIVE_STREAMS):
            async with _recording_failures(samples, f"arrivals while {running} run"):
                ttfts_s = await arrivals_s(caller, running=running, probes=plan.probes, seed=seed)
                samples.add(f"ttft_live{running}_s", *ttfts_s)
        async with _recording_failures(samples, "burst"):
            concurrent_s, sequential_s = await burst_s(caller)
            samples.add("burst_concurrent_s", concurrent_s)
            samples.add("burst_sequential_s", sequential_s)
        async with _recording_failures(samples, "system prompts"):
            for number in range(plan.prefixes):
                cold_s, warm_s = await prefix_ttfts_s(
                    caller, tokens=plan.prefix_tokens, seed=100 * seed + number
                )
                samples.add("cold_ttft_s", cold_s)
                samples.add("warm_ttft_s", warm_s)
        async with _recording_failures(samples, "long prompts"):
            for number in range(plan.long_prompts):
                stalled = await stall(
                    caller, tokens=plan.prefix_tokens, seed=100 * seed + 50 + number
                )
                samples.add("long_prompt_ttft_s", stalled.long_prompt_ttft_s)
                samples.add("longest_gap_s", stalled.longest_gap_s)
                samples.add("usual_gap_s", stalled.usual_gap_s)
    samples.add("memory_used_bytes", server.resident_bytes())


@asynccontextmanager
async def _recording_failures(samples: Samples, measurement: str) -> AsyncIterator[None]:
    """Limit the time of one measurement, and record its failure instead of raising it."""
    try:
        async with asyncio.timeout(MEASUREMENT_TIMEOUT_S):
            yield
    except (RequestFailed, TimeoutError, ExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        samples.failures[measurement] = f"{type(first).__name__}: {first}"


async def _warm_up(caller: Caller, plan: Plan, count_tokens: Callable[[str], int]) -> None:
    """Run every kind of load once, so that no kernel is compiled during a measurement."""
    for streams in plan.streams:
        await throughput(caller, streams, answers=streams, count_tokens=count_tokens)
    await burst_s(caller)
    await prefix_ttfts_s(caller, tokens=plan.prefix_tokens, seed=-1)


async def _streams(
    caller: Caller,
    samples: Samples,
    plan: Plan,
    streams: int,
    count_tokens: Callable[[str], int],
    *,
    ours: bool,
) -> None:
    """Measure a number of streams; for our worker also with each k, alternating."""
    modes: list[tuple[str, Mapping[str, Any] | None]] = [("", None)]
    if ours:
        modes += [(f"/k{k}", {"draft_tokens": k}) for k in DRAFT_LENGTHS]
        modes *= REPETITIONS
    for suffix, extra in modes:
        result = await throughput(
            caller,
            streams,
            answers=plan.answers_for(streams),
            count_tokens=count_tokens,
            extra=extra,
        )
        samples.add(f"tokens_per_s/{streams}{suffix}", result.tokens / result.elapsed_s)
        _add_drafts(samples, f"{streams}{suffix}", result.answers)


def _add_drafts(samples: Samples, suffix: str, answers: Sequence[Answer]) -> None:
    """Add the draft statistics of a server, summed over answers."""
    drafts = [answer.drafts for answer in answers if answer.drafts is not None]
    steps = sum(draft.steps for draft in drafts)
    drafted = sum(draft.drafted for draft in drafts)
    if not steps or not drafted:
        return
    accepted = sum(draft.accepted for draft in drafts)
    samples.add(f"acceptance/{suffix}", accepted / drafted)
    samples.add(f"tokens_per_step/{suffix}", 1 + accepted / steps)
    for position, rate in enumerate(sum(drafts[1:], drafts[0]).rate_per_position, 1):
        samples.add(f"acceptance/{suffix}/position{position}", rate)
