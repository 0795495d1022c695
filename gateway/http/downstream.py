"""One connection of a client: bounds on time and size that uvicorn leaves open, and fewer packets.

uvicorn bounds neither the time nor the size of a head, nor the time for which a reader may stall.
What is kept here for a connection is a few numbers; one task looks at all of them each second, so
that no request pays for a timer.

The client's side of one request: its body, its presence, the reply to it.

One request's way back to its client, straight to the connection.

By ASGI each piece of an answer is a message, sent by a task that waits until it is taken: for one
word of a stream that costs more than reading and writing it. Here a piece is written in the turn of
the event loop in which it came, and a head leaves in one packet with what follows it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any, Protocol, Self

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import (
    BodyTooLarge,
    BodyTooSlow,
    GatewayError,
    HeadTooLarge,
    HeadTooSlow,
    NotHttp,
    RequestRefused,
    to_body,
    to_event,
    to_headers,
)
from gateway.types import Header, Headers
from workers.protocol import REQUEST_ID

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


HEAD_LIMIT_BYTES = 32 * 1024
"""As much as nginx takes."""
HEADERS_LIMIT = 100

# How long the rest of a request that was refused is read and dropped. Closing at once would send a
# reset, and that destroys the refusal before the client can read it.
_LINGER_S = 2.0
_UPGRADING = frozenset((b"connection", b"upgrade", b"http2-settings"))


class DownstreamProtocol(HttpToolsProtocol):
    """HTTP/1.1 with a client. `head_timeout_s` and `write_timeout_s` as in the settings."""

    def __init__(self, *, head_timeout_s: float, write_timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._head_since_s: float | None = None
        self._head_bytes = 0
        self._receiving = False
        self._refusal: RequestRefused | None = None
        self._unsent_bytes = 0
        self._sent_at_s = 0.0
        self._outlet: _Outlet
        self._exchange: Exchange | None = None
        """Of the request that is being answered, or was last."""
        # Not the exchange itself: each request would be a cycle of garbage.
        self._extensions: dict[str, dict[object, object]]
        self._extensions = {EXCHANGE: {"running": lambda: self._exchange}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        self._head_since_s = self.loop.time()
        self._outlet = _Outlet(transport, self.loop, unread=lambda: self._receiving)
        super().connection_made(self._outlet)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that runs."""
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.leave()

    def pause_writing(self) -> None:
        """Tell the request that runs, and make those behind it wait."""
        super().pause_writing()
        if self._exchange is not None:
            self._exchange.press(True)

    def resume_writing(self) -> None:
        """Let what was made to wait go on."""
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.press(False)

    def data_received(self, data: bytes) -> None:
        """Parse; refuse a head that grows without an end."""
        if not self._receiving:
            self._receiving = True
            self._head_bytes = 0
            if self._head_since_s is None:
                self._head_since_s = self.loop.time()
        if self._outlet.closing_since_s is not None and self.cycle is None:
            return  # refused before there was a request; what still comes is dropped
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._head_since_s is not None and self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(HeadTooLarge(HEAD_LIMIT_BYTES, HEADERS_LIMIT))

    def on_message_begin(self) -> None:
        """Give each head its time, also one that came right behind the request before."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        if self._head_since_s is None:
            self._receiving, self._head_bytes = True, 0
            self._head_since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        """Hand the request to the application, unless its head is too large."""
        self._head_since_s = None
        size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        if size > HEAD_LIMIT_BYTES or len(self.headers) > HEADERS_LIMIT:
            self._refusal = HeadTooLarge(HEAD_LIMIT_BYTES, HEADERS_LIMIT)
            raise self._refusal
        if self.parser.should_upgrade():
            return  # `_feed` goes on without it
        if self._outlet.closing_since_s is None:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that nothing of this request is left to be read."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._receiving = False
        self._outlet.finish_closing()

    def check(self, now_s: float) -> None:
        """End the connection where the client has taken too long: to ask, to read, or to go."""
        closing_since_s = self._outlet.closing_since_s
        unsent_bytes = self._outlet.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._sent_at_s = unsent_bytes, now_s
            if closing_since_s is not None and now_s - closing_since_s > _LINGER_S:
                self._outlet.finish_closing()
        elif now_s - self._sent_at_s > self._write_timeout_s:
            self._outlet.abort()
        if self._head_since_s is not None and self.cycle and not self.cycle.response_complete:
            self._head_since_s = now_s  # the next head has its time once this answer has ended
        waited_s = now_s - (now_s if self._head_since_s is None else self._head_since_s)
        if waited_s > self._head_timeout_s and closing_since_s is None:
            if self._head_bytes:
                self._refuse(HeadTooSlow())
            else:
                self._outlet.abort()
        if self._exchange is not None:
            self._exchange.check(now_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Give a request whose turn has come its way back to the client."""
        self._exchange = Exchange(cycle, self._outlet.write_at_once)
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Parse; serve a request that asks for another protocol without that, as HTTP allows.

        Java's own client asks so on every first request, and the parser stops there.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._refuse(NotHttp())
                return
            kept = [pair for pair in self.headers if pair[0] not in _UPGRADING]
            head = [b"%s %s HTTP/1.1" % (method, self.url), *(b"%s: %s" % pair for pair in kept)]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join((*head, b"", data[upgrade.args[0] :])))
        except httptools.HttpParserError:
            self._refuse(self._refusal or NotHttp())

    def _refuse(self, error: GatewayError) -> None:
        """Answer in place of the application, and read no further request."""
        self._head_since_s = None
        busy = self.cycle is not None and not self.cycle.response_complete
        if self._outlet.is_closing() or busy:
            self._outlet.abort()  # in the middle of an answer there is no place for another
            return
        body = to_body(error)
        head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
        head += [b"%s: %s" % pair for pair in to_headers(error)]
        head += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self._outlet.write(b"\r\n".join(head))
        self._outlet.close()


