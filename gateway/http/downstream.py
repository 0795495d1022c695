"""HTTP/1.1 with clients: their connections, the bodies of requests, and the responses to them.

By ASGI each piece of a response is a message, sent by a task that waits until it is taken: for one
token of a stream that costs more than reading and writing it. A `ResponseWriter` writes a piece to
the connection at once, and a head leaves in one packet with what follows it.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Self, cast

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway import errors
from gateway.protocols.event_stream import comment_of
from gateway.protocols.openai import CHAT, WireFormat
from gateway.types import Header, Headers, RawBody
from paceline.content_coding import DECODER_BYTES, coding_of, decoding
from paceline.http import BoundedProtocol, encode_head
from paceline.protocol import REQUEST_ID

PIECE_BYTES = 64 * 1024
"""A client that does not read makes the gateway hold a copy of one piece of a response."""
_RESPONSE = "paceline.response"  # the ASGI extension that holds the writer of the response
_HEADERS = "paceline.headers"  # the headers by name
JSON_HEADERS = ((b"content-type", b"application/json"),)
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front must not collect events
)
KEEPALIVE = b": keepalive\n\n"
"""The comment that keeps a stream alive."""
RESEND = b"x-paceline-resend"
"""A request header of `deploy/nginx.conf`, which sends the request elsewhere after a 503."""
_REPLACED = (413, 500, 502, 504)
_CLOSE = (b"connection", b"close")
_CHUNKED = (b"transfer-encoding", b"chunked")
_OF_BODIES = frozenset((b"content-type", b"connection"))


class ClientDisconnected(Exception):
    """The client closed its connection, or stopped reading."""


class DownstreamProtocol(BoundedProtocol):
    """HTTP/1.1 with a client, whose responses have a `ResponseWriter`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.writer: ResponseWriter | None = None
        """Of the running request, or of the last one."""
        # Neither the writer nor the connection itself: they would be cycles of garbage.
        connection = weakref.proxy(self)
        self._extensions: dict[str, dict[object, object]]
        self._extensions = {_RESPONSE: {"writer": lambda: connection.writer}}

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running request."""
        super().connection_lost(exc)
        if self.writer is not None:
            self.writer.disconnect()

    def pause_writing(self) -> None:
        """Pause the running request and those behind it."""
        super().pause_writing()
        if self.writer is not None:
            self.writer.on_write_paused(True)

    def resume_writing(self) -> None:
        """Resume the paused side."""
        super().resume_writing()
        if self.writer is not None:
            self.writer.on_write_paused(False)

    def on_message_begin(self) -> None:
        """Offer the writer of the response to the application."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def check(self, now_s: float) -> None:
        """Check the time limits of the connection and of its running request."""
        super().check(now_s)
        if self.writer is not None:
            self.writer.check(now_s)

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Create the writer of the response, then start the request."""
        self.writer = ResponseWriter(cycle, self._buffered.write_now)
        super()._start(cycle, app)


class EventWriter:
    """Writes the events of one answer by `send`, which takes them as they are."""

    rate_limit_headers: Sequence[Header] = ()
    """Sent with every response, also with errors."""
    started = False
    idle = False
    """No piece of the stream was written since this was set."""

    def __init__(self, request_id: str, send: Callable[[bytes], None]) -> None:
        self.request_id = request_id
        self._send = send

    async def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:  # noqa: ARG002
        """Send a whole response."""
        self._send(body)

    async def open(
        self,
        headers: Iterable[Header],  # noqa: ARG002
        on_write_paused: Callable[[bool], None],  # noqa: ARG002
    ) -> None:
        """Begin a stream."""
        self.started = True

    def write(self, piece: bytes) -> None:
        """Send a piece of the stream now."""
        self._send(piece)

    def chunk_sender(self) -> Callable[[bytes], None] | None:
        """Return a sender of ready HTTP chunks; None if the stream has no chunks."""
        return None

    def end(self, piece: bytes = b"") -> None:
        """End the stream, with a last piece or without one."""
        self._send(piece)

    async def fail(
        self,
        error: errors.GatewayError,
        headers: Iterable[Header] = (),  # noqa: ARG002
        wire_format: WireFormat = CHAT,
    ) -> None:
        """End the stream with an error event."""
        self._send(wire_format.error_event(error))


class ResponseWriter(EventWriter):
    """The response to one request: whole, or a stream whose head leaves with its first piece.

    After the client has disconnected, written bytes are dropped.
    """

    opened_s = float("inf")
    """The time at which a worker began the stream."""
    early = False
    """The head went out before a worker began the stream, and so without its headers."""
    on_check: Callable[[float], None] | None = None
    """Called about once a second."""

    def __init__(self, cycle: RequestResponseCycle, send: Callable[[bytes], None]) -> None:
        self._cycle = cycle
        self._scope = cast("Scope", cycle.scope)
        super().__init__(request_id(self._scope), send)
        self._stream_headers: Headers = []
        self._head = b""
        self._chunked = False
        self._disconnected = False
        self._cancel_scope: CancelScope | None = None
        self.on_write_paused: Callable[[bool], None] = _ignore
        """Called with whether written bytes of a stream pile up."""

    async def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send a whole response."""
        await self.drained()
        self.started = True
        headers = (*self._with_own(headers), (b"content-length", b"%d" % len(body)))
        head = self._head_of(status, headers)
        if self._scope["method"] == "HEAD":
            body = b""
        self._send(head + body[:PIECE_BYTES])
        for begin in range(PIECE_BYTES, len(body), PIECE_BYTES):
            await self.drained()
            self._send(body[begin : begin + PIECE_BYTES])
        self._complete()

    async def open(
        self, headers: Iterable[Header], on_write_paused: Callable[[bool], None]
    ) -> None:
        """Prepare a stream with these headers, once the client has read earlier responses.

        An early head has gone out without these headers.
        """
        await self.drained()
        self.opened_s = asyncio.get_running_loop().time()
        self.on_write_paused = on_write_paused
        if not self.started:
            self._stream_headers = self._with_own(headers)
        if self._scope["method"] == "HEAD":
            self.send_head()
            self._complete()
            raise ClientDisconnected  # it waits for nothing else

    def open_early(self, headers: Iterable[Header], piece: bytes) -> None:
        """Send the head and a piece of a stream that no worker has begun."""
        self.early = True
        self._stream_headers = self._with_own(headers)
        self.write(piece)

    def send_head(self) -> None:
        """Send the head of an open stream now, instead of with its first piece."""
        self._start()
        head, self._head = self._head, b""
        self._send(head)

    def add_headers(self, headers: Iterable[Header]) -> None:
        """Send these headers with the response, whatever writes it."""
        self._cycle.default_headers = [*self._cycle.default_headers, *headers]

    def write(self, piece: bytes) -> None:
        """Send a piece of the stream now; the first one carries status and headers."""
        self.idle = False
        if not self.started:
            self._start()
        framed = b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece
        if self._head:
            framed, self._head = self._head + framed, b""
        self._send(framed)

    def chunk_sender(self) -> Callable[[bytes], None] | None:
        """Return a sender of ready HTTP chunks; None if the stream has no chunks."""
        return self._send if self._chunked and self.started and not self._head else None

    def end(self, piece: bytes = b"") -> None:
        """End the stream, with a last piece or without one."""
        if not self.started:
            self._start()
        if self._chunked:
            framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
        else:
            framed = piece
        self._send(self._head + framed)
        self._complete()

    async def fail(
        self,
        error: errors.GatewayError,
        headers: Iterable[Header] = (),
        wire_format: WireFormat = CHAT,
    ) -> None:
        """Respond with an error, or end a stream that has started with an error event."""
        all_headers = [*headers, *errors.to_headers(error)]
        if self.early:
            late = [one for one in all_headers if one[0] not in _OF_BODIES]
            self.end(comment_of(late) + wire_format.error_event(error))
        elif self.started:
            self.end(wire_format.error_event(error))
        else:
            body = wire_format.error_body(error)
            replaced = replaced_body(self._scope, error.status, body)
            await self.whole(error.status, [*all_headers, *replaced], body)

    def attach(self, cancel_scope: CancelScope | None) -> None:
        """Cancel this scope when the client disconnects; None: cancel nothing."""
        self._cancel_scope = cancel_scope
        if cancel_scope is not None:
            self._cycle.flow.resume_reading()  # a disconnect is seen only by reading
            if self._disconnected:
                cancel_scope.cancel(ClientDisconnected())

    @property
    def writable(self) -> bool:
        """Return whether written bytes leave at once."""
        return not self._cycle.flow.write_paused

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        if self._cycle.flow.write_paused:
            await self._cycle.flow.drain()

    # Called by the connection.

    def disconnect(self) -> None:
        """Record that the client has disconnected, and cancel the request."""
        self._disconnected = True
        self._send = _ignore
        if self._cancel_scope is not None:
            self._cancel_scope.cancel(ClientDisconnected())

    def check(self, now_s: float) -> None:
        """Cancel the request if its deadline has passed; keep its stream alive."""
        if self._cancel_scope is not None:
            self._cancel_scope.check(now_s)
        if self.on_check is not None:
            self.on_check(now_s)

    def _start(self) -> None:
        self.started = True
        # HTTP/1.0 has no chunks: there the end of the connection is the end of the response.
        self._chunked = self._scope["http_version"] == "1.1"
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
        return encode_head(status, (*cycle.default_headers, *headers))

    def _complete(self) -> None:
        """Free the connection for the next request, or close it."""
        self.on_write_paused = _ignore
        cycle = self._cycle
        cycle.response_complete = True
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _ignore(_: object) -> None:
    """Discard a message."""


