"""Features of requests that not every engine takes: a lane that lacks one gets no such request.

Most engines ignore a field that they do not know, and the answer would be another than requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from operator import attrgetter
from typing import Self

from paceline.request.profile import Endpoint, RequestProfile
from policies.sections import MEDIA_KINDS

_Asked = Callable[[RequestProfile], object]


def _media(kind: str) -> _Asked:
    return lambda request: dict(request.media).get(kind)


def _given(name: str) -> _Asked:
    return lambda request: getattr(request, name) is not None


def _shapes_logits(request: RequestProfile) -> bool:
    return bool(request.sampling.presence_penalty or request.sampling.frequency_penalty)


class Feature(StrEnum):
    """One feature of a request; the value names it for people."""

    field: str | None
    """The field of a request that asks for it."""
    asked: _Asked
    """Whether a request asks for it."""

    def __new__(cls, value: str, field: str | None, asked: _Asked) -> Self:
        """Make the member of this value."""
        member = str.__new__(cls, value)
        member._value_, member.field, member.asked = value, field, asked
        return member

    EXACT = "exact answers", "exact", attrgetter("exact")
    COMPLETIONS = "completions", None, lambda one: one.endpoint is Endpoint.COMPLETIONS
    IMAGE = "pictures", "messages", _media("image")
    VIDEO = "videos", "messages", _media("video")
    AUDIO = "audio", "messages", _media("audio")
    FILE = "files", "messages", _media("file")
    TOOLS = "tools", "tools", attrgetter("tools")
    CALLS = "prescribed tool calls", "tool_choice", attrgetter("call_fields")
    STRUCTURED_OUTPUT = "structured output", "response_format", attrgetter("structured_output")
    LOGPROBS = "log-probabilities", "logprobs", _given("top_logprobs")
    CHOICES = "several answers", "n", lambda one: one.choices > 1
    PROMPTS = "several prompts", "prompt", lambda one: one.prompts > 1
    ECHO = "echo", "echo", attrgetter("echo")
    STOP = "stop strings", "stop", attrgetter("stop")
    STOP_TOKENS = "stop tokens", "stop_token_ids", attrgetter("stop_tokens")
    MIN_TOKENS = "a minimum number of tokens", "min_tokens", attrgetter("min_tokens")
    IGNORE_EOS = "answers beyond their end", "ignore_eos", attrgetter("ignore_eos")
    TRUNCATION = "truncated prompts", "truncate_prompt_tokens", _given("prompt_limit")
    CONTINUATION = (
        "answers that continue the last message",
        "continue_final_message",
        lambda one: one.continues_message or not one.generation_prompt,
    )
    THINKING_BUDGET = "a limit on reasoning", "thinking_budget", _given("thinking_budget")
    # A greedy answer is the same whatever the sampler would leave out.
    TOP_K = "top_k", "top_k", lambda one: one.sampling.top_k > 1 and not one.sampling.greedy
    MIN_P = "min_p", "min_p", lambda one: one.sampling.min_p and not one.sampling.greedy
    PENALTIES = "presence and frequency penalties", "presence_penalty", _shapes_logits
    REPETITION_PENALTY = (
        "repetition_penalty",
        "repetition_penalty",
        lambda one: one.sampling.repetition_penalty != 1.0,
    )
    LOGIT_BIAS = "logit_bias", "logit_bias", attrgetter("sampling.logit_bias")


CHECKED = frozenset((Feature.CALLS,))
"""Features that an engine may have by chance: it gets the request if no other worker does, and the
gateway checks its answer."""
MEDIA = {kind: Feature[kind.upper()] for kind in MEDIA_KINDS}

_ENGINE = "exact continuation calls"
_LOCAL = f"{_ENGINE} file prompts echo min_tokens truncation"
# The functions of mlx-lm read and write beyond an array, or raise an error in the thread that
# generates, at token ids beyond the vocabulary, whose size no such engine tells: one request would
# end the engine. So it gets no token ids of clients.
_MLX = f"{_LOCAL} logit_bias stop_tokens choices ignore_eos"
LACKS: Mapping[str, frozenset[Feature]] = {
    kind: frozenset(Feature[name] for name in names.upper().split())
    for kind, names in {
        "paceline": "",
        "openai": _ENGINE,
        "llama.cpp": f"{_LOCAL} video stop_tokens",
        "lmstudio": f"{_LOCAL} video audio choices logprobs stop_tokens ignore_eos thinking_budget "
        "min_p",
        "ollama": f"{_LOCAL} video audio choices logprobs stop_tokens ignore_eos thinking_budget "
        "top_k min_p repetition_penalty logit_bias",
        "omlx": f"{_LOCAL} choices logprobs stop_tokens ignore_eos top_k repetition_penalty "
        "logit_bias",
        "mlx-lm": f"{_MLX} image video audio structured_output thinking_budget",
        "mlx-vlm": f"{_MLX} completions stop",
        "vllm-mlx": f"{_MLX} logprobs stop",
    }.items()
}
"""The features that no model of a kind of engine takes."""


def features_of(profile: RequestProfile) -> frozenset[Feature]:
    """Return the features that a request needs."""
    return frozenset(feature for feature in Feature if feature.asked(profile))
