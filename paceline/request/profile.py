"""The profile of a request: frozen records without the user's text.

The policy sees only the `RequestProfile`. The worker parses the same body into the same
profile, so both report the same reasons. The records are tuples, because one of each is created per
request, and a frozen dataclass takes three times as long.
"""

from enum import StrEnum
from typing import NamedTuple


class Endpoint(StrEnum):
    """The service that a request of the data plane needs from a model."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    """A vector for each text."""
    RERANK = "rerank"
    """A score for each document, by its relevance to a query."""


GENERATING = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS))
"""The endpoints whose responses are text of the model."""


class Bypass(StrEnum):
    """Why a request does not run in the speculative text lane (names fixed by DESIGN section 4)."""

    ENDPOINT = "endpoint"
    """The request asks for vectors or scores, and nothing is generated."""
    EXACT = "exact"
    """The answer must not depend on the other requests in any bit, so nothing drafts for it."""
    MEDIA = "media"
    NON_GREEDY_SAMPLING = "non_greedy_sampling"
    LOGITS_PROCESSORS = "logits_processors"
    LOGPROBS = "logprobs"
    MULTIPLE_CHOICES = "multiple_choices"
    PROMPT_TOO_LONG = "prompt_too_long"
    NO_MTP_WORKER = "no_mtp_worker"
    MTP_NOT_PAYING = "mtp_not_paying"
    HEAD_UNHEALTHY = "head_unhealthy"


class Priority(StrEnum):
    """The priority of a request in a queue."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BULK = "bulk"


class Sampling(NamedTuple):
    """Effective sampling values; none is left to the default of an engine."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        """Return whether the engine always takes the likeliest token."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def reshapes_logits(self) -> bool:
        """Return whether a penalty or a bias changes the logits."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
        )


OPENAI_DEFAULTS = Sampling()
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The values of `reasoning_effort`, from the least to the most."""


class RequestProfile(NamedTuple):
    """The properties of one request that the policy may use, without its text."""

    endpoint: Endpoint
    model: str
    stream: bool = False
    include_usage: bool = False
    usage_interval: int | None = None
    """Chunks of a stream have the usage so far at least after so many tokens; 0: each chunk (vLLM's
    name for it is `continuous_usage_stats`); None: only the last one, if any."""
    metrics: bool = False
    """Whether the request asks for draft metrics."""
    token_sources: bool = False
    """Whether the answer lists its tokens, and which of them were drafted (`token_sources`)."""
    media: tuple[tuple[str, int], ...] = ()
    """Kind and count, e.g. (("image", 2),); sorted by kind."""
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    min_tokens: int = 0
    """Tokens before which nothing may end the answer but a stop string."""
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Whether the answer goes on after the model's own end."""
    prompt_limit: int | None = None
    """The most tokens of the prompt, whose beginning is cut; -1: up to the context."""
    generation_prompt: bool = True
    """Whether the template begins the assistant's message behind the last one."""
    continues_message: bool = False
    """Whether the answer goes on from the last message, which is the assistant's."""
    choices: int = 1
    top_logprobs: int | None = None
    """The number of alternatives; None without log-probabilities."""
    tools: bool = False
    call_fields: tuple[str, ...] = ()
    """Fields that prescribe free calls.

    A worker that `constrains_calls` acts on them, except beside a structured output."""
    legacy_functions: bool = False
    """Whether a call of the answer is a `function_call`, as `functions` ask for it."""
    structured_output: bool = False
    thinking_budget: int | None = None
    """The most tokens of reasoning."""
    include_reasoning: bool = True
    """Whether the response contains the reasoning."""
    draft_tokens: int | None = None
    """k of this request (`extra_body: {"draft_tokens": k}`); None: the worker's k."""
    exact: bool = False
    """Whether the answer must be the same in every bit, whatever other requests run."""
    spec_prefill: bool | None = None
    """Whether to use sparse prefill (`specprefill`); None: the worker's setting."""
    spec_prefill_keep: float | None = None
    """The share of the prompt to prefill (`specprefill_keep_pct`), above 0, at most 1."""
    messages: int = 0
    prompts: int = 1
    """The prompts of a completion, each with `choices` answers; of others texts or documents."""
    echo: bool = False
    """Whether the text of a completion begins with its prompt."""
    text_chars: int = 0
    pixels: int = 0
    """The pixels of all pictures together."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that change no answer, so nothing acts on them."""
    spelled: tuple[tuple[str, str], ...] = ()
    """Names of fields in errors, each with the client's name for it."""
    replaced: tuple[str, ...] = ()
    """The place and the type of each part of the history that words replace."""

    @property
    def media_count(self) -> int:
        """Return the number of media parts."""
        return sum(count for _, count in self.media)


def bypass_reasons(profile: RequestProfile) -> tuple[Bypass, ...]:
    """Return the properties of the request that exclude the speculative lane; empty if eligible.

    The router and the worker add the reasons that depend on workers (`no_mtp_worker`,
    `mtp_not_paying`, `head_unhealthy`, `prompt_too_long`).
    """
    if profile.endpoint not in GENERATING:
        return (Bypass.ENDPOINT,)
    properties = {
        Bypass.EXACT: profile.exact,
        Bypass.MEDIA: profile.media_count > 0,
        Bypass.NON_GREEDY_SAMPLING: not profile.sampling.greedy,
        Bypass.LOGITS_PROCESSORS: profile.sampling.reshapes_logits,
        Bypass.LOGPROBS: profile.top_logprobs is not None,
        Bypass.MULTIPLE_CHOICES: profile.choices > 1,
    }
    return tuple(reason for reason, holds in properties.items() if holds)
