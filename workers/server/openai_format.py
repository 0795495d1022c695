"""`chat.completion` and `chat.completion.chunk`, exactly in OpenAI's shape.

What the two answer shapes have in common: a writer for each choice, and usage.

`text_completion`, whole and in chunks, exactly in OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.engine.types import Delta, Finished, FinishReason, ScoredToken, TokenLogprob
from workers.server.ports import Json
from workers.server.tool_calls import ToolCall, ToolCallSplitter

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


class ChatChoice:
    """One choice of a chat answer."""

    def __init__(self, index: int, *, splitter: ToolCallSplitter | None, logprobs: bool) -> None:
        self._index = index
        self._splitter = splitter
        self._wants_logprobs = logprobs
        self._waiting_logprobs: list[Json] = []
        self._content = ""
        self._logprobs: list[Json] = []
        self._tool_calls: list[Json] = []
        self._finish_reason = ""

    def opening(self) -> Sequence[Json]:
        """Name the role, as OpenAI's first chunk does."""
        return (self._entry({"role": "assistant", "content": ""}),)

    def more(self, delta: Delta) -> Sequence[Json]:
        """Write text and tool calls as far as they are certain."""
        self._waiting_logprobs += [_logprob(token) for token in delta.logprobs]
        if not self._splitter:
            return self._write([delta.text] if delta.text else [])
        return self._write(self._splitter.feed(delta.text))

    def end(self, finished: Finished) -> Sequence[Json]:
        """Write what was held back, then the reason of the end."""
        entries = list(self._write(self._splitter.close() if self._splitter else []))
        called = self._tool_calls and finished.reason is FinishReason.STOP
        self._finish_reason = "tool_calls" if called else finished.reason.value
        entries.append(self._entry({}, self._finish_reason))
        return entries

    def whole(self) -> Json:
        """Return the message with everything in it."""
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
            "logprobs": self._as_logprobs(self._logprobs),
            "finish_reason": self._finish_reason,
        }

    def _write(self, pieces: Sequence[str | ToolCall]) -> Sequence[Json]:
        entries = []
        for piece in pieces:
            if isinstance(piece, str):
                self._content += piece
                entries.append(self._entry({"content": piece}))
            else:
                call = _tool_call(piece)
                index = len(self._tool_calls)
                self._tool_calls.append(call)
                entries.append(self._entry({"tool_calls": [{"index": index, **call}]}))
        return entries

    def _entry(self, delta: Json, finish_reason: str | None = None) -> Json:
        opening = "role" in delta
        carried = [] if opening else self._waiting_logprobs
        if carried:
            self._logprobs += carried
            self._waiting_logprobs = []
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": self._as_logprobs(carried) if carried else None,
            "finish_reason": finish_reason,
        }

    def _as_logprobs(self, content: list[Json]) -> Json:
        return {"content": content, "refusal": None} if self._wants_logprobs else None


def _tool_call(call: ToolCall) -> Json:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprob(token: TokenLogprob) -> Json:
    return {
        **_scored(token),
        "top_logprobs": [_scored(one) for one in token.top],
    }


def _scored(token: ScoredToken) -> Json:
    return {
        "token": token.text,
        "logprob": json_logprob(token.logprob),
        "bytes": list(token.raw),
    }


class CompletionChoice:
    """One choice of a text completion."""

    def __init__(self, index: int, *, echo: str, top_logprobs: int | None) -> None:
        self._index = index
        self._echo = echo
        self._top_logprobs = top_logprobs
        self._waiting: list[TokenLogprob] = []
        self._all: list[TokenLogprob] = []
        self._text = ""
        self._finish_reason = ""

    def opening(self) -> Sequence[Json]:
        """Repeat the prompt where that was asked for."""
        return (self._entry(self._echo),) if self._echo else ()

    def more(self, delta: Delta) -> Sequence[Json]:
        """Write the text that was decided."""
        self._waiting += delta.logprobs
        if not delta.text:
            return ()
        self._text += delta.text
        return (self._entry(delta.text),)

    def end(self, finished: Finished) -> Sequence[Json]:
        """Write the reason of the end."""
        self._finish_reason = finished.reason.value
        return (self._entry("", self._finish_reason),)

    def whole(self) -> Json:
        """Return the whole text."""
        return {
            "index": self._index,
            "text": self._echo + self._text,
            "logprobs": self._as_logprobs(self._all),
            "finish_reason": self._finish_reason,
        }

    def _entry(self, text: str, finish_reason: str | None = None) -> Json:
        carried, self._waiting = self._waiting, []
        logprobs = self._as_logprobs(carried) if carried else None
        self._all += carried
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _as_logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        if self._top_logprobs is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [json_logprob(token.logprob) for token in tokens],
            "top_logprobs": [
                {one.text: json_logprob(one.logprob) for one in token.top} for token in tokens
            ]
            if self._top_logprobs
            else None,
            "text_offset": [len(self._echo) + token.offset_chars for token in tokens],
        }
