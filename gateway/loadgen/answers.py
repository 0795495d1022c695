"""One answer as it arrived, and what can be read from it once nothing is being timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.loadgen.drafts import Drafts

_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came over the connection; times are of one clock, in seconds."""

    due_s: float
    """When the request was to be sent; waiting in the client counts from here."""
    ended_s: float
    status: int = 0
    """0: no answer began."""
    arrivals: tuple[tuple[float, bytes], ...] = ()
    problem: str = ""
    """What broke the connection, if anything did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request brought."""

    due_s: float
    ended_s: float
    pieces_s: tuple[float, ...] = ()
    """When each piece of text arrived."""
    input_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True
    """The server told its tokens; otherwise pieces are counted for them."""
    drafts: Drafts | None = None
    problem: str = ""
    """Why it is no whole answer, in a few words."""

    @property
    def ttft_s(self) -> float | None:
        """Return the time from when it was due to the first text, if any came."""
        return self.pieces_s[0] - self.due_s if self.pieces_s else None

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token behind the first."""
        if not self.pieces_s or self.output_tokens < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Return the pauses between pieces."""
        return tuple(
            later - earlier
            for earlier, later in zip(self.pieces_s, self.pieces_s[1:], strict=False)
        )

    @property
    def whole_s(self) -> float:
        """Return the time from when it was due to its last byte."""
        return self.ended_s - self.due_s


def read_answer(heard: Heard) -> Answer:
    """Read the events of a stream; whatever is not whole says so in `problem`."""
    if heard.status != 200:
        return _failed(heard, heard.problem or _refusal(heard))
    try:
        return _read(heard)
    except (AttributeError, TypeError):  # a list where an object belongs, and the like
        return _failed(heard, "an event is not in OpenAI's shape")


def _read(heard: Heard) -> Answer:
    pieces: list[float] = []
    usage: Mapping[str, Any] = {}
    drafts = None
    finished = False
    for arrived_s, frame in _frames(heard.arrivals):
        if frame.get("error"):
            return _failed(heard, f"broke off: {_words(frame)}")
        for choice in frame.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(field) for field in _TEXT_FIELDS):
                pieces.append(arrived_s)
            finished |= choice.get("finish_reason") is not None
        usage = frame.get("usage") or usage
        drafts = Drafts.of_answer(frame) or drafts
    if heard.problem or not finished:
        return _failed(heard, heard.problem or "ended without a finish reason")
    asked, told = (usage.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
    return Answer(
        due_s=heard.due_s,
        ended_s=heard.ended_s,
        pieces_s=tuple(pieces),
        input_tokens=asked if isinstance(asked, int) else 0,
        output_tokens=told if isinstance(told, int) else len(pieces),
        counted=isinstance(told, int),
        drafts=drafts,
    )


def _frames(arrivals: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield each event with the moment at which its last byte came."""
    rest = b""
    for arrived_s, part in arrivals:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (frame := _json(line.removeprefix(b"data:"))):
                yield arrived_s, frame


def _json(text: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except ValueError:  # also [DONE]
        return None
    return read if isinstance(read, dict) else None


def _failed(heard: Heard, problem: str) -> Answer:
    return Answer(due_s=heard.due_s, ended_s=heard.ended_s, problem=problem)


def _refusal(heard: Heard) -> str:
    body = b"".join(part for _, part in heard.arrivals)
    return f"{heard.status}: {_words(_json(body) or {})}"


def _words(frame: Mapping[str, Any]) -> str:
    match frame.get("error"):
        case {"message": str(message)} | str(message):
            return message[:200]
    return "without a reason"
