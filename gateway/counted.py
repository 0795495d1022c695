"""Read what a worker's answer counts: tokens, and what drafting did for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.types import Drafts, Usage

# More than any context holds.
_TOKENS_LIMIT = 10_000_000
# More than anybody drafts at once.
_DRAFT_LIMIT = 65


def read_usage(answer: Mapping[str, Any]) -> Usage | None:
    """Read the `usage` of an answer or a chunk; None when there is none that makes sense."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
    )


def read_drafts(answer: Mapping[str, Any]) -> Drafts | None:
    """Read vLLM's per-request draft counts; None where there are none that make sense."""
    metrics = answer.get("metrics")
    told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(told, dict):
        return None
    steps, drafted, accepted = (
        _count(told.get("num_spec_steps")),
        _count(told.get("num_draft_tokens")),
        _count(told.get("num_accepted_draft_tokens")),
    )
    histogram = told.get("acceptance_histogram")
    by_accepted = histogram[:_DRAFT_LIMIT] if isinstance(histogram, list) else ()
    if accepted > drafted:
        return None
    return Drafts(steps, drafted, accepted, tuple(map(_count, by_accepted)))


def _count(value: object) -> int:
    """Read a token count; what a worker lies makes no sum go back, and none grow beyond sense."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return min(max(value, 0), _TOKENS_LIMIT)
