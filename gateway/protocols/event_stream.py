"""Read a worker's event stream while it passes: bytes in, the same bytes out, facts on the side.

The scanner cuts the stream into events, lets uninteresting ones pass unread, and parses only those
that may carry a finish reason, usage, metrics or an error. It re-encodes none but the one that it
takes the metrics from, where they are not to be told.

Read what a worker's answer counts: tokens, and what drafting did for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from gateway.types import Drafts, Usage

# More than any context holds.
_TOKENS_LIMIT = 10_000_000
# More than anybody drafts at once.
_DRAFT_LIMIT = 65


def read_usage(answer: Mapping[str, Any]) -> Usage | None:
    """Read the `usage` of an answer or a chunk; None when there is none that makes sense."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
    )


def read_drafts(answer: Mapping[str, Any]) -> Drafts | None:
    """Read vLLM's per-request draft counts; None where there are none that make sense."""
    metrics = answer.get("metrics")
    told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(told, dict):
        return None
    steps, drafted, accepted = (
        _count(told.get("num_spec_steps")),
        _count(told.get("num_draft_tokens")),
        _count(told.get("num_accepted_draft_tokens")),
    )
    histogram = told.get("acceptance_histogram")
    by_accepted = histogram[:_DRAFT_LIMIT] if isinstance(histogram, list) else ()
    if accepted > drafted:
        return None
    return Drafts(steps, drafted, accepted, tuple(map(_count, by_accepted)))


