"""OpenAI's formats of responses: `chat.completion` and `text_completion`, whole and in chunks."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import isnan
from typing import Any

from paceline.protocol import DraftSource
from workers.engine.types import (
    Delta,
    Finished,
    FinishReason,
    ScoredToken,
    SourcedToken,
    TokenLogprob,
    Usage,
)
from workers.server.engines import Json
from workers.server.tool_calls import ArgumentsText, ToolCall, ToolCallSplitter

_SOURCES: Mapping[DraftSource | None, str] = {None: "model", DraftSource.HEAD: "draft"}
"""Names of `token_sources` that differ from those of the counts."""
_LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; vLLM writes this number instead."""


class _Choice:
    """One choice; it renders entries of `choices`, for the chunks of a stream or as a whole."""

    def __init__(self, index: int, *, logprobs: bool, token_sources: bool) -> None:
        self._index = index
        self._with_logprobs = logprobs
        self._with_sources = token_sources
        self._text = ""
        self._logprobs: list[Any] = []
        self._tokens: list[SourcedToken] = []
        self._sent = (0, 0)
        """How many log probabilities and tokens the chunks so far have."""
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def _entry(self, name: str, value: Json) -> Json:
        """Return the entry of a chunk, with log probabilities and tokens since the last one."""
        logprobs, tokens = self._logprobs[self._sent[0] :], self._tokens[self._sent[1] :]
        self._sent = (len(self._logprobs), len(self._tokens))
        return self._render(name, value, logprobs or None, tokens)

    def _render(
        self, name: str, value: Json, logprobs: list[Any] | None, tokens: Sequence[SourcedToken]
    ) -> Json:
        shows_logprobs = self._with_logprobs and logprobs is not None
        entry = {
            "index": self._index,
            name: value,
            "logprobs": self._render_logprobs(logprobs) if shows_logprobs else None,
            "finish_reason": self._finish_reason,
        }
        if self._stop_reason is not None:
            entry["stop_reason"] = self._stop_reason  # vLLM's name for it
        if self._with_sources:
            entry["token_sources"] = [
                {"text": text, "source": _SOURCES.get(source, source)} for text, source in tokens
            ]
        return entry

    def _render_logprobs(self, logprobs: Any) -> Json:
        raise NotImplementedError


