"""One request's way back to its client, straight to the connection.

By ASGI each piece of an answer is a message, sent by a task that waits until it is taken: for one
word of a stream that costs more than reading and writing it. Here a piece is written in the turn of
the event loop in which it came, and a head leaves in one packet with what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.types import Header

EXCHANGE = "paceline.exchange"
"""The ASGI extension whose `running` gives the `Exchange` of the request that runs."""

_CLOSE = (b"connection", b"close")
_CHUNKED = (b"transfer-encoding", b"chunked")
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


class Watcher(Protocol):
    """Who wants to know of the client for as long as a request runs."""

    def leave(self) -> None:
        """Hear that the client has left."""

    def check(self, now_s: float) -> None:
        """Hear, about once a second, what time it is."""


class Exchange:
    """The answer to one request, as its connection sends it: whole, or begun, written and ended.

    What is written once the client has left goes nowhere.
    """

    def __init__(self, cycle: RequestResponseCycle, send: Callable[[bytes], None]) -> None:
        self._cycle = cycle
        self._send = send
        self._head = b""
        self._chunked = False
        self._left = False
        self._watcher: Watcher | None = None
        self.on_pressure: Callable[[bool], None] | None = None
        """Told when what is written piles up (True), and when it no longer does."""

    def watch(self, watcher: Watcher | None) -> None:
        """Tell this one of the client from now on, or nobody."""
        self._watcher = watcher
        if watcher is not None:
            self._cycle.flow.resume_reading()  # who does not read does not see the end
            if self._left:
                watcher.leave()

    async def room(self) -> None:
        """Wait until the client has read enough of earlier answers."""
        if self._cycle.flow.write_paused:
            await self._cycle.flow.drain()

    def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Answer at once and for good."""
        length = (b"content-length", b"%d" % len(body))
        head = self._written_head(status, (*headers, length))
        if not self._left:
            self._send(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    def begin(self, headers: Iterable[Header]) -> None:
        """Begin a stream; its head leaves with the first piece."""
        # HTTP/1.0 knows no chunks: there the end of the connection is the end of the answer.
        self._chunked = self._cycle.scope["http_version"] == "1.1"
        framing = (_CHUNKED,) if self._chunked else ()
        self._head = self._written_head(200, (*headers, *framing))

    def write(self, piece: bytes) -> None:
        """Send a piece of a stream that was begun."""
        framed = b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece
        if self._head:
            framed, self._head = self._head + framed, b""
        if not self._left:
            self._send(framed)

    def sends_chunks(self) -> Callable[[bytes], None] | None:
        """Give what sends pieces that are HTTP chunks already, if that is how this stream goes."""
        return self._send if self._chunked and not self._head else None

    def end(self, piece: bytes = b"") -> None:
        """End a stream that was begun, with a last piece or without one."""
        if self._chunked:
            framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
        else:
            framed = piece
        if not self._left:
            self._send(self._head + framed)
        self._complete()

    # Called by the connection.

    def press(self, pressed: bool) -> None:
        """Tell whoever writes that what is written piles up, or no longer does."""
        if self.on_pressure is not None:
            self.on_pressure(pressed)

    def leave(self) -> None:
        """Tell that the client has left."""
        self._left = True
        if self._watcher is not None:
            self._watcher.leave()

    def check(self, now_s: float) -> None:
        """Tell the time."""
        if self._watcher is not None:
            self._watcher.check(now_s)

    def _written_head(self, status: int, headers: tuple[Header, ...]) -> bytes:
        """Write a head; what would break out of its line is a fault of ours."""
        cycle = self._cycle
        cycle.response_started = True
        if _CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers = (*headers, _CLOSE)
        headers = (*cycle.default_headers, *headers)
        lines = [_STATUS_LINES[status], *[b"%b: %b" % pair for pair in headers], b"\r\n"]
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(headers) + 2:
            raise ValueError("a header holds the end of a line")
        return head

    def _complete(self) -> None:
        """Leave the connection to the next request, or close it."""
        self.on_pressure = None
        cycle = self._cycle
        cycle.response_complete = True
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
