"""HTTP/1.1 with clients: their connections, the bodies of requests, and the responses to them.

uvicorn leaves three bounds open: the time and the size of a request head, and the time for which a
reader may stall. A connection stores a few numbers for that, and one task checks all connections
each second, so that no request pays for a timer.

By ASGI each piece of a response is a message, sent by a task that waits until it is taken: for one
token of a stream that costs more than reading and writing it. A `ResponseWriter` writes a piece to
the connection at once, and a head leaves in one packet with what follows it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from http import HTTPStatus
from typing import Any, Self

import httptools
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import errors
from gateway.types import Header, Headers
from workers.protocol import REQUEST_ID

HEAD_LIMIT_BYTES = 32 * 1024
"""As much as nginx takes."""
HEADERS_LIMIT = 100

# How long the rest of a refused request is read and dropped. Closing at once would send a reset,
# which destroys the refusal before the client can read it.
_LINGER_S = 2.0
_UPGRADE_HEADERS = frozenset((b"connection", b"upgrade", b"http2-settings"))
_RESPONSE = "paceline.response"  # the ASGI extension that holds the writer of the response
_CLOSE = (b"connection", b"close")
_CHUNKED = (b"transfer-encoding", b"chunked")
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


class ClientDisconnected(Exception):
    """The client closed its connection, or stopped reading."""


class DownstreamProtocol(HttpToolsProtocol):
    """HTTP/1.1 with a client. `head_timeout_s` and `write_timeout_s` as in the settings."""

    def __init__(self, *, head_timeout_s: float, write_timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._head_since_s: float | None = None
        self._head_bytes = 0
        self._receiving = False
        self._rejection: errors.RequestRefused | None = None
        self._unsent_bytes = 0
        self._sent_at_s = 0.0
        self._buffered: _BufferedTransport
        self._writer: ResponseWriter | None = None
        """Of the running request, or of the last one."""
        # Not the writer itself: each request would be a cycle of garbage.
        self._extensions: dict[str, dict[object, object]]
        self._extensions = {_RESPONSE: {"writer": lambda: self._writer}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first request head."""
        self._head_since_s = self.loop.time()
        self._buffered = _BufferedTransport(transport, unread=lambda: self._receiving)
        super().connection_made(self._buffered)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running request."""
        super().connection_lost(exc)
        if self._writer is not None:
            self._writer.disconnect()

    def pause_writing(self) -> None:
        """Pause the running request and those behind it."""
        super().pause_writing()
        if self._writer is not None:
            self._writer.set_write_paused(True)

    def resume_writing(self) -> None:
        """Resume what was paused."""
        super().resume_writing()
        if self._writer is not None:
            self._writer.set_write_paused(False)

    def data_received(self, data: bytes) -> None:
        """Parse; reject a head that is too long."""
        if not self._receiving:
            self._receiving = True
            self._head_bytes = 0
            if self._head_since_s is None:
                self._head_since_s = self.loop.time()
        if self._buffered.closing_since_s is not None and self.cycle is None:
            return  # rejected before there was a request; the rest is dropped
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._head_since_s is not None and self._head_bytes > HEAD_LIMIT_BYTES:
            self._reject(errors.HeadTooLarge(HEAD_LIMIT_BYTES, HEADERS_LIMIT))

    def on_message_begin(self) -> None:
        """Start the time of this head, also if it came in one packet with the request before."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        if self._head_since_s is None:
            self._receiving, self._head_bytes = True, 0
            self._head_since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is too large."""
        self._head_since_s = None
        size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        if size > HEAD_LIMIT_BYTES or len(self.headers) > HEADERS_LIMIT:
            self._rejection = errors.HeadTooLarge(HEAD_LIMIT_BYTES, HEADERS_LIMIT)
            raise self._rejection
        if self.parser.should_upgrade():
            return  # `_feed` parses the request again without it
        if self._buffered.closing_since_s is None:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Record that the whole request has been read."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._receiving = False
        self._buffered.finish_closing()

    def check(self, now_s: float) -> None:
        """Close the connection if the client is too slow: to read, to close, or to send a head."""
        self._check_reader(now_s)
        self._check_head(now_s)
        if self._writer is not None:
            self._writer.check(now_s)

    def _check_reader(self, now_s: float) -> None:
        """Abort a client that reads nothing; close after the time to read a rejected request."""
        closing_since_s = self._buffered.closing_since_s
        unsent_bytes = self._buffered.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._sent_at_s = unsent_bytes, now_s
            if closing_since_s is not None and now_s - closing_since_s > _LINGER_S:
                self._buffered.finish_closing()
        elif now_s - self._sent_at_s > self._write_timeout_s:
            self._buffered.abort()

    def _check_head(self, now_s: float) -> None:
        """Reject a head that takes too long, and close a connection without one."""
        if self._head_since_s is None:
            return
        if self.cycle and not self.cycle.response_complete:
            self._head_since_s = now_s  # the time of the next head starts after this response
        late = now_s - self._head_since_s > self._head_timeout_s
        if late and self._buffered.closing_since_s is None:
            if self._head_bytes:
                self._reject(errors.HeadTooSlow())
            else:
                self._buffered.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Create the writer of the response, then start the request."""
        self._writer = ResponseWriter(cycle, self._buffered.write_now)
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Parse; ignore a request to upgrade to another protocol, as HTTP allows.

        Java's own client sends one with each first request. The parser stops at such a head
        for good, so a new one parses the head again without these headers.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._reject(errors.NotHttp())
                return
            lines = [b"%s %s HTTP/1.1" % (method, self.url)]
            lines += [b"%s: %s" % pair for pair in self.headers if pair[0] not in _UPGRADE_HEADERS]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join((*lines, b"", data[upgrade.args[0] :])))
        except httptools.HttpParserError:
            self._reject(self._rejection or errors.NotHttp())

    def _reject(self, error: errors.GatewayError) -> None:
        """Send an error in place of the application, and read no further request."""
        self._head_since_s = None
        busy = self.cycle is not None and not self.cycle.response_complete
        if self._buffered.is_closing() or busy:
            self._buffered.abort()  # a response that has begun cannot be replaced by another
            return
        body = errors.to_body(error)
        headers = (*errors.to_headers(error), (b"content-length", b"%d" % len(body)), _CLOSE)
        self._buffered.write(_encode_head(error.status, headers) + body)
        self._buffered.close()