class ChatChoice(_Choice):
    """One choice of a chat completion."""

    def __init__(
        self,
        index: int,
        *,
        splitter: ToolCallSplitter | None,
        logprobs: bool,
        token_sources: bool,
        include_reasoning: bool = True,
        reasons: bool = False,
    ) -> None:
        super().__init__(index, logprobs=logprobs, token_sources=token_sources)
        self._splitter = splitter
        self._reasoning = ""
        self._reasoned = False
        self._include_reasoning = include_reasoning
        self._reasons = reasons
        self._tool_calls: list[ToolCall] = []

    def begin(self) -> Sequence[Json]:
        """Return the role, as OpenAI's first chunk does."""
        return (self._entry("delta", {"role": "assistant", "content": ""}),)

    def add(self, delta: Delta) -> Sequence[Json]:
        """Return the new reasoning, text and tool calls, except text that may begin a call."""
        self._logprobs += [
            {**_render_token(one), "top_logprobs": [_render_token(other) for other in one.top]}
            for one in delta.logprobs
        ]
        self._tokens += delta.tokens
        entries = []
        self._reasoned = self._reasoned or bool(delta.reasoning)
        if delta.reasoning and self._include_reasoning:
            self._reasoning += delta.reasoning
            entries.append(self._entry("delta", _render_reasoning(delta.reasoning)))
        if self._splitter:
            return [*entries, *self._write(self._splitter.feed(delta.text))]
        return [*entries, *self._write([delta.text] if delta.text else [])]

    def finish(self, finished: Finished) -> Sequence[Json]:
        """Return the remaining text, then the finish reason."""
        cut = finished.reason is FinishReason.LENGTH
        entries = self._write(self._splitter.close(cut=cut) if self._splitter else [])
        called = self._tool_calls and finished.reason is FinishReason.STOP
        self._finish_reason = "tool_calls" if called else finished.reason.value
        self._stop_reason = finished.stop
        return [*entries, self._entry("delta", {})]

    def build(self) -> Json:
        """Return the whole message, after `finish`."""
        message: dict[str, Json] = {
            "role": "assistant",
            "content": self._text or (None if self._tool_calls or self._reasoned else ""),
            "refusal": None,
        }
        if self._reasons or self._reasoning:
            message |= _render_reasoning(self._reasoning or None)
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        return self._render("message", message, self._logprobs, self._tokens)

    def idle(self) -> Json:
        """Return an entry without text."""
        return self._render("delta", {}, None, ())

    def _write(self, pieces: Sequence[str | ToolCall]) -> Sequence[Json]:
        entries = []
        for piece in pieces:
            if isinstance(piece, ArgumentsText):
                index = len(self._tool_calls) - 1
                self._tool_calls[index]["function"]["arguments"] += piece
                delta: Json = {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            elif isinstance(piece, str):
                self._text += piece
                delta = {"content": piece}
            else:
                delta = {"tool_calls": [{"index": len(self._tool_calls), **piece}]}
                self._tool_calls.append({**piece, "function": dict(piece["function"])})
            entries.append(self._entry("delta", delta))
        return entries

    def _render_logprobs(self, logprobs: list[Json]) -> Json:
        return {"content": logprobs, "refusal": None}


class CompletionChoice(_Choice):
    """One choice of a text completion."""

    def __init__(
        self, index: int, *, echo: str, top_logprobs: int | None, token_sources: bool
    ) -> None:
        super().__init__(index, logprobs=top_logprobs is not None, token_sources=token_sources)
        self._echo = echo
        self._with_top = bool(top_logprobs)

    def begin(self) -> Sequence[Json]:
        """Return the prompt if the request asks for its echo without log-probabilities."""
        return (self._entry("text", self._echo),) if self._echo and not self._with_logprobs else ()

    def echo(self, logprobs: Sequence[TokenLogprob]) -> Sequence[Json]:
        """Return the prompt with its log-probabilities."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ends = list(accumulate(len(decoder.decode(token.raw)) for token in logprobs))
        # The begin token of the model is no part of the text.
        added = max(ends[-1] - len(self._echo), 0)
        begins = [max(end - added, 0) for end in (0, *ends[:-1])]
        self._logprobs += zip(logprobs, begins, strict=True)
        return (self._entry("text", self._echo),)

    def add(self, delta: Delta) -> Sequence[Json]:
        """Return the new text."""
        echo_chars = len(self._echo)
        self._logprobs += [(one, echo_chars + one.offset_chars) for one in delta.logprobs]
        self._tokens += delta.tokens
        self._text += delta.text
        return (self._entry("text", delta.text),) if delta.text else ()

    def finish(self, finished: Finished) -> Sequence[Json]:
        """Return the finish reason."""
        self._finish_reason, self._stop_reason = finished.reason.value, finished.stop
        return (self._entry("text", ""),)

    def idle(self) -> Json:
        """Return an entry without text."""
        return self._render("text", "", None, ())

    def build(self) -> Json:
        """Return the whole text, after `finish`."""
        return self._render("text", self._echo + self._text, self._logprobs, self._tokens)

    def _render_logprobs(self, logprobs: Sequence[tuple[TokenLogprob, int]]) -> Json:
        tops = [
            {one.text: _finite(one.logprob) for one in token.top} or None for token, _ in logprobs
        ]
        return {
            "tokens": [token.text for token, _ in logprobs],
            "token_logprobs": [_finite(token.logprob) for token, _ in logprobs],
            "top_logprobs": tops if self._with_top else None,
            "text_offset": [offset_chars for _, offset_chars in logprobs],
        }


def split_entry(entry: Json, count: int) -> list[Json]:
    """Return an entry of a chunk as up to `count` entries, which clients add up to the same.

    Text that was held back, and the prompt of `echo`, may have the log probabilities of any number
    of tokens, each with those of twenty others.
    """
    name = "text" if "text" in entry else "delta"
    logprobs, sources = entry["logprobs"] or {}, entry.get("token_sources", [])
    listed = [value for value in logprobs.values() if isinstance(value, list)]
    count = max(1, min(count, max(map(len, [_text_of(entry[name]), sources, *listed]))))
    parts = []
    for index in range(count):
        cut = partial(_cut, index=index, count=count)
        some = {key: one and cut(one) for key, one in logprobs.items()}
        part = {**entry, name: _cut_text(entry[name], cut, first=not index)}
        part["logprobs"] = some if any(map(cut, listed)) else None
        if "token_sources" in entry:
            part["token_sources"] = cut(sources)
        if index < count - 1:
            part["finish_reason"] = None
            part.pop("stop_reason", None)
        parts.append(part)
    return parts


def _text_of(value: Json) -> str:
    """Return the text of a chunk, or of its delta."""
    if isinstance(value, str):
        return value
    if "tool_calls" in value:
        return str(value["tool_calls"][0]["function"]["arguments"])
    return max(value.values(), key=len, default="")


def _cut_text(value: Json, cut: Callable[[str], str], *, first: bool) -> Json:
    """Return one part of the text of a chunk, or of its delta; the first begins a call."""
    if isinstance(value, str):
        return cut(value)
    if "tool_calls" not in value:
        return {name: cut(text) for name, text in value.items()}
    (call,) = value["tool_calls"]
    function = {
        **(call["function"] if first else {}),
        "arguments": cut(call["function"]["arguments"]),
    }
    return {"tool_calls": [{**(call if first else {"index": call["index"]}), "function": function}]}


def _cut(whole: Any, *, index: int, count: int) -> Any:
    return whole[index * len(whole) // count : (index + 1) * len(whole) // count]


def render_usage(by_choice: Mapping[int, Usage], choices: int) -> Json:
    """Return the summed usage; a prompt counts once for all of its `choices`."""
    usages = by_choice.values()
    prompts = {index // choices: usage for index, usage in sorted(by_choice.items())[::-1]}.values()
    prompt_tokens = sum(one.prompt_tokens for one in prompts)
    completion_tokens = sum(one.completion_tokens for one in usages)
    details = {
        "cached_tokens": sum(one.cached_tokens for one in prompts),
        "cache_write_tokens": sum(one.written_tokens for one in prompts),
    }
    for name in ("system_tokens", "skipped_tokens"):  # SpecPrefill skips some
        if tokens := sum(getattr(one, name) for one in prompts):
            details[name] = tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.reasoning_tokens for one in usages)
        },
    }


def render_metrics(finished: Sequence[Finished], *, detailed: bool, exact: bool = False) -> Json:
    """Return the field `metrics`, with the names of vLLM; null for several choices, as there.

    It has the time of the tokens after the first, and the draft counts if the model drafts. With
    `detailed`, it also lists two numbers for every draft step. `exact` answers have no draft
    counts: their metrics say that they are exact.
    """
    if len(finished) > 1:
        return {"metrics": {"exact": True} if exact else None}
    (end,) = finished
    generation_ms = 1000 * end.generation_s
    metrics: dict[str, Json] = {
        "generation_time_ms": round(generation_ms, 3),
        "mean_itl_ms": round(generation_ms / end.timed_tokens, 4) if end.timed_tokens else None,
    }
    if exact:
        return {"metrics": {"exact": True, **metrics}}
    if end.speculation.steps or end.speculation.num_spec_tokens:
        counts = end.speculation.as_request_metrics()
        if detailed:
            counts["per_step_accepted"] = [step.accepted for step in end.steps]
            counts["per_step_drafted"] = [step.drafted for step in end.steps]
        metrics |= {"speculative_decoding": counts, "draft_sources": end.speculation.by_source}
    return {"metrics": metrics}


def _render_reasoning(text: str | None) -> Json:
    # vLLM, mlx-lm and OpenRouter renamed the field of DeepSeek's API; clients read either.
    return {"reasoning_content": text, "reasoning": text}


def _render_token(token: ScoredToken) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _finite(logprob: float) -> float | None:
    return None if isnan(logprob) else max(logprob, _LOWEST_LOGPROB)
