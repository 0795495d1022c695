"""What the two answer shapes have in common: a writer for each choice, and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.engine.types import Delta, Finished
from workers.server.ports import Json

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; vLLM writes this in its place."""


class ChoiceWriter(Protocol):
    """Turns the events of one choice into entries of `choices`."""

    def opening(self) -> Sequence[Json]:
        """Entries of the chunks that come before any text."""

    def more(self, delta: Delta) -> Sequence[Json]:
        """Entries of the chunks for newly decided text."""

    def end(self, finished: Finished) -> Sequence[Json]:
        """Entries of the chunks for what was held back, and the reason of the end."""

    def whole(self) -> Json:
        """Return the entry of the whole answer, once ended."""


def usage_of(finished: Sequence[Finished]) -> Json:
    """Add up the usage of all choices; their one prompt counts once."""
    prompt_tokens = finished[0].usage.prompt_tokens
    completion_tokens = sum(end.usage.completion_tokens for end in finished)
    details = {"cached_tokens": finished[0].usage.cached_tokens}
    if finished[0].usage.skipped_tokens:
        details["skipped_tokens"] = finished[0].usage.skipped_tokens  # SpecPrefill never read them
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


def metrics_of(finished: Sequence[Finished], *, detailed: bool) -> Json:
    """Render the root field `metrics` as {} where nothing speculated; null for several choices.

    In detail there are two numbers for every step as well, under vLLM's names.
    """
    if not any(end.speculation.steps or end.speculation.num_spec_tokens for end in finished):
        return {}
    if len(finished) > 1:
        return {"metrics": None}
    (end,) = finished
    counts = end.speculation.as_request_metrics()
    if detailed:
        counts["per_step_accepted"] = [step.accepted for step in end.steps]
        counts["per_step_drafted"] = [step.drafted for step in end.steps]
    return {"metrics": {"speculative_decoding": counts}}


def json_logprob(logprob: float) -> float:
    """Return the log-probability as a number that JSON can carry."""
    return max(logprob, LOWEST_LOGPROB)
