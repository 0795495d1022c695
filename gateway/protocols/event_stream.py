"""The event streams of workers: finish reason, usage, metrics and errors, read while they pass.

A scanner splits the stream into events and parses those that may carry such facts; a
`StreamEncoder` encodes them for the client. Text events pass unparsed if the encoder allows it.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import from_json, to_json

from gateway.protocols.base import AnswerMalformed, StreamEncoder
from gateway.protocols.engine_answer import CALLS, EngineAnswer, FieldUnheld
from gateway.strict_json import objects_of
from gateway.types import Drafts, Header, Usage
from paceline.protocol import MAX_DRAFT_TOKENS, MORE_LINE, TOKENS_LINE, header_value

EVENT_LIMIT_BYTES = 1024 * 1024
# Two line ends in a row close an event. Atomic, so that one \r\n is never taken for two ends.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_TOLD_EVENT = re.compile(TOKENS_LINE + rb"([^\n]*\n)(data:[^\n]*\n\n)")
_KEYS = ("finish_reason", "usage", "metrics", "error")
_PARTS = ("prompt", "completion")
_DONE = b"[DONE]"
_CALLS = CALLS.encode()
_CONTENT = ("content", "reasoning_content", "tool_calls", "refusal")
# More than any worker drafts at once.
_DRAFT_LIMIT = MAX_DRAFT_TOKENS + 1
_SLOWEST_TOKEN_MS = 1e6


def fact_pattern(*more_keys: str) -> re.Pattern[bytes]:
    """Return a pattern of the keys that carry facts, with a value other than null.

    A match inside the model's text is harmless, because the event is then parsed.
    """
    keys = "|".join((*_KEYS, *more_keys)).encode()
    # Possessive, so that the time is linear.
    return re.compile(rb'"(?:%b)"\s*+:\s*+[^\sn]' % keys)


_FACT = fact_pattern()
# The fields by which engines tell of a fault in a stream whose status was 200.
_FAULTS = frozenset(("detail", "message"))


class AnswerProgress:
    """The tokens of a stream that the client has received, in the lines of its worker.

    Another worker continues after these tokens if this one fails. A line takes about as many bytes
    as the numbers of its tokens have digits.
    """

    def __init__(self) -> None:
        self.lines = bytearray()
        self.complete = True
        """The lines cover everything that the client has received."""
        self.finished = False
        """The client has a finish reason."""
        self.ended = False
        """The client has all but the mark of the end."""

    @property
    def resumable(self) -> bool:
        """Return whether another worker can go on."""
        return self.complete and bool(self.lines)

    def encode(self) -> str:
        """Return the lines as the field of a request has them."""
        return self.lines[:-1].replace(b"\n", b";").decode("latin-1")


class StreamScanner:
    """Scans one stream, incrementally and bounded; any split of the bytes gives the same output.

    `keep_alive` encodes the comments of a silent engine. `reader` reads the facts in the engine's
    spelling, and `answer` gives them one form, or the result of `calls` does for events with calls.
    With `progress`, the scanner cuts the lines with tokens off their events, and adds those whose
    events it passes on.
    """

    def __init__(
        self,
        encoder: StreamEncoder,
        keep_alive: Callable[[bytes], bytes],
        reader: "AnswerReader | None" = None,
        *,
        answer: EngineAnswer | None = None,
        calls: Callable[[], EngineAnswer] | None = None,
        progress: AnswerProgress | None = None,
        limit_bytes: int = EVENT_LIMIT_BYTES,
    ) -> None:
        self.state = StreamState()
        self.progress = progress
        """None after an event whose tokens the worker did not report."""
        self.encoder = encoder
        self._keep_alive = keep_alive
        self._reader = reader or AnswerReader()
        self.answer, self._calls = answer, calls
        self._facts = self._reader.facts
        self._line = b""
        """Of the event that is being read."""
        self._group: list[bytes] = []
        """Events that are complete only with the next ones."""
        self._passthrough = encoder.passthrough
        self._limit_bytes = limit_bytes
        self._pending = b""
        self._searched = 0  # bytes of `_pending` in which no event can end
        self._kept_alive = False

    @property
    def quiet(self) -> bool:
        """Return whether whole text events may pass unparsed from here on."""
        ready = self._passthrough and self.state.under_way
        return ready and not self._pending and not self._group

    def has_facts(self, events: bytes) -> bool:
        """Return whether these events, however framed, may carry facts, or are no text."""
        # `in` would create and drop an error for each call
        if events.find(_DONE) >= 0 or self._facts.search(events) is not None:
            return True
        return not (events.isascii() or _is_utf8(events))

    def feed(self, chunk: bytes) -> bytes:
        """Scan bytes and return those for the client; none once the stream is broken."""
        alone = self.progress is None and chunk.endswith(b"\n\n") and not self._pending
        if alone and self._plain(chunk):
            return chunk  # whole events of plain text: nearly all of a stream
        self._kept_alive = False
        data = self._pending + chunk
        passed, together = bytearray(), True
        start, search_from = 0, self._searched
        while end := _event_end(data, search_from):
            read = self._read if self.progress is None else self._read_told
            read(data[start:end], passed)
            start = end
            if together and (plain := self._plain_up_to(data, start)):
                together = self._read_together(data[start:plain], passed)
                start = plain if together else start
            search_from = start
        self._pending = data[start:]
        self._searched = max(0, len(self._pending) - 3)
        if self.state.done or self.state.broken:
            self._pending = b""  # bytes after the end are dropped
        elif len(self._pending) > self._limit_bytes:
            self._exceed()
            self._pending = b""
        return bytes(passed)

    def close(self) -> bytes:
        """End the input and return the last bytes; half an event is dropped, as SSE readers do."""
        passed = bytearray()
        if self._pending.endswith(b"\r") and _EVENT_END.search(self._pending, self._searched):
            self._read(self._pending, passed)
        self._pending = b""
        return bytes(passed)

    def _plain(self, data: bytes) -> bool:
        """Return whether these events contain only text."""
        small = len(data) <= self._limit_bytes
        return self._passthrough and self.state.under_way and small and not self.has_facts(data)

    def _plain_up_to(self, data: bytes, start: int) -> int:
        """Return where the complete text events from `start` end; 0 without any."""
        if (
            not (self._passthrough and self.state.under_way)
            or b"\r" in data
            or len(data) - start > self._limit_bytes
        ):
            return 0
        fact = self._facts.search(data, start)
        upto = fact.start() if fact else len(data)
        done = data.find(_DONE, start, upto)
        end = data.rfind(b"\n\n", start, done if done >= 0 else upto)
        return end + 2 if end >= 0 and _is_utf8(data[start:end]) else 0

    def _read_told(self, event: bytes, passed: bytearray) -> None:
        """Read an event that may have a line, once all events of its group have come."""
        if event.startswith(MORE_LINE):
            self._group.append(event[len(MORE_LINE) :])
            if sum(map(len, self._group)) > self._limit_bytes:
                self._exceed()
            return
        if event.startswith(TOKENS_LINE):
            end = event.find(b"\n") + 1
            self._line, event = event[len(TOKENS_LINE) : end], event[end:]
        elif b"data:" not in event:
            if not self.state.done:
                passed += self._pause(event)
            return
        group, self._group = (*self._group, event), []
        for one in group:
            self._read(one, passed)
        line, self._line = self._line, b""
        if self.progress is not None and not self.state.broken:
            self.progress.lines += line

    def _read_together(self, events: bytes, passed: bytearray) -> bool:
        """Pass text events on, all in one call, if each has a line or none needs it; else not."""
        if self.progress is None:
            passed += events
            return True
        found = _TOLD_EVENT.findall(events)
        lines, texts = b"".join([line for line, _ in found]), b"".join([text for _, text in found])
        size = len(lines) + len(texts) + len(found) * len(TOKENS_LINE)
        if self._group or size != len(events):
            return False
        self.progress.lines += lines
        passed += texts
        return True

    def _check_told(self) -> None:
        """Record that the worker does not report all tokens, if the event lacks a line."""
        if self.progress is not None and not self._line:
            self.progress.complete = False
            self.progress = None

    def _read(self, event: bytes, passed: bytearray) -> None:
        """Read the facts of one event and append its encoding to the output."""
        state = self.state
        if not state.begun:
            event = event.removeprefix(BOM_UTF8)
        if self._plain(event):
            self._check_told()
            passed += event
        elif state.done or state.broken:
            return  # events after the end are dropped
        elif len(event) > self._limit_bytes:
            self._exceed()
        elif not (text := _data_of(event)):
            passed += self._pause(event)
        elif text == _DONE:
            if state.finished:
                state.done = True
                passed += self.encoder.done()
            else:
                self._break("[DONE] came without a finish reason")
        else:
            passed += self._read_frame(event, text)

    def _read_frame(self, event: bytes, text: bytes) -> bytes:
        """Read the facts of one event with a frame; return its encoding."""
        try:
            frame = from_json(text, allow_inf_nan=False)
        except ValueError:
            frame = None
        if not isinstance(frame, dict):
            return self._break("an event is no JSON object")
        state = self.state
        alien = self.answer is not None and "choices" not in frame
        if frame.get("error") is not None or (alien and frame.keys() & _FAULTS):
            state.error = text
            # Without its message: engines quote the prompt in it.
            return self._break("the worker sent an error")
        if alien and "usage" not in frame:
            return b""  # no part of an answer: nobody knows what it tells
        answer = self._calls() if self._calls is not None and _CALLS in text else self.answer
        if answer is not None:
            event = self._formed(answer, event, frame)
            if state.broken:
                return b""
        state.begun = True
        choices = frame.get("choices")
        if choices:
            self._check_told()
        state.read_choices(choices)
        if (drafts := self._reader.drafts(frame)) is not None:
            state.drafts = drafts
        usage = self._reader.usage(frame)
        state.usage = usage or state.usage
        try:
            encoded = self.encoder.event(event, frame)
        except AnswerMalformed:
            if self.progress is not None:
                self.progress.complete = False  # the encoder may have begun the event
            return self._break("an event has no shape of a chat")
        if self.progress is not None and usage is not None and not choices:
            self.progress.ended = state.finished
        return encoded

    def _formed(self, answer: EngineAnswer, event: bytes, frame: dict[str, Any]) -> bytes:
        """Give a chunk its form; return the event that has it."""
        try:
            changed = answer.read(frame, "delta")
        except FieldUnheld as error:
            self.state.unheld = str(error)
            return self._break("the answer does not hold to the request")
        except AnswerMalformed as error:
            return self._break(f"an event has no usable {error}")
        self._passthrough &= not answer.renames
        return b"data: " + to_json(frame, inf_nan_mode="null") + b"\n\n" if changed else event

    def _pause(self, event: bytes) -> bytes:
        """Return the client's bytes for an event without data.

        What a format adds to a comment may be a whole response: once for all that came together.
        """
        if not event.startswith(b":"):
            return b""
        first, self._kept_alive = not self._kept_alive, True
        return self._keep_alive(event) if first else event

    def _exceed(self) -> None:
        self.state.too_large = True
        self._break("an event is too long")

    def _break(self, why: str) -> bytes:
        self.state.broken = self.state.broken or why
        return b""


@dataclass(slots=True)
class StreamState:
    """The facts read from a stream so far."""

    usage: Usage | None = None
    begun: bool = False
    """An event has come that is no comment."""
    finished: bool = False
    """A finish reason was given."""
    done: bool = False
    """`[DONE]` was given: with a finish reason, the only proof of a complete answer."""
    content_seen: bool = False
    drafts: Drafts | None = None
    broken: str = ""
    """Why nothing more may be passed on; for the log, not for the client."""
    too_large: bool = False
    """An event is larger than the gateway keeps, which a legal request may cause."""
    unheld: str = ""
    """The field of the request that the answer violates."""
    error: bytes = b""
    """The engine's error event, as JSON; it may quote the prompt."""

    def read_choices(self, choices: object) -> None:
        """Record content and ends."""
        for choice in objects_of(choices):
            self.finished |= bool(choice.get("finish_reason"))
            self.content_seen |= _has_content(choice)

    @property
    def under_way(self) -> bool:
        """Return whether text has come and more may come."""
        return self.content_seen and not self.done and not self.broken

    @property
    def complete(self) -> bool:
        """Return whether the response is complete."""
        return self.finished and self.done


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def comment_of(headers: Iterable[Header]) -> bytes:
    """Return a comment with headers that came too late for the head; none without headers."""
    lines = [b": %b: %b\n" % (name, header_value(value)) for name, value in headers]
    return b"".join((*lines, b"\n")) if lines else b""


