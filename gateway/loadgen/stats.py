"""Figures of one measurement, pure: by the definitions of `vllm bench serve`, under its names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any

from gateway.loadgen.client import Answer
from gateway.loadgen.drafts import Drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How times are spread, in milliseconds."""

    mean: float
    median: float
    std: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one measurement found; a spread is None where nothing could be timed."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    tokens_counted: bool
    """By the server; otherwise pieces of text are counted for tokens."""
    peak_output_tokens_s: float
    """In the busiest second. vLLM takes each piece for one token; here the pieces of an answer
    share its tokens, since drafting brings several at a time."""
    peak_concurrency: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None
    drafts: Drafts | None
    drafts_of: str
    """`answers`, or `server`: the counters of the whole server, whoever else used it."""
    client_busy: float
    """The share of the time in which the load generator itself computed."""

    def as_json(self) -> dict[str, Any]:
        """Render as `vllm bench serve --save-result` does; what was not measured is not there."""
        told: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "output_tokens_counted_by": "server" if self.tokens_counted else "pieces",
            "request_throughput": self.completed / self.duration_s,
            "output_throughput": self.output_tokens / self.duration_s,
            "total_token_throughput": (self.input_tokens + self.output_tokens) / self.duration_s,
            "max_output_tokens_per_s": self.peak_output_tokens_s,
            "max_concurrent_requests": self.peak_concurrency,
            "client_busy": self.client_busy,
        }
        for name in ("ttft", "tpot", "itl", "e2el"):
            spread: Spread | None = getattr(self, name)
            if spread is not None:
                for kind in ("mean", "median", "std", "p90", "p99"):
                    told[f"{kind}_{name}_ms"] = getattr(spread, kind)
        if self.drafts is not None:
            told |= {
                "spec_decode_acceptance_rate": 100 * self.drafts.acceptance_rate,
                "spec_decode_acceptance_length": self.drafts.acceptance_length,
                "spec_decode_num_drafts": self.drafts.steps,
                "spec_decode_draft_tokens": self.drafts.drafted,
                "spec_decode_accepted_tokens": self.drafts.accepted,
                "spec_decode_per_position_acceptance_rates": list(self.drafts.rate_per_position),
                "spec_decode_counted_by": self.drafts_of,
            }
        return told


def figures(
    answers: Sequence[Answer], *, counters: Drafts | None = None, client_busy: float = 0.0
) -> Figures:
    """Sum up answers; `counters` is what the server itself counted meanwhile.

    What the answers tell of drafts comes first: it is of these requests alone.
    """
    whole = [answer for answer in answers if not answer.problem]
    told = [answer.drafts for answer in whole if answer.drafts is not None]
    drafts = sum(told, Drafts()) if told else counters
    return Figures(
        duration_s=duration_s(answers),
        completed=len(whole),
        failed=len(answers) - len(whole),
        input_tokens=sum(answer.input_tokens for answer in whole),
        output_tokens=sum(answer.output_tokens for answer in whole),
        tokens_counted=all(answer.tokens_reported for answer in whole),
        peak_output_tokens_s=busiest_second(whole),
        peak_concurrency=peak(answers),
        ttft=spread(answer.ttft_s for answer in whole),
        tpot=spread(answer.tpot_s for answer in whole),
        itl=spread(gap for answer in whole for gap in answer.gaps_s),
        e2el=spread(answer.whole_s for answer in whole),
        drafts=drafts if drafts is not None and drafts.drafted else None,
        drafts_of="answers" if told else "server",
        client_busy=client_busy,
    )


def spread(times_s: Iterable[float | None]) -> Spread | None:
    """Sum up times, leaving out what was not measured."""
    times_ms = sorted(1e3 * time_s for time_s in times_s if time_s is not None)
    if not times_ms:
        return None
    return Spread(
        mean=fmean(times_ms),
        median=percentile(times_ms, 0.5),
        std=pstdev(times_ms),
        p90=percentile(times_ms, 0.9),
        p99=percentile(times_ms, 0.99),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ordered values, straight between neighbours as numpy has it."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def duration_s(answers: Sequence[Answer]) -> float:
    """Return the time from the first request that was due to the last end."""
    begins = min(answer.due_s for answer in answers)
    return max(max(answer.ended_s for answer in answers) - begins, 1e-9)


def busiest_second(answers: Sequence[Answer]) -> float:
    """Return the tokens that came in the busiest of the seconds since the first was due."""
    begins = min((answer.due_s for answer in answers), default=0.0)
    seconds: defaultdict[int, float] = defaultdict(float)
    for answer in answers:
        for arrived_s in answer.pieces_s:
            seconds[int(arrived_s - begins)] += answer.output_tokens / len(answer.pieces_s)
    return max(seconds.values(), default=0.0)


def peak(answers: Sequence[Answer]) -> int:
    """Return how many requests were open at the same moment at most."""
    turns = sorted(
        turn for answer in answers for turn in ((answer.due_s, 1), (answer.ended_s, -1))
    )  # an end comes before a begin of the same moment
    return max(accumulate(change for _, change in turns), default=0)