class _BufferedTransport(asyncio.Transport):
    """A transport that sends everything written in one iteration of the event loop as one packet.

    uvicorn writes a head and its body one by one, and system calls are most of a server's cost.
    """

    def __init__(self, transport: asyncio.Transport, *, unread: Callable[[], bool]) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._unread = unread
        self._held: list[bytes] = []
        self.closing_since_s: float | None = None

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.closing_since_s is not None:
            return
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(bytes(data))

    def write_now(self, data: bytes) -> None:
        """Send a whole piece now, behind what is held."""
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
        """Close once all is sent and the rest of the request has been read, within bounds."""
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
        """Close without the rest of the request."""
        if self.closing_since_s is not None:
            self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._transport.abort()

    def _send(self) -> None:
        held, self._held = self._held, []
        # A client may have disconnected in this iteration.
        if held and not self._transport.is_closing():
            self._transport.writelines(held)


class ResponseWriter:
    """The response to one request: whole, or a stream whose head leaves with its first piece.

    After the client has disconnected, written bytes are dropped.
    """

    def __init__(self, cycle: RequestResponseCycle, send: Callable[[bytes], None]) -> None:
        self._cycle = cycle
        self._send = send
        self._stream_headers: Headers = []
        self._head = b""
        self._chunked = False
        self._disconnected = False
        self._cancel_scope: CancelScope | None = None
        self._on_write_paused: Callable[[bool], None] | None = None
        self.request_id = request_id(cycle.scope)
        self.rate_limit_headers: Sequence[Header] = ()
        """Sent with every response, also with errors."""
        self.started = False

    async def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send a whole response."""
        await self._writable()
        self.started = True
        headers = (*self._with_own(headers), (b"content-length", b"%d" % len(body)))
        head = self._head_of(status, headers)
        if not self._disconnected:
            self._send(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    async def open(
        self, headers: Iterable[Header], on_write_paused: Callable[[bool], None]
    ) -> None:
        """Prepare a stream with these headers, once the client has read earlier responses.

        `on_write_paused` is called with True when written bytes pile up because the client reads
        slowly, and with False when they no longer do.
        """
        await self._writable()
        self._stream_headers = self._with_own(headers)
        self._on_write_paused = on_write_paused

    def write(self, piece: bytes) -> None:
        """Send a piece of the stream now; the first one carries status and headers."""
        if not self.started:
            self._start()
        framed = b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece
        if self._head:
            framed, self._head = self._head + framed, b""
        if not self._disconnected:
            self._send(framed)

    def chunk_sender(self) -> Callable[[bytes], None] | None:
        """Return what sends pieces that are HTTP chunks already; None if the stream has none."""
        return self._send if self._chunked and self.started and not self._head else None

    def end(self, piece: bytes = b"") -> None:
        """End the stream, with a last piece or without one."""
        if not self.started:
            self._start()
        if self._chunked:
            framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
        else:
            framed = piece
        if not self._disconnected:
            self._send(self._head + framed)
        self._complete()

    async def fail(
        self,
        error: errors.GatewayError,
        headers: Iterable[Header] = (),
        *,
        error_body: Callable[[errors.GatewayError], bytes] = errors.to_body,
        error_event: Callable[[errors.GatewayError], bytes] = errors.to_event,
    ) -> None:
        """Respond with an error, or end a stream that has started with an error event."""
        if self.started:
            self.end(error_event(error))
        else:
            await self.whole(error.status, [*headers, *errors.to_headers(error)], error_body(error))

    def attach(self, cancel_scope: CancelScope | None) -> None:
        """Cancel this scope when the client disconnects; None: cancel nothing."""
        self._cancel_scope = cancel_scope
        if cancel_scope is not None:
            self._cycle.flow.resume_reading()  # a disconnect is seen only by reading
            if self._disconnected:
                cancel_scope.cancel(ClientDisconnected())

    # Called by the connection.

    def set_write_paused(self, paused: bool) -> None:
        """Pass on whether written bytes pile up."""
        if self._on_write_paused is not None:
            self._on_write_paused(paused)

    def disconnect(self) -> None:
        """Record that the client has disconnected, and cancel the request."""
        self._disconnected = True
        if self._cancel_scope is not None:
            self._cancel_scope.cancel(ClientDisconnected())

    def check(self, now_s: float) -> None:
        """Cancel the request if its deadline has passed."""
        if self._cancel_scope is not None:
            self._cancel_scope.check(now_s)

    async def _writable(self) -> None:
        """Wait until the client has read enough of earlier responses."""
        if self._cycle.flow.write_paused:
            await self._cycle.flow.drain()

    def _start(self) -> None:
        self.started = True
        # HTTP/1.0 has no chunks: there the end of the connection is the end of the response.
        self._chunked = self._cycle.scope["http_version"] == "1.1"
        framing = (_CHUNKED,) if self._chunked else ()
        self._head = self._head_of(200, (*self._stream_headers, *framing))

    def _with_own(self, headers: Iterable[Header]) -> Headers:
        own = (b"x-request-id", self.request_id.encode())
        return [*headers, *self.rate_limit_headers, own]

    def _head_of(self, status: int, headers: tuple[Header, ...]) -> bytes:
        """Encode the head, and decide whether the connection stays open after the response."""
        cycle = self._cycle
        cycle.response_started = True
        if _CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers = (*headers, _CLOSE)
        return _encode_head(status, (*cycle.default_headers, *headers))

    def _complete(self) -> None:
        """Free the connection for the next request, or close it."""
        self._on_write_paused = None
        cycle = self._cycle
        cycle.response_complete = True
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _encode_head(status: int, headers: tuple[Header, ...]) -> bytes:
    """Encode a head; a header that would end its line early is a defect of the gateway."""
    lines = [_STATUS_LINES[status], *[b"%b: %b" % pair for pair in headers], b"\r\n"]
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(headers) + 2:
        raise ValueError("a header holds the end of a line")
    return head


def response_writer(scope: Scope) -> ResponseWriter:
    """Return the writer of the response to a request."""
    writer: ResponseWriter = scope["extensions"][_RESPONSE]["writer"]()
    return writer


class CancelScope:
    """A context that ends early: when cancelled, at its deadline, or when the client disconnects.

    It works like `asyncio.timeout`: what is awaited inside is cancelled and releases its resources
    on the way out. The connection reports the client and the time; no task waits for either.
    """

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._reason: Exception | None = None
        self._deadline_s = float("inf")
        self._timeout_error: Callable[[], Exception] = ClientDisconnected
        self.key_id = ""
        """The API key of the request, once it is authenticated."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._writer.attach(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._writer.attach(None)
        if self._reason is not None:
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is asyncio.CancelledError:
                raise self._reason from error

    def limit(self, seconds: float, error: Callable[[], Exception]) -> None:
        """Cancel with such an error after so many seconds; a new limit replaces the last.

        The connection checks about once a second: a timer for each request costs more.
        """
        self._deadline_s = self._task.get_loop().time() + seconds
        self._timeout_error = error

    def cancel(self, reason: Exception) -> None:
        """Cancel the context, which then raises this error; the first reason counts."""
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    def check(self, now_s: float) -> None:
        """Cancel the context if its deadline has passed."""
        if now_s >= self._deadline_s:
            self.cancel(self._timeout_error())