def count(value: object, most: int = 2**53) -> int:
    """Return a whole number within 0 and a bound; 0 for anything else."""
    return min(max(value, 0), most) if type(value) is int else 0


_count = partial(count, most=10_000_000)
"""Bounds tokens by more than any context: a wrong count must not make a sum shrink or overflow."""


class AnswerReader:
    """Reads the facts of answers and of chunks as OpenAI, vLLM and llama.cpp spell them.

    An engine that spells its drafts in another way has a reader of its own.
    """

    facts: re.Pattern[bytes] = _FACT
    """Events without a match contain only text, so that no step need read them."""

    @staticmethod
    def usage(answer: Mapping[str, Any]) -> Usage | None:
        """Read the `usage` of an answer or a chunk; None if there is no valid one."""
        usage = answer.get("usage")
        if not isinstance(usage, dict):
            return None
        prompt, completion = (_count(usage.get(f"{one}_tokens")) for one in _PARTS)
        details, made = (_object_at(usage, f"{one}_tokens_details") for one in _PARTS)
        timings = _object_at(answer, "timings")
        # The second place is oMLX's, the third that of older versions of llama.cpp.
        places = (details, "cached_tokens"), (usage, "cached_tokens"), (timings, "cache_n")
        cached = next((at[name] for at, name in places if at.get(name) is not None), None)
        token_ms = _object_at(answer, "metrics").get("mean_itl_ms")
        token_s = None
        if isinstance(token_ms, int | float) and 0 < token_ms < _SLOWEST_TOKEN_MS:
            token_s = token_ms / 1000
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=min(_count(cached), prompt),
            cached_known=cached is not None,
            written_tokens=_count(details.get("cache_write_tokens")),
            system_tokens=_count(details.get("system_tokens")),
            reasoning_tokens=min(_count(made.get("reasoning_tokens")), completion),
            token_s=token_s,
        )

    @staticmethod
    def drafts(answer: Mapping[str, Any]) -> Drafts | None:
        """Read the draft counts as vLLM has them, or llama.cpp; None if there are no valid ones."""
        counts = _object_at(answer, "metrics").get("speculative_decoding")
        if not isinstance(counts, dict):
            return _drafts_of(_object_at(answer, "timings"))
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        steps, drafted, accepted = (_count(counts.get(name)) for name in names)
        histogram = counts.get("acceptance_histogram")
        by_accepted = histogram[:_DRAFT_LIMIT] if isinstance(histogram, list) else ()
        if accepted > drafted:
            return None
        return Drafts(steps, drafted, accepted, tuple(map(_count, by_accepted)))


def _drafts_of(timings: Mapping[str, Any]) -> Drafts | None:
    """Read the draft counts of llama.cpp's `timings`; None without any.

    Without `draft_rounds`, every token except accepted drafts counts as a step, so the mean length
    of a step is rather too low.
    """
    if timings.get("draft_n") is None:
        return None
    drafted, accepted = count(timings["draft_n"]), count(timings.get("draft_n_accepted"))
    steps = count(timings.get("draft_rounds")) or count(timings.get("predicted_n")) - accepted
    return Drafts(max(steps, 0), drafted, accepted, ()) if accepted <= drafted else None


def _object_at(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = answer.get(name)
    return value if isinstance(value, dict) else {}


def _event_end(data: bytes, search_from: int) -> int:
    """Return the offset behind the next event; 0 if it has not come whole."""
    if b"\r" not in data:  # as nearly all servers write: a plain search is enough
        place = data.find(b"\n\n", search_from)
        return place + 2 if place >= 0 else 0
    found = _EVENT_END.search(data, search_from)
    # A \r at the very end may be half of \r\n; the next bytes decide.
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
