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


FIELDS: Mapping[Feature, str | None] = {
    Feature.EXACT: "exact",
    Feature.COMPLETIONS: None,
    **dict.fromkeys((Feature.IMAGE, Feature.VIDEO, Feature.AUDIO, Feature.FILE), "messages"),
    Feature.TOOLS: "tools",
    Feature.CALLS: "tool_choice",
    Feature.STRUCTURED_OUTPUT: "response_format",
    Feature.LOGPROBS: "logprobs",
    Feature.CHOICES: "n",
    Feature.PROMPTS: "prompt",
    Feature.ECHO: "echo",
    Feature.STOP: "stop",
    Feature.STOP_TOKENS: "stop_token_ids",
    Feature.MIN_TOKENS: "min_tokens",
    Feature.IGNORE_EOS: "ignore_eos",
    Feature.TRUNCATION: "truncate_prompt_tokens",
    Feature.CONTINUATION: "continue_final_message",
    Feature.THINKING_BUDGET: "thinking_budget",
    Feature.TOP_K: "top_k",
    Feature.MIN_P: "min_p",
    Feature.PENALTIES: "presence_penalty",
    Feature.REPETITION_PENALTY: "repetition_penalty",
    Feature.LOGIT_BIAS: "logit_bias",
}
"""The field of a request that asks for each."""

CHECKED = frozenset((Feature.CALLS,))
"""Features that an engine may have by chance: it gets the request if no other worker does, and the
gateway checks its answer."""
MEDIA = {
    "image": Feature.IMAGE,
    "video": Feature.VIDEO,
    "audio": Feature.AUDIO,
    "file": Feature.FILE,
}
_TESTS: tuple[tuple[Feature, Callable[[RequestProfile], bool]], ...] = (
    (Feature.EXACT, lambda profile: profile.exact),
    (Feature.COMPLETIONS, lambda profile: profile.endpoint is Endpoint.COMPLETIONS),
    (Feature.TOOLS, lambda profile: profile.tools),
    (Feature.CALLS, lambda profile: bool(profile.call_fields)),
    (Feature.STRUCTURED_OUTPUT, lambda profile: profile.structured_output),
    (Feature.LOGPROBS, lambda profile: profile.top_logprobs is not None),
    (Feature.CHOICES, lambda profile: profile.choices > 1),
    (Feature.PROMPTS, lambda profile: profile.prompts > 1),
    (Feature.ECHO, lambda profile: profile.echo),
    (Feature.STOP, lambda profile: bool(profile.stop)),
    (Feature.STOP_TOKENS, lambda profile: bool(profile.stop_tokens)),
    (Feature.MIN_TOKENS, lambda profile: profile.min_tokens > 0),
    (Feature.IGNORE_EOS, lambda profile: profile.ignore_eos),
    (Feature.TRUNCATION, lambda profile: profile.prompt_limit is not None),
    (
        Feature.CONTINUATION,
        lambda profile: profile.continues_message or not profile.generation_prompt,
    ),
    (Feature.THINKING_BUDGET, lambda profile: profile.thinking_budget is not None),
    # A greedy answer is the same whatever the sampler would leave out.
    (Feature.TOP_K, lambda profile: profile.sampling.top_k > 1 and not profile.sampling.greedy),
    (Feature.MIN_P, lambda profile: bool(profile.sampling.min_p) and not profile.sampling.greedy),
    (
        Feature.PENALTIES,
        lambda profile: bool(
            profile.sampling.presence_penalty or profile.sampling.frequency_penalty
        ),
    ),
    (Feature.REPETITION_PENALTY, lambda profile: profile.sampling.repetition_penalty != 1.0),
    (Feature.LOGIT_BIAS, lambda profile: bool(profile.sampling.logit_bias)),
)


def features_of(profile: RequestProfile) -> frozenset[Feature]:
    """Return the features that a request needs."""
    media = {MEDIA[kind] for kind, count in profile.media if count and kind in MEDIA}
    return frozenset(media).union(feature for feature, test in _TESTS if test(profile))
