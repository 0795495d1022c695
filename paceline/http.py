"""The HTTP/1.1 connections of a server, with bounds; alike in gateways and workers.

uvicorn bounds neither the size and the time of a request head, nor trailers, nor the number of
requests that a client may send ahead, nor the time for which a client may stall. A connection
stores a few numbers for that, and one task checks all connections each second, so that no request
pays for a timer. Their clients trust the same certificate authorities.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from http import HTTPStatus
from typing import Any

import httptools
import httpx
import uvicorn
from pydantic_core import to_json
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.lifecycle import first_of
from paceline.protocol import ApiError, header_value

TRAILERS_LIMIT_BYTES = 8 * 1024
"""Also of the extensions of a chunk: of all that a body holds beside its data, in one go."""
TRAILERS_LIMIT = 32
PIPELINE_LIMIT = 16
"""Requests of one connection that are parsed and wait for the response before theirs."""
PIPELINE_PAUSE_S = 0.001
"""Before each of them: a flood would leave a worker's engine and all other clients no time."""
OPEN_FILES = 65_536
_MACOS_OPEN_FILES = 10_240

# How long the rest of a refused request is read and dropped. Closing at once would send a reset,
# which destroys the refusal before the client can read it.
_LINGER_S = 2.0
_BODY_AFTER_RESPONSE_S = 15.0
# Longer than clients and gateways reuse idle connections: if both ends close at once, a request is
# lost.
_KEEP_ALIVE_S = 75
_PROBE_AFTER_S = 60
_PROBE_INTERVAL_S = 15
_PROBES = 4
# For clients that have not read their responses when the server closes.
_LAST_READS_S = 2.0
_CLOSING_CHECK_S = 0.01
_END_OF_HEAD = b"\r\n\r\n"
_UPGRADE_HEADERS = frozenset((b"connection", b"upgrade", b"http2-settings"))
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


CHECK_S = 1.0
"""A connection that is over one of its time limits ends within this time more."""


class NotHttp(ApiError, status=400, kind="invalid_request_error", code="invalid_http"):
    """The bytes are not an HTTP/1.1 request."""

    message = "This is not a valid HTTP/1.1 request."


class HeadTooSlow(NotHttp, status=408, code="headers_timeout"):
    """The headers did not arrive in time."""

    message = "The headers of the request did not arrive in time."


