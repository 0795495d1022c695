"""Figures of one measurement, with the definitions and names of `vllm bench serve`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import fmean, pstdev, quantiles
from typing import Any

from gateway.loadgen.client import Answer
from gateway.loadgen.drafts import Drafts


def summarize(
    answers: Sequence[Answer], *, counters: Drafts | None = None, client_busy: float = 0.0
) -> dict[str, Any]:
    """Return the fields of `vllm bench serve --save-result`, without those not measured.

    `counters` are the server's draft counts meanwhile. Draft counts in the answers take precedence,
    because they include no other requests. `client_busy` is the CPU time of the load generator
    divided by the duration.
    """
    complete = [answer for answer in answers if not answer.problem]
    reported = [answer.drafts for answer in complete if answer.drafts is not None]
    drafts = sum(reported, Drafts()) if reported else counters
    seconds = duration_s(answers)
    input_tokens = sum(answer.input_tokens for answer in complete)
    output_tokens = sum(answer.output_tokens for answer in complete)
    by_server = all(answer.tokens_reported for answer in complete)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(complete),
        "failed": len(answers) - len(complete),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "output_tokens_counted_by": "server" if by_server else "pieces",
        "request_throughput": len(complete) / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
        # No peak is below the mean, also of a run that is shorter than a second.
        "max_output_tokens_per_s": max(busiest_second(complete), output_tokens / seconds),
        "max_concurrent_requests": peak_concurrency(answers),
        "client_busy": client_busy,
        **spread("ttft", (answer.ttft_s for answer in complete)),
        **spread("tpot", (answer.tpot_s for answer in complete)),
        **spread("itl", (gap_s for answer in complete for gap_s in answer.gaps_s)),
        **spread("e2el", (answer.whole_s for answer in complete)),
    }
    if drafts is not None and drafts.drafted:
        figures |= {
            "spec_decode_acceptance_rate": 100 * drafts.acceptance_rate,
            "spec_decode_acceptance_length": drafts.acceptance_length,
            "spec_decode_num_drafts": drafts.steps,
            "spec_decode_draft_tokens": drafts.drafted,
            "spec_decode_accepted_tokens": drafts.accepted,
            "spec_decode_per_position_acceptance_rates": list(drafts.rate_per_position),
            "spec_decode_counted_by": "answers" if reported else "server",
        }
    return figures


def spread(name: str, times_s: Iterable[float | None]) -> dict[str, float]:
    """Return the distribution of times, in milliseconds; empty if all times are None."""
    times_ms = [1e3 * time_s for time_s in times_s if time_s is not None]
    if not times_ms:
        return {}
    # `quantiles` interpolates as numpy does, but requires two values.
    cuts = quantiles(times_ms if len(times_ms) > 1 else times_ms * 2, n=100, method="inclusive")
    kinds = {
        "mean": fmean(times_ms),
        "median": cuts[49],
        "std": pstdev(times_ms),
        "p90": cuts[89],
        "p99": cuts[98],
    }
    return {f"{kind}_{name}_ms": value for kind, value in kinds.items()}


def duration_s(answers: Sequence[Answer]) -> float:
    """Return the time from the first due request to the last end."""
    begins = min(answer.due_s for answer in answers)
    return max(max(answer.ended_s for answer in answers) - begins, 1e-9)


def busiest_second(answers: Sequence[Answer]) -> float:
    """Return the tokens of the busiest second, counted from the first due request.

    vLLM counts each piece as one token; here the tokens are spread over the pieces of an answer,
    because speculation yields several tokens per piece.
    """
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
