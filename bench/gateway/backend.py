"""A worker faster than any gateway: it reads a few words and sends prepared answers.

`python -m bench.gateway.backend` runs it in a process and prints its port; with the file of an
identity it speaks TLS, as a paired worker.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, cast

from gateway.event_loop import run
from paceline.certificates import Identity
from paceline.http import paired_tls
from paceline.protocol import PROGRESS_HEADER, TOKENS_LINE, LaneReport, WorkerReport

MODEL: Final = "canned"
WORDS: Final = 64
PACE_S: Final = 0.025
"""Between two events of a paced stream: 40 tokens a second."""
PACED_MARK: Final = "paced please"
BRIEF_MARK: Final = "briefly please"
_PACES_S: Final = {PACED_MARK.encode(): PACE_S, BRIEF_MARK.encode(): PACE_S / 16}
"""Pause by mark: a message with a mark gets a paced answer, others one as fast as possible."""
_SLOTS: Final = 256
_LARGE_BYTES: Final = 128 * 1024
"""A larger body is not read, and its answer is whole."""
_USAGE: Final = {"prompt_tokens": 8, "completion_tokens": WORDS, "total_tokens": 8 + WORDS}


def _event(line: bytes = b"", **fields: object) -> bytes:
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    event = line + b"data: " + json.dumps(frame | fields).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _choice(reason: str | None, **delta: str) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _complete_response(answer: object) -> bytes:
    body = json.dumps(answer).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_MESSAGE: Final = {"role": "assistant", "content": "word " * WORDS}
_ANSWER: Final = _complete_response(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
)
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _stream(line: bytes = b"") -> tuple[bytes, ...]:
    """Return the packets of a stream whose events have this line."""
    return (
        _HEAD + _event(line, choices=[_choice(None, role="assistant", content="word ")]),
        *(_event(line, choices=[_choice(None, content="word ")]) for _ in range(WORDS - 1)),
        _event(line, choices=[_choice("stop")]),
        _event(choices=[], usage=_USAGE),
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    )


_STREAM: Final = _stream()
_TOLD_STREAM: Final = _stream(TOKENS_LINE + b"0 15164\n")
"""As a worker of Paceline sends it to a gateway that asks for the tokens."""
EVENTS: Final = len(_STREAM)


def report(url: str) -> WorkerReport:
    lanes = tuple(LaneReport(name=name, slots=_SLOTS) for name in ("text-mtp", "vlm"))
    return WorkerReport(
        worker_id=MODEL,
        boot_id="1",
        url=url,
        model=MODEL,
        fingerprint="b0",  # of a model: else no stream goes on at another worker
        context_tokens=4096,
        lanes=lanes,
    )


class _Connection(asyncio.Protocol):
    """A connection; any request but a chat gets the status of the worker."""

    _transport: asyncio.Transport

    def __init__(self, status_response: bytes) -> None:
        self._status_response = status_response
        self._pending = b""
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop do not inherit from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._unread_bytes:  # of a large body: this process must not delay others by copying it
            self._unread_bytes -= len(data)
            if not self._unread_bytes:
                self._transport.write(_ANSWER)
            return
        self._pending += data
        while (end := self._pending.find(b"\r\n\r\n")) >= 0:
            head = self._pending[:end].lower()
            _, _, length = head.partition(b"content-length:")
            request_end = end + 4 + int(length.split(b"\r\n", 1)[0] or 0)
            if len(self._pending) < request_end:
                if request_end > _LARGE_BYTES:
                    self._unread_bytes = request_end - len(self._pending)
                    self._pending = b""
                return
            self._answer(head, self._pending[end + 4 : request_end])
            self._pending = self._pending[request_end:]

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get "):
            self._transport.write(self._status_response)
        elif b'"stream":true' not in body and b'"stream": true' not in body:
            self._transport.write(_ANSWER)
        else:
            pace_s = next((pace_s for mark, pace_s in _PACES_S.items() if mark in body), 0.0)
            stream = _TOLD_STREAM if PROGRESS_HEADER.encode() in head else _STREAM
            self._stream(iter(stream), pace_s, asyncio.get_running_loop())

    def _stream(
        self, events: Iterator[bytes], pace_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Write one event as a packet, and schedule the next; end if the client has left."""
        if self._transport.is_closing():
            return
        for event in islice(events, 1):
            self._transport.write(event)
            if pace_s:
                loop.call_later(pace_s, self._stream, events, pace_s, loop)
            else:
                loop.call_soon(self._stream, events, pace_s, loop)


async def _serve(identity_file: str = "") -> None:
    tls = None
    if identity_file:
        tls = paired_tls(server=True)
        Identity.model_validate_json(Path(identity_file).read_bytes()).load(tls)  # noqa: ASYNC240
    status_response = _complete_response({})

    def make_connection() -> _Connection:
        return _Connection(status_response)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(make_connection, "127.0.0.1", 0, backlog=1024, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    status = {
        "report": report(f"http://127.0.0.1:{port}").model_dump(mode="json"),
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "bench"}],
        "status": "ok",
        "model_path": MODEL,
    }
    status_response = _complete_response(status)
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    run(_serve(*sys.argv[1:]))