def _count(value: object) -> int:
    """Read a token count; what a worker lies makes no sum go back, and none grow beyond sense."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return min(max(value, 0), _TOKENS_LIMIT)


EVENT_LIMIT_BYTES = 1024 * 1024

# Two line ends in a row close an event. Atomic, so that one \r\n is never taken for two ends.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")

# A key with a value other than null. A match in the model's words is harmless: what matches is
# parsed, and only then believed. Possessive, so that the time is linear.
_TELLING = re.compile(rb'"(?:finish_reason|usage|metrics|error)"\s*+:\s*+[^\sn]')
_DONE = b"[DONE]"
# `reasoning` is mlx-lm's name for what others call `reasoning_content`.
_CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(slots=True)
class StreamState:
    """What a stream has told so far."""

    usage: Usage | None = None
    finished: bool = False
    """A finish reason was given."""
    done: bool = False
    """`[DONE]` was given: with a finish reason, the only proof of a complete answer."""
    content_seen: bool = False
    drafts: Drafts | None = None
    broken: str = ""
    """Why nothing more may be passed on; for the log, not for the client."""

    @property
    def under_way(self) -> bool:
        """Say whether words have come and more may come."""
        return self.content_seen and not self.done and not self.broken

    @property
    def complete(self) -> bool:
        """Say whether the answer is whole."""
        return self.finished and self.done


class StreamScanner:
    """Incremental and bounded; however the bytes are split, output and reading are the same."""

    def __init__(
        self, *, hide_usage: bool, hide_metrics: bool, limit_bytes: int = EVENT_LIMIT_BYTES
    ) -> None:
        self.reading = StreamState()
        self._hide_usage = hide_usage
        self._hide_metrics = hide_metrics
        self._limit_bytes = limit_bytes
        self._pending = b""
        self._searched = 0  # bytes of `_pending` in which no event can end

    @property
    def quiet(self) -> bool:
        """Say whether whole events that tell nothing may pass unread from here on."""
        return self.reading.under_way and not self._pending

    def feed(self, chunk: bytes) -> bytes:
        """Take in bytes, give back those to pass on; none any more once the stream is broken."""
        if chunk.endswith(b"\n\n") and not self._pending and self._plain(chunk):
            return chunk  # whole events of plain text: nearly all of a stream
        data = self._pending + chunk
        passed = bytearray()
        start, search_from = 0, self._searched
        while end := _event_end(data, search_from):
            self._read(data[start:end], passed)
            start = end
            if plain := self._plain_up_to(data, start):
                passed += data[start:plain]
                start = plain
            search_from = start
        self._pending = data[start:]
        self._searched = max(0, len(self._pending) - 3)
        if self.reading.done or self.reading.broken:
            self._pending = b""  # nothing belongs behind the end, so nothing of it is kept
        elif len(self._pending) > self._limit_bytes:
            self._break("an event is too long")
            self._pending = b""
        return bytes(passed)

    def close(self) -> bytes:
        """Say that no more bytes come; half an event is dropped, as every SSE reader does."""
        passed = bytearray()
        if self._pending.endswith(b"\r") and _EVENT_END.search(self._pending, self._searched):
            self._read(self._pending, passed)
        self._pending = b""
        return bytes(passed)

    def _plain(self, data: bytes) -> bool:
        """Say whether there is nothing to learn from these events, and nothing to hide."""
        small = len(data) <= self._limit_bytes
        return self.reading.under_way and small and not is_telling(data)

    def _plain_up_to(self, data: bytes, start: int) -> int:
        """Find where whole events of plain text end that begin at `start`; 0 if none does."""
        if not self.reading.under_way or b"\r" in data or len(data) - start > self._limit_bytes:
            return 0
        telling = _TELLING.search(data, start)
        upto = telling.start() if telling else len(data)
        done = data.find(_DONE, start, upto)
        end = data.rfind(b"\n\n", start, done if done >= 0 else upto)
        return end + 2 if end >= 0 else 0

    def _read(self, event: bytes, passed: bytearray) -> None:
        """Learn from one event and add it to what is passed on, unless it is to be hidden."""
        reading = self.reading
        if self._plain(event):
            passed += event
        elif reading.done or reading.broken:
            return  # nothing belongs behind the end
        elif len(event) > self._limit_bytes:
            self._break("an event is too long")
        elif not (text := _data_of(event)):
            passed += event  # a comment to keep the connection alive
        elif text == _DONE:
            if reading.finished:
                reading.done = True
                passed += event
            else:
                self._break("[DONE] came without a finish reason")
        else:
            passed += self._learn(event, text)

    def _learn(self, event: bytes, text: bytes) -> bytes:
        """Learn from one event with a frame; return what of it is passed on."""
        try:
            frame = from_json(text)
        except ValueError:
            frame = None
        if not isinstance(frame, dict):
            return self._break("an event is no JSON object")
        if frame.get("error") is not None:
            # Without its words: engines repeat in them what they were asked.
            return self._break("the worker sent an error")
        reading = self.reading
        choices = frame.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                reading.finished |= choice.get("finish_reason") is not None
                reading.content_seen |= _has_content(choice)
        if (drafts := read_drafts(frame)) is not None:
            reading.drafts = drafts
        tells_metrics = frame.get("metrics") is not None
        if (usage := read_usage(frame)) is not None:
            reading.usage = usage
            # Only the trailing chunk carries nothing else; it is there because we asked for it.
            asked_for = not self._hide_usage or (tells_metrics and not self._hide_metrics)
            if not (choices or asked_for):
                return b""
        if tells_metrics and self._hide_metrics:
            del frame["metrics"]
            return b"data: " + to_json(frame) + b"\n\n"
        return event

    def _break(self, why: str) -> bytes:
        self.reading.broken = self.reading.broken or why
        return b""


def is_telling(events: bytes) -> bool:
    """Say whether there may be something to learn from these events, however they are framed."""
    # `in` would make and drop an error for each look
    return events.find(_DONE) >= 0 or _TELLING.search(events) is not None


def _event_end(data: bytes, search_from: int) -> int:
    """Find where the next event ends, just behind it; 0 when that is not known yet."""
    if b"\r" not in data:  # as nearly all servers write: a plain search is enough
        place = data.find(b"\n\n", search_from)
        return place + 2 if place >= 0 else 0
    found = _EVENT_END.search(data, search_from)
    # A \r at the very end may be half of \r\n; the next bytes will tell.
    if found is None or (found.end() == len(data) and data.endswith(b"\r")):
        return 0
    return found.end()


def _data_of(event: bytes) -> bytes:
    """Join the `data:` lines of one event."""
    lines = (line for line in _LINE_END.split(event) if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines).strip()


def _has_content(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in _CONTENT)
    return bool(choice.get("text"))
