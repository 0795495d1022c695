"""What is known of a request before it runs: frozen records, no text of the user.

The gateway reads a body into a `RequestProfile` and the policy decides on that alone; a worker
reads the same body into the same profile, so both name the same reasons. They are tuples: one of
each is made for every request, and a frozen dataclass takes three times as long.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Endpoint(StrEnum):
    """The two generating endpoints of the data plane."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Bypass(StrEnum):
    """Why a request does not run in the speculative text lane (names fixed by DESIGN section 4)."""

    MEDIA = "media"
    NON_GREEDY_SAMPLING = "non_greedy_sampling"
    LOGITS_PROCESSORS = "logits_processors"
    STRUCTURED_OUTPUT = "structured_output"
    LOGPROBS = "logprobs"
    MULTIPLE_CHOICES = "multiple_choices"
    THINKING_BUDGET = "thinking_budget"
    PROMPT_TOO_LONG = "prompt_too_long"
    NO_MTP_WORKER = "no_mtp_worker"
    MTP_NOT_PAYING = "mtp_not_paying"
    HEAD_UNHEALTHY = "head_unhealthy"


class Sampling(NamedTuple):
    """How the next token is chosen; every value is the effective one, none is left to an engine."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        """Say whether the choice is the likeliest token, whatever the other values are."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def reshapes_logits(self) -> bool:
        """Say whether a penalty or a bias changes the scores before the choice."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
        )


class SamplingDefaults(NamedTuple):
    """What stands in for a sampling field that the request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


OPENAI_DEFAULTS = SamplingDefaults()


class RequestProfile(NamedTuple):
    """One request as the policy sees it: shape and wishes, never its words."""

    endpoint: Endpoint
    model: str
    stream: bool = False
    include_usage: bool = False
    metrics: bool = False
    """Whether it asks what drafting did for it."""
    media: tuple[tuple[str, int], ...] = ()
    """Kind and count, e.g. (("image", 2),); sorted by kind."""
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    top_logprobs: int | None = None
    """How many alternatives are asked for; None when no log-probabilities are."""
    tools: bool = False
    structured_output: bool = False
    thinking_budget: int | None = None
    draft_tokens: int | None = None
    """k of this request (`extra_body: {"draft_tokens": k}`); None leaves it to the worker."""
    spec_prefill: bool | None = None
    """Whether a long prompt may be read sparsely (`specprefill`); None leaves it to the worker."""
    spec_prefill_keep: float | None = None
    """The share of it that is read (`specprefill_keep_pct`), above 0, at most 1."""
    messages: int = 0
    text_chars: int = 0
    pixels: int = 0
    """Of all pictures together."""

    @property
    def media_count(self) -> int:
        """Count all media parts."""
        return sum(count for _, count in self.media)


def bypass_reasons(profile: RequestProfile) -> tuple[Bypass, ...]:
    """Name every property of the request that keeps it out of the speculative text lane.

    Empty means eligible. What depends on workers (`no_mtp_worker`, `mtp_not_paying`,
    `head_unhealthy`, `prompt_too_long`) is added by whoever knows them.
    """
    held = []
    sampling = profile.sampling
    if profile.media and profile.media_count > 0:
        held.append(Bypass.MEDIA)
    if not sampling.greedy:
        held.append(Bypass.NON_GREEDY_SAMPLING)
    if sampling.reshapes_logits:
        held.append(Bypass.LOGITS_PROCESSORS)
    if profile.structured_output:
        held.append(Bypass.STRUCTURED_OUTPUT)
    if profile.top_logprobs is not None:
        held.append(Bypass.LOGPROBS)
    if profile.choices > 1:
        held.append(Bypass.MULTIPLE_CHOICES)
    if profile.thinking_budget is not None:
        held.append(Bypass.THINKING_BUDGET)
    return tuple(held)
