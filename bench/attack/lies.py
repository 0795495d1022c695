"""Answers of a lying worker, as the bytes that it sends."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from tests.support.hostile_checkpoints import VALUES
from tests.support.scripted_worker import DONE, METRICS, USAGE, chat_completion, chunk, event

CANARY: Final = "words-of-the-worker"
"""In texts of the worker that no client may see in an error."""
Lie = Callable[[bool], list[bytes]]
"""Function from "streamed" to the pieces that the worker sends before it closes the connection."""

VALUES_AND_TYPES: Final[tuple[Any, ...]] = (
    *(*VALUES, {"type": []}, {"type": {}}, {"type": None}, [None], [[[]]], {"a": {"b": []}}),
    *(10**4000, 1e400),
)
"""Values of any type, for any place of a JSON document."""

_FIRST: Final = chunk({"role": "assistant", "content": ""})
_TEXT: Final = chunk({"content": "wörd 🐎"})
_STOP: Final = chunk({}, "stop")
_HUGE: Final = 10**4000


def head(
    status: str = "200 OK", *headers: str, stream: bool = False, length: int | None = None
) -> bytes:
    """Return a response head; without a length, of a chunked body."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    kind = "text/event-stream" if stream else "application/json"
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", framing, *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def in_chunks(*pieces: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece] + [b"0\r\n\r\n"]


def _streamed(*events: bytes) -> list[bytes]:
    return [head(stream=True), *in_chunks(*events)]


def _whole(body: bytes, status: str = "200 OK", *headers: str) -> list[bytes]:
    return [head(status, *headers, length=len(body)), body]


def _usage(usage: Any, metrics: Any = METRICS) -> Lie:
    def answer(stream: bool) -> list[bytes]:
        numbers = {"usage": usage, "metrics": metrics}
        if stream:
            frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            return _streamed(_FIRST, _TEXT, _STOP, event(frame | {"choices": []} | numbers), DONE)
        return _whole(json.dumps(chat_completion("here") | numbers).encode())

    return answer


def _events(*events: bytes) -> Lie:
    """Return these events; without `stream`, all of them in the text of a whole answer."""
    body = json.dumps(chat_completion("here")).encode()
    return lambda stream: _streamed(*events) if stream else _whole(body + b"".join(events))


def _raw(*pieces: bytes) -> Lie:
    return lambda stream: list(pieces)


def _framed(*before: bytes, headers: Sequence[str] = (), after: bytes = b"") -> Lie:
    """Return an honest answer with bytes before its head, in its head and behind its end."""

    def answer(stream: bool) -> list[bytes]:
        body = json.dumps(chat_completion("here")).encode()
        events = in_chunks(_FIRST, _TEXT, _STOP, DONE)
        sent = (
            [head("200 OK", *headers, stream=True), *events]
            if stream
            else _whole(body, "200 OK", *headers)
        )
        return [*before, *sent, after]

    return answer


def _error(status: str, body: bytes, *headers: str) -> Lie:
    return lambda stream: _whole(body, status, *headers)


_SPECULATION: Final = METRICS["speculative_decoding"]
_OPENAI_ERROR: Final = json.dumps(
    {"error": {"message": CANARY, "type": "server_error", "param": None, "code": "x"}}
).encode()

