"""What the engines of one machine share, beside OpenAI's API: spellings and counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gateway.engines.base import count
from gateway.engines.openai import OpenAIEngine
from gateway.routing.features import Feature
from gateway.types import Drafts

_WHOLE_VOCABULARY = 32_000
"""Tokens that nearly all models have; few have less."""


class LocalEngine(OpenAIEngine):
    """An engine of one machine: it serves the models that it lists, and no others."""

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return a listed name; the engine has no others."""
        return name if name in listed else ""

    def adapt(self, fields: dict[str, Any], salt: str) -> None:  # noqa: ARG002
        """Limit the answer by the older field, which all of them know."""
        limit = fields.pop("max_completion_tokens", None)
        if limit is not None:
            fields["max_tokens"] = limit


class MlxEngine(LocalEngine):
    """An engine that samples by the functions of mlx-lm.

    These read and write beyond an array, or raise an error in the thread that generates, at token
    ids and at a `top_k` beyond the vocabulary, whose size no such engine tells: one request would
    end the engine. So it gets no token ids of clients.
    """

    token_ids = frozenset((Feature.LOGIT_BIAS, Feature.STOP_TOKENS))
    """The features whose values are ids of tokens."""

    def adapt(self, fields: dict[str, Any], salt: str) -> None:
        """Leave out a `top_k` that excludes no token."""
        super().adapt(fields, salt)
        if (fields.get("top_k") or 0) >= _WHOLE_VOCABULARY:
            del fields["top_k"]


def drafts_of_timings(answer: Mapping[str, Any]) -> Drafts | None:
    """Read the draft counts of the object `timings`, whose names are those of llama.cpp.

    None if it has none. Without `draft_rounds`, every token that was no accepted draft counts as a
    step, so that the mean length of a step is rather too low.
    """
    timings = answer.get("timings")
    if not isinstance(timings, dict) or timings.get("draft_n") is None:
        return None
    drafted, accepted = count(timings.get("draft_n")), count(timings.get("draft_n_accepted"))
    if accepted > drafted:
        return None
    steps = count(timings.get("draft_rounds")) or max(
        0, count(timings.get("predicted_n")) - accepted
    )
    return Drafts(steps, drafted, accepted, ())