def check_connections(connections: Iterable[Any]) -> None:
    """Check the time limits of all connections; to be called once a second."""
    now_s = asyncio.get_running_loop().time()
    for connection in tuple(connections):
        connection.check(now_s)


class _Outlet(asyncio.Transport):
    """A transport that sends what is written in one turn of the loop as one packet.

    uvicorn writes a head and its body one by one, and system calls are most of what a server costs.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        unread: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._unread = unread
        self._held: list[bytes] = []
        self.closing_since_s: float | None = None
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.set_protocol = transport.set_protocol  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.closing_since_s is not None:
            return
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(bytes(data))

    def write_at_once(self, data: bytes) -> None:
        """Send what is whole by itself, behind what is held."""
        if self._held:
            self.write(data)
            self._send()
        elif self.closing_since_s is None and not self._transport.is_closing():
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self.closing_since_s is not None or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close once all is sent and, within bounds, the rest of the request has been read."""
        if self.closing_since_s is not None:
            return
        self.closing_since_s = self._loop.time()
        self._send()
        if self._unread() and not self._transport.is_closing():
            self._transport.resume_reading()
            self._transport.write_eof()
        else:
            self._transport.close()

    def finish_closing(self) -> None:
        """Wait no longer for the rest of the request."""
        if self.closing_since_s is not None:
            self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._transport.abort()

    def _send(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():  # else the client left in this very turn
            self._transport.writelines(held)


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientLeft(Exception):
    """The client closed its connection, or stopped reading: nobody is there to be answered."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """Find the first value of a header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def request_id(scope: Scope) -> str:
    """Take the client's request id when it is a harmless one, else make one."""
    given = (header(scope, b"x-request-id") or b"").decode("latin-1")
    if REQUEST_ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    limit_bytes: int,
    hold: Callable[[int], None] = lambda _part_bytes: None,
) -> bytes:
    """Read the whole body, counting while reading: a declared length proves nothing.

    `hold` is told of each part and may refuse it. The caller limits the time.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        hold(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_small_body(
    scope: Scope, receive: Receive, *, limit_bytes: int, timeout_s: float
) -> bytes:
    """Read a body outside the data plane, within a time limit of its own."""
    try:
        async with asyncio.timeout(timeout_s):
            return await read_body(scope, receive, limit_bytes=limit_bytes)
    except TimeoutError:
        raise BodyTooSlow from None


class CancelScope:
    """A context that ends early, by `end`, by its deadline, or because the client left.

    Works as `asyncio.timeout` does: whatever is awaited inside is cancelled, and what it holds is
    released on the way out. The connection tells of the client; no task has to wait for that.
    """

    def __init__(self, scope: Scope) -> None:
        self._exchange = _exchange(scope)
        self._ended_by: Exception | None = None
        self._due_s = float("inf")
        self._overdue: Exception = ClientLeft()

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._exchange.watch(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exchange.watch(None)
        if self._ended_by is not None:
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is asyncio.CancelledError:
                raise self._ended_by from error

    def limit(self, seconds: float, reason: Exception) -> None:
        """End the context with this error after so many seconds; a new limit replaces the last.

        The connection tells the time, about once a second: a timer for each request costs more.
        """
        self._due_s, self._overdue = self._task.get_loop().time() + seconds, reason

    def end(self, reason: Exception) -> None:
        """End the context with this error; the first reason counts."""
        if self._ended_by is None:
            self._ended_by = reason
            self._task.cancel()

    def leave(self) -> None:
        """End the context because the client left."""
        self.end(ClientLeft())

    def check(self, now_s: float) -> None:
        """End the context where its time is over."""
        if now_s >= self._due_s:
            self.end(self._overdue)


class ResponseWriter:
    """The one answer to a request: whole, or a stream that is started by its first bytes."""

    def __init__(self, scope: Scope) -> None:
        self._exchange = _exchange(scope)
        self._stream_headers: Headers = []
        self.limits: Sequence[Header] = ()
        """What is told of the limits of the key, whatever the answer."""
        self.identity = request_id(scope)
        self.started = False

    async def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Answer at once and for good."""
        await self._exchange.room()
        self.started = True
        self._exchange.whole(status, self._named(headers), body)

    async def open(self, headers: Iterable[Header], on_pressure: Callable[[bool], None]) -> None:
        """Make ready for a stream with these headers, once earlier answers have been read.

        `on_pressure` is told when the client reads more slowly than is written, and when again not.
        """
        await self._exchange.room()
        self._stream_headers = self._named(headers)
        self._exchange.on_pressure = on_pressure

    def part(self, piece: bytes) -> None:
        """Send a piece of the stream, here and now; the first one brings status and headers."""
        if not self.started:
            self._start()
        self._exchange.write(piece)

    def sends_chunks(self) -> Callable[[bytes], None] | None:
        """Give what sends pieces that are HTTP chunks already; None if that is not how it goes."""
        return self._exchange.sends_chunks() if self.started else None

    def end(self, piece: bytes = b"") -> None:
        """End the stream as it should end, perhaps with a last piece."""
        if not self.started:
            self._start()
        self._exchange.end(piece)

    async def fail(self, error: GatewayError, headers: Iterable[Header] = ()) -> None:
        """Answer with an error; in a started stream as its last event, never followed by [DONE]."""
        if self.started:
            self._exchange.end(to_event(error))
        else:
            await self.whole(error.status, [*headers, *to_headers(error)], to_body(error))

    def _start(self) -> None:
        self.started = True
        self._exchange.begin(self._stream_headers)

    def _named(self, headers: Iterable[Header]) -> Headers:
        return [*headers, *self.limits, (b"x-request-id", self.identity.encode())]


def _exchange(scope: Scope) -> Exchange:
    running: Exchange = scope["extensions"][EXCHANGE]["running"]()
    return running
