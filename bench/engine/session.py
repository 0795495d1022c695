"""One life of a server, measured from its start to its end."""

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
"""k that our worker is asked for by name, beside the one that it chooses itself."""
TURNS: Final = 3
"""Our worker's ks are compared with each other, so each is measured this often, in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured in one life of a server."""

    streams: tuple[int, ...]
    prefix_tokens: int
    questions: int
    """Long questions; each is asked as often as any other, so that acceptance compares."""
    probes: int
    prefixes: int
    newcomers: int

    def answers_for(self, streams: int) -> int:
        """Return how many long answers so many streams give."""
        return self.questions * -(-2 * streams // self.questions)


FULL: Final = Plan(
    streams=STREAMS, prefix_tokens=4096, questions=len(LONG), probes=20, prefixes=1, newcomers=1
)
QUICK: Final = Plan(
    streams=(1, 4), prefix_tokens=512, questions=1, probes=5, prefixes=1, newcomers=1
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
    """Ask everything of one server; what it cannot do is noted, and the rest goes on."""
    samples.add("memory_loaded_bytes", server.resident_bytes())
    async with open_endpoint(server.url, model=server.model, fields={"temperature": 0}) as endpoint:
        caller = Caller(endpoint)
        async with _noting(samples, "warm-up"):
            await _warm_up(caller, plan, count_tokens)
        for streams in plan.streams:
            async with _noting(samples, f"{streams} streams"):
                await _streams(caller, samples, plan, streams, count_tokens, ours=ours)
        for live in (0, LIVE_STREAMS):
            async with _noting(samples, f"arrivals while {live} run"):
                waits_s = await arrivals_s(caller, live=live, probes=plan.probes, seed=seed)
                samples.add(f"ttft_live{live}_s", *waits_s)
        async with _noting(samples, "burst"):
            at_once_s, in_turn_s = await burst_s(caller)
            samples.add("burst_at_once_s", at_once_s)
            samples.add("burst_in_turn_s", in_turn_s)
        async with _noting(samples, "system prompts"):
            for number in range(plan.prefixes):
                cold_s, warm_s = await prefix_ttfts_s(
                    caller, tokens=plan.prefix_tokens, seed=100 * seed + number
                )
                samples.add("cold_ttft_s", cold_s)
                samples.add("warm_ttft_s", warm_s)
        async with _noting(samples, "newcomers"):
            for number in range(plan.newcomers):
                seen = await stall(caller, tokens=plan.prefix_tokens, seed=100 * seed + 50 + number)
                samples.add("newcomer_ttft_s", seen.newcomer_ttft_s)
                samples.add("longest_gap_s", seen.longest_gap_s)
                samples.add("usual_gap_s", seen.usual_gap_s)
    samples.add("memory_used_bytes", server.resident_bytes())


@asynccontextmanager
async def _noting(samples: Samples, what: str) -> AsyncIterator[None]:
    """Bound one measurement in time, and note its failure instead of ending the session."""
    try:
        async with asyncio.timeout(MEASUREMENT_TIMEOUT_S):
            yield
    except (RequestFailed, TimeoutError, ExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        samples.failures[what] = f"{type(first).__name__}: {first}"


async def _warm_up(caller: Caller, plan: Plan, count_tokens: Callable[[str], int]) -> None:
    """Run every kind of load once, so that no kernel is compiled while a clock runs."""
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
    """Measure one number of streams; ours also with each k, in turns."""
    modes: list[tuple[str, Mapping[str, Any] | None]] = [("", None)]
    if ours:
        modes += [(f"/k{k}", {"draft_tokens": k}) for k in DRAFT_LENGTHS]
        modes *= TURNS
    for suffix, extra in modes:
        brought = await throughput(
            caller,
            streams,
            answers=plan.answers_for(streams),
            count_tokens=count_tokens,
            extra=extra,
        )
        samples.add(f"tokens_per_s/{streams}{suffix}", brought.tokens / brought.elapsed_s)
        _add_drafts(samples, f"{streams}{suffix}", brought.answers)


def _add_drafts(samples: Samples, suffix: str, answers: Sequence[Answer]) -> None:
    """Keep what a server said of its drafts, summed over answers."""
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