def response_writer(scope: Scope) -> ResponseWriter:
    """Return the writer of the response to a request."""
    writer: ResponseWriter = scope["extensions"][_RESPONSE]["writer"]()
    return writer


class CancelScope:
    """A context that ends early: when cancelled, at its deadline, or when the client disconnects.

    It works like `asyncio.timeout`: an inner wait is cancelled and releases its resources on the
    way out. The connection reports the client and the time; no task waits for either.
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
        self._running = True
        self._writer.attach(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._writer.attach(None)
        self._running = False
        # A scope that kept the error would be a cycle of garbage with its traceback, which holds
        # the body of the request.
        reason, self._reason = self._reason, None
        if reason is not None:
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is asyncio.CancelledError:
                try:
                    raise reason from error
                finally:
                    del reason

    def limit(self, seconds: float, error: Callable[[], Exception]) -> None:
        """Cancel with such an error after so many seconds; a new limit replaces the last.

        The connection checks about once a second: a timer for each request costs more.
        """
        self._deadline_s = self._task.get_loop().time() + seconds
        self._timeout_error = error

    def cancel(self, reason: Exception) -> None:
        """Cancel the context, if it runs, which then raises this error; the first reason counts."""
        if self._running and self._reason is None:
            self._reason = reason
            self._task.cancel()

    @property
    def cancelled(self) -> bool:
        """Return whether the context is ending early."""
        return self._reason is not None

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


def pieces(body: bytes) -> Iterator[bytes]:
    """Yield a body in pieces."""
    for begin in range(0, len(body), PIECE_BYTES):
        yield body[begin : begin + PIECE_BYTES]


def in_pieces(send: Send) -> Send:
    """Return a sender of pieces of a body, each once the client has read enough."""

    async def send_pieces(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send(message)
            return
        for piece in pieces(body):
            await send({**message, "body": piece, "more_body": True})
        await send({**message, "body": b""})

    return send_pieces


def head_of(send: Send) -> Send:
    """Return a sender of a response that ends after its head."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body"})

    return send_head


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first value of a header; `name` in lower case. The list is read once."""
    headers: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if headers is None:
        headers = scope[_HEADERS] = dict(reversed(scope["headers"]))
    return headers.get(name)


def replaced_body(scope: Scope, status: int, body: bytes) -> Headers:
    """Return the header with the body of an error, for `deploy/nginx.conf`."""
    replaced = status in _REPLACED and header(scope, RESEND)
    return [(b"x-paceline-error", body)] if replaced else []


def request_id(scope: Scope) -> str:
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
) -> RawBody:
    """Read the whole body and count it while reading: a declared length proves nothing.

    `hold` gets the size of each part before the next one is read, and may raise. The caller limits
    the time. Raise `BodyTooLarge`, `CodingRefused`, `BodyNotJson` or `ClientDisconnected`.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise errors.BodyTooLarge(limit_bytes)
    copies = 1
    if header(scope, b"content-encoding") is not None and (coding := coding_of(scope)):
        receive = decoding(
            *(receive, coding, limit_bytes),
            unsupported=errors.CodingRefused,
            invalid=errors.BodyNotJson,
            too_large=errors.BodyTooLarge,
        )
        copies = 2  # the window of the decoder is the second
        hold(DECODER_BYTES)
    body = bytearray()  # grows in place; a join would copy all of it in one call
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        if len(body) + len(part) > limit_bytes:
            raise errors.BodyTooLarge(limit_bytes)
        hold(copies * len(part))
        more = message.get("more_body", False)
        if not (body or more or copies > 1):
            return part
        body += part
        if not more:
            if copies > 1:
                hold(-DECODER_BYTES - len(body))
            return body


async def read_small_body(
    scope: Scope,
    receive: Receive,
    *,
    limit_bytes: int,
    timeout_s: float,
    hold: Callable[[int], None] = lambda _part_bytes: None,
) -> RawBody:
    """Read a body outside the data plane; raise `BodyTooSlow` after a time limit of its own."""
    try:
        async with asyncio.timeout(timeout_s):
            return await read_body(scope, receive, limit_bytes=limit_bytes, hold=hold)
    except TimeoutError:
        raise errors.BodyTooSlow from None