class HeadTooLarge(NotHttp, status=431, code="headers_too_large"):
    """The headers are larger, or more, than the limit."""

    limit_bytes = 32 * 1024
    """As much as nginx takes."""
    limit_headers = 100
    message = (
        f"A request may have at most {limit_headers} headers with {limit_bytes} bytes in total."
    )


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with one client; `head_timeout_s` and `write_timeout_s` bound its stalls."""

    def __init__(self, *, head_timeout_s: float, write_timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._head_since_s: float | None = None
        self._head_bytes = 0
        self._framing_bytes = 0
        self._trailers = 0
        self._body_bytes = 0
        """Of a body of declared length, those to come."""
        self._unparsed = b""
        """Bytes received behind as many requests as may wait."""
        self._receiving = False
        self._rejection: ApiError | None = None
        self._unsent_bytes = 0
        self._sent_at_s = 0.0
        self._responded_at_s = 0.0
        self._buffered: _BufferedTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first request head."""
        self._head_since_s = self.loop.time()
        self._buffered = _BufferedTransport(
            transport,
            unread=lambda: self._receiving,
            may_read=lambda: not self._unparsed,
        )
        super().connection_made(self._buffered)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the references of this connection, so that its memory is free at once."""
        super().connection_lost(exc)
        self._buffered.forget_reader()
        if self.pipeline:
            self.pipeline.clear()
            # The last one of those that have not started; uvicorn itself begins with None.
            self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse; reject a head that is too long."""
        if not self._receiving:
            self._receiving = True
            self._head_bytes = 0
            if self._head_since_s is None:
                self._head_since_s = self.loop.time()
        if self._buffered.closing_since_s is not None and self.cycle is None:
            return  # rejected before there was a request; the rest is dropped
        self._unset_keepalive_if_required()
        self._parse(data)

    def on_message_begin(self) -> None:
        """Start the time of this head, also if it came in one packet with the request before."""
        super().on_message_begin()
        if self._head_since_s is None:
            self._receiving, self._head_bytes = True, 0
            self._head_since_s = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; drop a trailer, which must not become a header (RFC 9110, 6.5.1)."""
        if self._head_since_s is not None:
            super().on_header(name, value)
            return
        self._trailers += 1
        if self._trailers > TRAILERS_LIMIT:
            self._rejection = HeadTooLarge()
            raise self._rejection

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is too large."""
        size = len(self.url)
        self._body_bytes = 0
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"content-length":
                self._body_bytes = int(value)
        if size > HeadTooLarge.limit_bytes or len(self.headers) > HeadTooLarge.limit_headers:
            self._rejection = HeadTooLarge()
            raise self._rejection
        self._head_since_s = None
        self._framing_bytes = self._trailers = 0
        if self.parser.should_upgrade():
            return  # `_feed` parses the request again without it
        if self._buffered.closing_since_s is None:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._framing_bytes = 0
        self._body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the whole request has been read."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if not self.pipeline:
            # uvicorn stops reading at a large body, and only by reading is a disconnect seen.
            self.flow.resume_reading()
        self._receiving = False
        self._buffered.finish_closing()

    def on_response_complete(self) -> None:
        """Start the next request of the connection, and parse the bytes behind it."""
        self._responded_at_s = self.loop.time()
        super().on_response_complete()
        if self._unparsed and not self.transport.is_closing():
            unparsed, self._unparsed = self._unparsed, b""
            self._parse(unparsed)
            if not self.flow.read_paused:
                self._buffered.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start a request, after a pause for other connections if more follow it."""
        if cycle is self.cycle:
            self._start(cycle, app)
        else:
            self.loop.call_later(PIPELINE_PAUSE_S, self._start, cycle, app)

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not self.transport.is_closing():
            super()._start_asgi_task(cycle, app)

    def check(self, now_s: float) -> None:
        """Close the connection of a client that stalls: while it reads, closes or sends."""
        self._check_reader(now_s)
        if self._head_since_s is not None:
            self._check_head(self._head_since_s, now_s)
            return
        responded = self.cycle is not None and not self._is_running()
        late = now_s - self._responded_at_s > _BODY_AFTER_RESPONSE_S
        if responded and self._receiving and late:
            self._buffered.abort()  # the body of a request that has its response does not end

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

    def _check_head(self, since_s: float, now_s: float) -> None:
        """Reject a head that takes too long, and close a connection without one."""
        if self._is_running():
            self._head_since_s = now_s  # the time of the next head starts after this response
        elif now_s - since_s > self._head_timeout_s and self._buffered.closing_since_s is None:
            if self._head_bytes:
                self._reject(HeadTooSlow())
            else:
                self._buffered.abort()

    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        """Parse as many requests as may wait, and store the bytes behind them."""
        start = 0
        while start < len(data) and self._rejection is None and self.parser is not None:
            # Less one, whose head may have begun in an earlier packet.
            free = PIPELINE_LIMIT - 1 - len(self.pipeline)
            if free <= 0:
                self._unparsed = data[start:]
                self.flow.pause_reading()
                return
            end = _end_of_heads(data, min(start + max(self._body_bytes, 0), len(data)), free)
            self._head_bytes += end - start
            self._framing_bytes += end - start
            self._feed(data[start:end])
            start = end
            if self._head_since_s is not None:
                if self._head_bytes > HeadTooLarge.limit_bytes:
                    self._reject(HeadTooLarge())
            elif self._receiving and self._framing_bytes > TRAILERS_LIMIT_BYTES:
                self._reject(HeadTooLarge())

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
                self._reject(NotHttp())
                return
            lines = [b"%s %s HTTP/1.1" % (method, self.url)]
            lines += [b"%s: %s" % pair for pair in self.headers if pair[0] not in _UPGRADE_HEADERS]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join((*lines, b"", data[upgrade.args[0] :])))
        except httptools.HttpParserError:
            self._reject(self._rejection or NotHttp())

    def _reject(self, rejection: ApiError) -> None:
        """Send an error in place of the application, and read no further request."""
        in_body = self._head_since_s is None and self.cycle is not None
        self._rejection = rejection
        self._head_since_s = None
        if in_body or self._is_running() or self._buffered.is_closing():
            self._buffered.abort()  # a request has one response
            return
        body = to_json(rejection.body())
        headers = (
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        )
        self._buffered.write(encode_head(rejection.status, headers) + body)
        self._buffered.close()


class Server(uvicorn.Server):
    """A server of bounded connections; `serving` is the task that runs it."""

    serving: asyncio.Task[None]

    def __init__(
        self,
        app: ASGIApp,
        *,
        connection: Callable[..., BoundedProtocol] = BoundedProtocol,
        head_timeout_s: float = 10.0,
        write_timeout_s: float = 30.0,
        check_s: float = CHECK_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        protocol = functools.partial(
            connection, head_timeout_s=head_timeout_s, write_timeout_s=write_timeout_s
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # any callable that makes one will do
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",  # below, uvicorn logs whole paths and queries
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._check_s = check_s
        self._tls = tls
        self._listening = asyncio.Event()
        self._ending = asyncio.Event()

    @contextlib.asynccontextmanager
    async def on(self, listener: socket.socket) -> AsyncIterator[None]:
        """Accept connections within the context; the listener listens already."""
        _probe_idle_clients(listener)
        self._listener = listener
        self.serving = asyncio.create_task(self.serve(sockets=[listener]), name="server")
        try:
            await first_of(self.serving, self._listening.wait())
            if self.serving.done():
                self.serving.result()
            yield
        finally:
            self._ending.set()
            await self.serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report that connections are accepted."""
        self.config.ssl = self._tls
        await super().startup(sockets)
        self._listening.set()

    async def secure(self, tls: ssl.SSLContext) -> None:
        """Speak only TLS from now on; requests that run end as they began."""
        before, self._tls = self.servers, tls
        await self.startup([self._listener.dup()])
        for server in before:
            server.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()

    async def main_loop(self) -> None:
        """Check the time limits of all connections once a second, until the end."""
        while not self._ending.is_set():
            await self.on_tick(0)
            self._check_connections()  # in a frame of its own, which holds none of them for longer
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._check_s)

    def _check_connections(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for connection in tuple(self.server_state.connections):
            connection.check(now_s)  # type: ignore[union-attr]  # all are of this module

    def stop_accepting(self) -> None:
        """Leave new connections in the queue of the listener, and close those without a request."""
        for server in self.servers:
            server.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners, and the connections once their clients have read their responses."""
        for closing in (*self.servers, *(sockets or ())):
            closing.close()
        state = self.server_state
        for connection in tuple(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_READS_S):
                await asyncio.sleep(_CLOSING_CHECK_S)  # connections that are being accepted
                while state.connections or state.tasks:  # noqa: ASYNC110  # neither has an event
                    await asyncio.sleep(_CLOSING_CHECK_S)
        for task in state.tasks:
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Shutdown`: uvicorn would close the listener at once."""
        yield


def _end_of_heads(data: bytes, start: int, count: int) -> int:
    """Return where at most `count` requests end: each has one empty line, a body may have more."""
    for _ in range(count):
        found = data.find(_END_OF_HEAD, start)
        if found < 0:
            return len(data)
        start = found + len(_END_OF_HEAD)
    return start


def _probe_idle_clients(listener: socket.socket) -> None:
    """Have the system end connections whose client has vanished, such as a Mac without power.

    Connections inherit the options of their listener, so none costs a system call.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, _PROBE_AFTER_S)
    else:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def system_error(error: BaseException) -> OSError | None:
    """Return the system's error behind one of a client library, which hides it several deep."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        if isinstance(cause, BaseExceptionGroup):  # one for each address of a name
            cause = cause.exceptions[0]
        else:
            cause = cause.__cause__ or cause.__context__
    return None


def raise_open_file_limit() -> None:
    """Let the process open as many files as the system allows, 65,536 at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    # macOS names no hard limit, and refuses what is over its own.
    for limit in (allowed, _MACOS_OPEN_FILES):
        if soft < limit <= allowed:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return


class _BufferedTransport(asyncio.Transport):
    """A transport that sends everything written in one iteration of the event loop as one packet.

    uvicorn writes a head and its body one by one, and system calls are most of a server's cost.
    More than 64 KiB leave at once: only sent bytes make a response wait for a slow reader.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        unread: Callable[[], bool],
        may_read: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._unread = unread
        self._may_read = may_read
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.closing_since_s: float | None = None

    def forget_reader(self) -> None:
        """Stop checking what the client has read: the connection is lost."""
        self._unread = self._may_read = lambda: False

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._may_read():
            self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.closing_since_s is not None:
            return
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(bytes(data))
        self._held_bytes += len(data)
        if self._held_bytes > HIGH_WATER_LIMIT:
            self._send()  # else a writer that never pauses would not learn that it must

    def write_now(self, data: bytes) -> None:
        """Send a whole piece now, after held bytes."""
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
            if self._transport.can_write_eof():  # TLS has no half of a connection
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
        held, self._held, self._held_bytes = self._held, [], 0
        # A client may have disconnected in this iteration.
        if held and not self._transport.is_closing():
            self._transport.writelines(held)


def encode_head(status: int, headers: Collection[tuple[bytes, bytes]]) -> bytes:
    """Encode a head."""
    lines = [b"%b: %b" % (name, header_value(value)) for name, value in headers]
    return b"\r\n".join((_STATUS_LINES[status], *lines, b"\r\n"))


def paired_tls(*, server: bool = False) -> ssl.SSLContext:
    """Return a context for TLS 1.3 with certificates of both sides, which an `Identity` loads."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # a resumed session would not present its certificate again
    return context


@functools.cache
def certificate_authorities() -> ssl.SSLContext:
    """Return the trusted certificate authorities, read once: reading them takes 40 ms."""
    context = httpx.create_ssl_context()
    context.load_default_certs()  # the system's too: a company's own authority is only there
    return context