LIES: Final[dict[str, Lie]] = {
    "honest": _framed(),
    # Types.
    "text as a number": _events(_FIRST, chunk({"content": 7}), _STOP, DONE),
    "a delta that is a list": _events(_FIRST, event({"choices": [{"delta": []}]}), _STOP, DONE),
    "choices that are objects": _events(_FIRST, event({"choices": {"0": {}}}), _STOP, DONE),
    "a call that is text": _events(_FIRST, chunk({"tool_calls": "f"}), _STOP, DONE),
    "arguments that are an object": _events(
        chunk({"tool_calls": [{"id": 5, "function": {"name": "f", "arguments": {}}}]}), _STOP, DONE
    ),
    "reasoning that is a list": _events(chunk({"reasoning_content": ["x"]}), _STOP, DONE),
    "a message that is text": lambda stream: _whole(b'{"choices":[{"message":"x"}]}'),
    "a choice that is text": lambda stream: _whole(b'{"choices":["x"]}'),
    "a finish that is a number": lambda stream: _whole(
        b'{"choices":[{"message":{"content":"x"},"finish_reason":7}]}'
    ),
    # Numbers.
    "huge usage": _usage(dict.fromkeys(("prompt_tokens", "completion_tokens"), _HUGE)),
    "NaN usage": _usage({"prompt_tokens": float("nan"), "completion_tokens": float("inf")}),
    "negative usage": _usage({"prompt_tokens": -7, "completion_tokens": -3}),
    "usage as text": _usage({"prompt_tokens": "7", "completion_tokens": True}),
    "usage as a list": _usage([1, 2]),
    "fractions": _usage({"prompt_tokens": 1.5, "completion_tokens": 1e308}),
    "more cached than read": _usage(
        {**USAGE, "prompt_tokens_details": {"cached_tokens": 2**60}},
    ),
    "metrics as text": _usage(USAGE, {"speculative_decoding": "fast"}),
    "huge metrics": _usage(USAGE, {"speculative_decoding": dict.fromkeys(_SPECULATION, _HUGE)}),
    "a long histogram": _usage(
        USAGE, {"speculative_decoding": {**_SPECULATION, "acceptance_histogram": [1] * 100_000}}
    ),
    "more accepted than drafted": _usage(
        USAGE, {"speculative_decoding": {**_SPECULATION, "num_accepted_draft_tokens": 10**9}}
    ),
    "deep usage": _events(_FIRST, b'data: {"usage":' + b"[" * 50_000 + b"\n\n", _STOP, DONE),
    # Encodings.
    "gzip": lambda stream: _whole(
        gzip.compress(json.dumps(chat_completion("x")).encode()), "200 OK", "content-encoding: gzip"
    ),
    "split UTF-8": lambda stream: _streamed(
        *(_TEXT[at : at + 1] for at in range(len(_TEXT))), _STOP, DONE
    ),
    "invalid UTF-8": _events(_FIRST, b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n', DONE),
    "cut UTF-8": _events(_FIRST, b'data: {"a":"\xf0\x9f"}\n\n', _STOP, DONE),
    "lone surrogate": _events(_FIRST, b'data: {"a":"\\ud800"}\n\n', _STOP, DONE),
    "NUL": _events(_FIRST, chunk({"content": "a\0b"}), _STOP, DONE),
    "UTF-16": _raw(head(length=40), "{}".encode("utf-16") * 10),
    "NaN in a body": lambda stream: _whole(b'{"choices":[{"message":{}}],"a":NaN}'),
    # Events.
    "an event of 3 MB": _events(_FIRST, chunk({"content": "x" * 3_000_000}), _STOP, DONE),
    "a line without end": _raw(head(stream=True), *in_chunks(b"data: " + b"x" * 2_500_000)),
    "no end": _events(_FIRST, _TEXT),
    "no finish": _events(_FIRST, _TEXT, DONE),
    "text behind DONE": _events(_FIRST, _TEXT, _STOP, DONE, _TEXT, DONE),
    "DONE twice": _events(_FIRST, _TEXT, _STOP, DONE, DONE),
    "DONE at once": _events(DONE),
    "text behind a finish": _events(_FIRST, _STOP, _TEXT, DONE),
    "an error, then DONE": _events(_FIRST, event({"error": {"message": CANARY}}), DONE),
    "an error in a plain frame": _events(
        _FIRST, event({"choices": [], "error": CANARY}), _STOP, DONE
    ),
    "no JSON": _events(_FIRST, b"data: {oops\n\n", _STOP, DONE),
    "a frame that is a number": _events(_FIRST, b"data: 7\n\n", _STOP, DONE),
    "many empty events": _events(_FIRST, b"\n\n" * 100_000, _STOP, DONE),
    "many comments": _events(_FIRST, b": x\n\n" * 100_000, _STOP, DONE),
    # Framing.
    "two answers": _framed(after=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
    "length and chunked": _framed(headers=("content-length: 3", "transfer-encoding: chunked")),
    "two lengths": _framed(headers=("content-length: 1",)),
    "500 x 100 Continue": _framed(b"HTTP/1.1 100 Continue\r\n\r\n" * 500),
    "1,000 headers": _framed(headers=[f"x-{number}: y" for number in range(1000)]),
    "a header of 200 KB": _framed(headers=("x: " + "y" * 200_000,)),
    "200 KB of trailers": lambda stream: [
        head(stream=stream), *in_chunks(_FIRST, _STOP, DONE)[:-1], b"0\r\n" + b"a:b\r\n" * 40_000,
    ],
    "overflowing chunk size": _raw(head(), b"1" + b"0" * 16 + b"\r\n", b"x" * 100),
    "negative chunk size": _raw(head(), b"-5\r\nhello\r\n0\r\n\r\n"),
    "shorter than its length": _raw(head(length=1000), b"{"),
    "101": _raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n", b"\0" * 100),
    "204": _raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "304": _raw(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    "status 99999": _raw(b"HTTP/1.1 99999 X\r\ncontent-length: 0\r\n\r\n"),
    "HTTP/0.9": _raw(b"<html>" + CANARY.encode() + b"</html>"),
    "HTTP/1.0": lambda stream: [b"HTTP/1.0 200 OK\r\n\r\n", _FIRST, _TEXT, _STOP, DONE],
    "nothing": _raw(b""),
    # Errors.
    "500 with words": _error("500 X", _OPENAI_ERROR),
    "503 until the year 9999": _error(
        "503 X", _OPENAI_ERROR, "retry-after: Fri, 31 Dec 9999 23:59:59 GMT"
    ),
    "429 for ever": _error("429 X", _OPENAI_ERROR, "retry-after: " + "9" * 400),
    "401": _error("401 X", _OPENAI_ERROR),
    "400 in HTML": _error("400 X", b"<html>" + CANARY.encode()),
    "307": _error("307 X", b"", "location: http://127.0.0.1:1/"),
    "200 and an error": _error("200 OK", _OPENAI_ERROR),
    "200 and HTML": _error("200 OK", b"<html>" + CANARY.encode()),
    "200 and a list": _error("200 OK", b"[]"),
    "deep JSON": _error("200 OK", b"[" * 100_000),
    "an integer of 5,000 digits": _error("200 OK", b'{"choices":[' + b"9" * 5000 + b"]}"),
}  # fmt: skip


def damaged(pieces: list[bytes], chance: Random) -> list[bytes]:
    """Return an answer with a few random bytes changed, removed or repeated, in other pieces."""
    raw = b"".join(pieces)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw) + 1)
        end = min(len(raw), at + chance.randint(1, 12))
        change = chance.randrange(4)
        inserted = chance.randbytes(end - at) if change == 0 else b""
        raw = raw[:end] + raw[at:] if change == 1 else raw[:at] + inserted + raw[end:]
    cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.randint(0, 4)))
    return [raw[a:b] for a, b in itertools.pairwise([0, *cuts, len(raw)])]
