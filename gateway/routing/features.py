"""Features of requests that not every engine takes: a lane that lacks one gets no such request.

Most engines ignore a field that they do not know, and the answer would be another than requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from paceline.request.profile import Endpoint, RequestProfile


class Feature(StrEnum):
    """One feature of a request; the value names it for people."""

    EXACT = "exact answers"
    COMPLETIONS = "completions"
    IMAGE = "pictures"
    VIDEO = "videos"
    AUDIO = "audio"
    FILE = "files"
    TOOLS = "tools"
    CALLS = "prescribed tool calls"
    STRUCTURED_OUTPUT = "structured output"
    LOGPROBS = "log-probabilities"
    CHOICES = "several answers"
    PROMPTS = "several prompts"
    ECHO = "echo"
    STOP = "stop strings"
    STOP_TOKENS = "stop tokens"
    MIN_TOKENS = "a least number of tokens"
    IGNORE_EOS = "answers past their end"
    TRUNCATION = "truncated prompts"
    CONTINUATION = "answers that go on from the last message"
    THINKING_BUDGET = "a limit of reasoning"
    TOP_K = "top_k"
    MIN_P = "min_p"
    PENALTIES = "penalties of presence and frequency"
    REPETITION_PENALTY = "repetition_penalty"
    LOGIT_BIAS = "logit_bias"


CHECKED = frozenset((Feature.CALLS,))
"""Features that an engine may have by chance: it gets the request if no other worker does, and the
gateway checks its answer."""
MEDIA = {
    "image": Feature.IMAGE,
    "video": Feature.VIDEO,
    "audio": Feature.AUDIO,
    "file": Feature.FILE,
}
_TESTS: Mapping[Feature, tuple[str | None, Callable[[RequestProfile], bool]]] = {
    Feature.EXACT: ("exact", lambda profile: profile.exact),
    Feature.COMPLETIONS: (None, lambda profile: profile.endpoint is Endpoint.COMPLETIONS),
    Feature.TOOLS: ("tools", lambda profile: profile.tools),
    Feature.CALLS: ("tool_choice", lambda profile: bool(profile.call_fields)),
    Feature.STRUCTURED_OUTPUT: ("response_format", lambda profile: profile.structured_output),
    Feature.LOGPROBS: ("logprobs", lambda profile: profile.top_logprobs is not None),
    Feature.CHOICES: ("n", lambda profile: profile.choices > 1),
    Feature.PROMPTS: ("prompt", lambda profile: profile.prompts > 1),
    Feature.ECHO: ("echo", lambda profile: profile.echo),
    Feature.STOP: ("stop", lambda profile: bool(profile.stop)),
    Feature.STOP_TOKENS: ("stop_token_ids", lambda profile: bool(profile.stop_tokens)),
    Feature.MIN_TOKENS: ("min_tokens", lambda profile: profile.min_tokens > 0),
    Feature.IGNORE_EOS: ("ignore_eos", lambda profile: profile.ignore_eos),
    Feature.TRUNCATION: (
        "truncate_prompt_tokens",
        lambda profile: profile.prompt_limit is not None,
    ),
    Feature.CONTINUATION: (
        "continue_final_message",
        lambda profile: profile.continues_message or not profile.generation_prompt,
    ),
    Feature.THINKING_BUDGET: (
        "thinking_budget",
        lambda profile: profile.thinking_budget is not None,
    ),
    # A greedy answer is the same whatever the sampler would leave out.
    Feature.TOP_K: (
        "top_k",
        lambda profile: profile.sampling.top_k > 1 and not profile.sampling.greedy,
    ),
    Feature.MIN_P: (
        "min_p",
        lambda profile: bool(profile.sampling.min_p) and not profile.sampling.greedy,
    ),
    Feature.PENALTIES: (
        "presence_penalty",
        lambda profile: bool(
            profile.sampling.presence_penalty or profile.sampling.frequency_penalty
        ),
    ),
    Feature.REPETITION_PENALTY: (
        "repetition_penalty",
        lambda profile: profile.sampling.repetition_penalty != 1.0,
    ),
    Feature.LOGIT_BIAS: ("logit_bias", lambda profile: bool(profile.sampling.logit_bias)),
}
"""The field of a request that asks for each, and whether a request does; media are counted."""
FIELDS: Mapping[Feature, str | None] = {
    **dict.fromkeys(MEDIA.values(), "messages"),
    **{feature: field for feature, (field, _) in _TESTS.items()},
}
"""The field of a request that asks for each."""

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
    media = {MEDIA[kind] for kind, count in profile.media if count and kind in MEDIA}
    return frozenset(media).union(feature for feature, (_, asks) in _TESTS.items() if asks(profile))
