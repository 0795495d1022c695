"""What was counted and timed, as `/v1/status` tells it at every level: the typed model.

`recent` and `history` are of the window that was asked for (`?window=5m`) and of the requests that
the gateway which answers has sent to workers; drafts there are those that the answers told of.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

Share = Annotated[float, Field(ge=0, le=1)]


class Told(BaseModel):
    """A frozen part of the status that has these fields and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Percentiles(Told):
    """How values of the window spread; correct to about an eighth, as buckets are so wide."""

    count: NonNegativeInt
    """Of values; where there is none, all others are 0."""
    p50: NonNegativeFloat
    p95: NonNegativeFloat


class MtpOff(Told):
    """No lane here drafts."""

    enabled: Literal[False]


class MtpOn(Told):
    """What drafting did: `attempted == accepted + rejected + errors` at every moment."""

    enabled: Literal[True]
    requested_draft_tokens: NonNegativeInt
    """k as configured, the largest of the lanes that are there."""
    effective_draft_tokens: NonNegativeInt
    """k at present: 0 where drafting was measured not to pay just now."""
    drafts: NonNegativeInt
    """Verifies of one request's draft."""
    attempted: NonNegativeInt
    """Tokens drafted."""
    accepted: NonNegativeInt
    rejected: NonNegativeInt
    errors: NonNegativeInt
    """Draft tokens that the drafter failed to bring or the verify to judge."""
    acceptance_rate: Share
    """Accepted over judged draft tokens."""
    mean_acceptance_length: Annotated[float, Field(ge=1)]
    """Tokens of a step, the one that it would have brought anyway included."""
    acceptance_rate_per_position: tuple[Share, ...]
    """Share of drafts that were accepted up to this position and further, first one first."""
    bypass_counts: dict[str, NonNegativeInt]
    """Requests that were not drafted for, by reason, as the workers counted them."""


Mtp = MtpOff | MtpOn


class LanePrefix(Told):
    """What workers found of the system prompts that requests share."""

    hits: NonNegativeInt
    misses: NonNegativeInt
    cached_tokens: NonNegativeInt
    """Prompt tokens that were not read again."""


class Saved(Told):
    """What drafting and kept system prompts have saved, as the workers measured it."""

    decode_steps: NonNegativeInt
    """Accepted draft tokens: each is a step of the model that was not taken."""
    decode_s: float
    """Seconds: what these tokens would have taken one by one at the measured cost of a plain step,
    less what the drafted steps took. Below 0 where drafting cost more than it brought."""
    prompt_tokens: NonNegativeInt
    """Of system prompts, not read again."""
    prompt_s: NonNegativeFloat
    """Seconds that reading them would have taken at the measured speed."""


class PrefixResults(Told):
    """Requests by what became of their system prompt."""

    hit: NonNegativeInt
    miss: NonNegativeInt
    none: NonNegativeInt
    """They had none that is worth looking for."""


class Recent(Told):
    """What ended in the window: of the fleet, a pool, a model, a worker or a lane."""

    requests: NonNegativeInt
    """Requests that reached a worker and ended, however they did."""
    failed: NonNegativeInt
    """Of these, those that the worker failed."""
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    cached_tokens: NonNegativeInt
    tokens_per_s: NonNegativeFloat
    """Tokens of answers that ended, by second of the window: the throughput."""
    first_token_s: Percentiles
    """From the whole body read to the first content; of streams."""
    token_s: Percentiles
    """Seconds a token after the first one; of streams."""
    request_tokens_per_s: Percentiles
    """Tokens a second after the first one, as one client sees it; of streams."""
    wait_s: Percentiles
    """In line for a slot, of those requests that had to wait."""
    answer_s: Percentiles
    """From the first byte of the request to the last of its answer."""
    reasons: dict[str, NonNegativeInt]
    """Why they ran where they ran."""
    prefix: PrefixResults
    mtp: Mtp
    """Drafts within the window, as answers told of them. They tell of no `errors`, which are among
    `rejected`; `bypass_counts` are those of `decisions`, within the window."""


class Window(Told):
    """Which time `recent` and `history` are of."""

    asked_s: NonNegativeFloat
    covered_s: NonNegativeFloat
    """Less where the gateway has not run for so long."""
    longest_s: NonNegativeFloat
    """No longer window is kept."""


class Point(Told):
    """A few seconds of the window."""

    ago_s: NonNegativeFloat
    """How long ago it ended."""
    seconds: NonNegativeFloat
    requests: NonNegativeInt
    tokens_per_s: NonNegativeFloat
    first_token_s: Percentiles
    answer_s: Percentiles
    drafts: NonNegativeInt
    attempted: NonNegativeInt
    accepted: NonNegativeInt
    acceptance_rate: Share
