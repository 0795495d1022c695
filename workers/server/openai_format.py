"""OpenAI's formats of responses: `chat.completion` and `text_completion`, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.engine.types import Delta, Finished, FinishReason, ScoredToken, TokenLogprob
from workers.server.ports import Json
from workers.server.tool_calls import ToolCall, ToolCallSplitter

_LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; vLLM writes this number instead."""


class ChoiceWriter(Protocol):
    """Renders the events of one choice as entries of `choices`, for a stream or as a whole."""

    def begin(self) -> Sequence[Json]:
        """Return the entries of the chunks before any text."""

    def add(self, delta: Delta) -> Sequence[Json]:
        """Return the entries of the chunks for new text."""

    def finish(self, finished: Finished) -> Sequence[Json]:
        """Return the entries of the chunks for the remaining text and the finish reason."""

    def build(self) -> Json:
        """Return the entry of the whole choice, after `finish`."""


class ChatChoice:
    """One choice of a chat completion."""

    def __init__(self, index: int, *, splitter: ToolCallSplitter | None, logprobs: bool) -> None:
        self._index = index
        self._splitter = splitter
        self._with_logprobs = logprobs
        self._pending_logprobs: list[Json] = []
        self._content = ""
        self._logprobs: list[Json] = []
        self._tool_calls: list[Json] = []
        self._finish_reason = ""

    def begin(self) -> Sequence[Json]:
        """Return the role, as OpenAI's first chunk does."""
        return (self._entry({"role": "assistant", "content": ""}),)

    def add(self, delta: Delta) -> Sequence[Json]:
        """Return the new text and tool calls, except text that may begin a tool call."""
        self._pending_logprobs += [_render_logprob(token) for token in delta.logprobs]
        if not self._splitter:
            return self._write([delta.text] if delta.text else [])
        return self._write(self._splitter.feed(delta.text))

    def finish(self, finished: Finished) -> Sequence[Json]:
        """Return the remaining text, then the finish reason."""
        entries = list(self._write(self._splitter.close() if self._splitter else []))
        called = self._tool_calls and finished.reason is FinishReason.STOP
        self._finish_reason = "tool_calls" if called else finished.reason.value
        entries.append(self._entry({}, self._finish_reason))
        return entries

    def build(self) -> Json:
        """Return the whole message."""
        message: dict[str, Json] = {
            "role": "assistant",
            "content": self._content if self._content or not self._tool_calls else None,
            "refusal": None,
        }
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._render_logprobs(self._logprobs),
            "finish_reason": self._finish_reason,
        }

    def _write(self, pieces: Sequence[str | ToolCall]) -> Sequence[Json]:
        entries = []
        for piece in pieces:
            if isinstance(piece, str):
                self._content += piece
                entries.append(self._entry({"content": piece}))
            else:
                call = {
                    "id": piece.call_id,
                    "type": "function",
                    "function": {"name": piece.name, "arguments": piece.arguments},
                }
                index = len(self._tool_calls)
                self._tool_calls.append(call)
                entries.append(self._entry({"tool_calls": [{"index": index, **call}]}))
        return entries

    def _entry(self, delta: Json, finish_reason: str | None = None) -> Json:
        logprobs: list[Json] = []
        if "role" not in delta:
            logprobs, self._pending_logprobs = self._pending_logprobs, []
            self._logprobs += logprobs
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": self._render_logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }

    def _render_logprobs(self, content: list[Json]) -> Json:
        return {"content": content, "refusal": None} if self._with_logprobs else None


class CompletionChoice:
    """One choice of a text completion."""

    def __init__(self, index: int, *, echo: str, top_logprobs: int | None) -> None:
        self._index = index
        self._echo = echo
        self._top_logprobs = top_logprobs
        self._pending_logprobs: list[TokenLogprob] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = ""
        self._finish_reason = ""

    def begin(self) -> Sequence[Json]:
        """Return the prompt if the request asks for its echo."""
        return (self._entry(self._echo),) if self._echo else ()

    def add(self, delta: Delta) -> Sequence[Json]:
        """Return the new text."""
        self._pending_logprobs += delta.logprobs
        if not delta.text:
            return ()
        self._text += delta.text
        return (self._entry(delta.text),)

    def finish(self, finished: Finished) -> Sequence[Json]:
        """Return the finish reason."""
        self._finish_reason = finished.reason.value
        return (self._entry("", self._finish_reason),)

    def build(self) -> Json:
        """Return the whole text."""
        return {
            "index": self._index,
            "text": self._echo + self._text,
            "logprobs": self._render_logprobs(self._logprobs),
            "finish_reason": self._finish_reason,
        }

    def _entry(self, text: str, finish_reason: str | None = None) -> Json:
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        self._logprobs += logprobs
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._render_logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }

    def _render_logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        if self._top_logprobs is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {one.text: _finite(one.logprob) for one in token.top} for token in tokens
            ]
            if self._top_logprobs
            else None,
            "text_offset": [len(self._echo) + token.offset_chars for token in tokens],
        }


def render_usage(finished: Sequence[Finished]) -> Json:
    """Return the summed usage of all choices; their common prompt counts once."""
    usage = finished[0].usage
    completion_tokens = sum(end.usage.completion_tokens for end in finished)
    details = {"cached_tokens": usage.cached_tokens}
    if usage.skipped_tokens:
        details["skipped_tokens"] = usage.skipped_tokens  # left out by SpecPrefill
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": usage.prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


def render_metrics(finished: Sequence[Finished], *, detailed: bool) -> Json:
    """Return the field `metrics`: {} without speculation, null for several choices.

    With `detailed`, it also lists two numbers for every draft step, under vLLM's names.
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


def _render_logprob(token: TokenLogprob) -> Json:
    return {**_render_token(token), "top_logprobs": [_render_token(one) for one in token.top]}


def _render_token(token: ScoredToken) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
