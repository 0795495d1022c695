"""`chat.completion` and `chat.completion.chunk`, exactly in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.types import Delta, Finished, FinishReason, ScoredToken, TokenLogprob
from workers.server.choices import json_logprob
from workers.server.ports import Json
from workers.server.tool_calls import ToolCall, ToolCallSplitter


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