class ActiveRequests(set[CancelScope]):
    """The cancel scopes of all running requests."""

    def cancel(self, error: errors.GatewayError) -> None:
        """Cancel all requests: streams end with an error event."""
        for cancel_scope in tuple(self):
            cancel_scope.cancel(error)

    def cancel_keys(self, key_ids: Set[str]) -> None:
        """Cancel the requests of API keys that have ended."""
        for cancel_scope in tuple(self):
            if cancel_scope.key_id in key_ids:
                cancel_scope.cancel(errors.KeyEnded())


def header(scope: Mapping[str, Any], name: bytes) -> bytes | None:
    """Return the first value of a header; `name` in lower case."""
    headers: Headers = scope["headers"]
    for key, value in headers:
        if key == name:
            return value
    return None


def request_id(scope: Mapping[str, Any]) -> str:
    """Return the client's request id if it is valid, else a new one."""
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
    """Read the whole body and count it while reading: a declared length proves nothing.

    `hold` gets the size of each part and may raise. The caller limits the time. Raise
    `BodyTooLarge` or `ClientDisconnected`.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise errors.BodyTooLarge(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise errors.BodyTooLarge(limit_bytes)
        hold(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_small_body(
    scope: Scope, receive: Receive, *, limit_bytes: int, timeout_s: float
) -> bytes:
    """Read a body outside the data plane; raise `BodyTooSlow` after a time limit of its own."""
    try:
        async with asyncio.timeout(timeout_s):
            return await read_body(scope, receive, limit_bytes=limit_bytes)
    except TimeoutError:
        raise errors.BodyTooSlow from None
