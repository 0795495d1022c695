"""Figures of one measurement, with the definitions and names of `vllm bench serve`."""

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
    """A distribution of times, in milliseconds."""

    mean: float
    median: float
    std: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one measurement; a distribution is None without data."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    tokens_reported: bool
    """Whether the server reported tokens; otherwise pieces of text count as tokens."""
    peak_output_tokens_s: float
    """Tokens in the busiest second. vLLM counts each piece as one token; here the tokens are
    spread over the pieces of an answer, because speculation yields several tokens per piece."""
    peak_concurrency: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None
    drafts: Drafts | None
    drafts_of: str
    """`answers`, or `server` for its counters, which include other clients."""
    client_busy: float
    """The CPU time of the load generator divided by the duration."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `vllm bench serve --save-result`, without those not measured."""
        record: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "output_tokens_counted_by": "server" if self.tokens_reported else "pieces",
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
                    record[f"{kind}_{name}_ms"] = getattr(spread, kind)
        if self.drafts is not None:
            record |= {
                "spec_decode_acceptance_rate": 100 * self.drafts.acceptance_rate,
                "spec_decode_acceptance_length": self.drafts.acceptance_length,
                "spec_decode_num_drafts": self.drafts.steps,
                "spec_decode_draft_tokens": self.drafts.drafted,
                "spec_decode_accepted_tokens": self.drafts.accepted,
                "spec_decode_per_position_acceptance_rates": list(self.drafts.rate_per_position),
                "spec_decode_counted_by": self.drafts_of,
            }
        return record


def summarize(
    answers: Sequence[Answer], *, counters: Drafts | None = None, client_busy: float = 0.0
) -> Figures:
    """Return the figures of all answers; `counters` are the server's draft counts meanwhile.

    Draft counts in the answers take precedence, because they include no other requests.
    """
    complete = [answer for answer in answers if not answer.problem]
    reported = [answer.drafts for answer in complete if answer.drafts is not None]
    drafts = sum(reported, Drafts()) if reported else counters
    return Figures(
        duration_s=duration_s(answers),
        completed=len(complete),
        failed=len(answers) - len(complete),
        input_tokens=sum(answer.input_tokens for answer in complete),
        output_tokens=sum(answer.output_tokens for answer in complete),
        tokens_reported=all(answer.tokens_reported for answer in complete),
        peak_output_tokens_s=busiest_second(complete),
        peak_concurrency=peak_concurrency(answers),
        ttft=spread(answer.ttft_s for answer in complete),
        tpot=spread(answer.tpot_s for answer in complete),
        itl=spread(gap for answer in complete for gap in answer.gaps_s),
        e2el=spread(answer.whole_s for answer in complete),
        drafts=drafts if drafts is not None and drafts.drafted else None,
        drafts_of="answers" if reported else "server",
        client_busy=client_busy,
    )


def spread(times_s: Iterable[float | None]) -> Spread | None:
    """Return the distribution of times in seconds, or None if all are None."""
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
    """Return a percentile of ordered values, with linear interpolation as in numpy."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def duration_s(answers: Sequence[Answer]) -> float:
    """Return the time from the first due request to the last end."""
    begins = min(answer.due_s for answer in answers)
    return max(max(answer.ended_s for answer in answers) - begins, 1e-9)


def busiest_second(answers: Sequence[Answer]) -> float:
    """Return the tokens of the busiest second, counted from the first due request."""
    begins = min((answer.due_s for answer in answers), default=0.0)
    seconds: defaultdict[int, float] = defaultdict(float)
    for answer in answers:
        for arrived_s in answer.pieces_s:
            seconds[int(arrived_s - begins)] += answer.output_tokens / len(answer.pieces_s)
    return max(seconds.values(), default=0.0)


def peak_concurrency(answers: Sequence[Answer]) -> int:
    """Return the maximum number of concurrent requests."""
    changes = sorted(
        change for answer in answers for change in ((answer.due_s, 1), (answer.ended_s, -1))
    )  # an end sorts before a start at the same time
    return max(accumulate(step for _, step in changes), default=0)
