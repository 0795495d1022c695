"""HTTP/1.1 to workers: pooled connections, one request sent on one of them, its response back.

httptools parses the responses, as on the client's side. A general client would bring redirects,
cookies, compression and proxies, and cost more than everything else that a request needs here.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Self, cast
from urllib.parse import urlsplit
from weakref import WeakSet

import httptools

from gateway import errors
from gateway.strict_json import Pieces, size_of
from paceline.drain_rate import RETRY_AFTER_RANGE_S
from paceline.http import certificate_authorities
from paceline.protocol import TOKENS_HEADER

log = logging.getLogger(__name__)

_Address = tuple[str, int, bool, str]
"""Host and port of a worker, whether it speaks TLS, and the name in a certificate of the fleet."""

Sink = Callable[[bytes], bool]
"""Takes a piece of a body, and returns whether more is wanted; one of chunks takes an HTTP chunk
with its frame, and returns whether it did."""

HEAD_LIMIT_BYTES = 64 * 1024
# What may be buffered for a client that reads slowly, before the worker is paused.
_BUFFER_LIMIT_BYTES = 64 * 1024
# A stream that brings more at once takes turns with others that do, with pauses as long as turns:
# uvloop would read 8 MB of each such stream in one iteration of its loop.
TURN_BYTES = 16 * 1024
TURN_S = 0.001
_SWITCHING, _OK = 101, 200
# The part of a response that comes next; each access to a member of an enum would take 120 ns.
_HEAD, _BODY, _END = 0, 1, 2
_NEVER_S = float("inf")

# Shorter than uvicorn's 5 s for idle connections, so that no request is written into a closing one.
_IDLE_CONNECTION_S = 3.0
# A connection that the worker was closing at the time of the write breaks at once. If it breaks
# later, the worker may have read the request and begun it.
_STALE_WITHIN_S = 0.25
_BUSY = frozenset((429, 503, 507))
_TOKENS_HEADER = TOKENS_HEADER.encode()
_TOKENS_DIGITS = 16
_OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))
_ERROR_LIMIT_BYTES = 64 * 1024
# A machine that fell asleep closes no connection. With keep-alive probes the system finds that out
# within half a minute, instead of the whole time that a response may take.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNACKNOWLEDGED_MS = 30_000


class ConnectionLost(Exception):
    """The connection ended before the response did, or carried something other than HTTP."""

    def __init__(self, why: str, errno: int | None = None) -> None:
        super().__init__(why)
        self.errno = errno


class ReadTimeout(ConnectionLost):
    """Nothing came within the time limit of the reader."""


class StaleConnection(errors.WorkerLost):
    """An idle connection broke at the write of a request, before any byte of a response."""


class ConnectionPool:
    """Idle connections to all workers; an async context that closes them at its end."""

    fleet_tls: ssl.SSLContext | None = None
    """For paired workers: it presents a certificate of the fleet, and trusts only such."""

    def __init__(self, connect_timeout_s: float, answer_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._idle: defaultdict[_Address, deque[tuple[float, UpstreamConnection]]]
        self._idle = defaultdict(deque)
        self._open: WeakSet[UpstreamConnection] = WeakSet()
        self._waiting: deque[UpstreamConnection] = deque()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close_idle_since(self._loop.time())

    async def send(
        self,
        url: str,
        body: Pieces,
        headers: dict[str, str],
        on_begin: Callable[[], None],
        *,
        fresh: bool = False,
        server_name: str = "",
    ) -> UpstreamConnection:
        """Send a request and return once the head of its response has come; raise a `WorkerError`.

        `on_begin` is called when there is a connection, before anything is written to it. The
        caller releases the connection: if the response has not ended, that closes the connection
        and so frees the worker's row. `fresh` opens a new connection; it is worth an attempt after
        `StaleConnection`. `server_name` is that in the certificate of a paired worker.
        """
        address, begin = _parse_url(url, server_name)
        head = _encode_head(begin, headers, size_of(body))
        connection = None if fresh else self._take_idle(address)
        if connection is None:
            connection = await self._connect(address)
            connection.url = url
        began_s = self._loop.time()
        on_begin()
        try:
            await connection.request(head, body, self._answer_timeout_s)
        except ReadTimeout as error:
            raise errors.WorkerSilent from error
        except ConnectionLost as error:
            log.warning("attempt.lost url=%s error=%r", url, error)
            # The worker cannot have read the request. Timed out: no byte of it was acknowledged.
            elapsed_s = self._loop.time() - began_s
            unread = error.errno == errno.ETIMEDOUT or elapsed_s < _STALE_WITHIN_S
            stale = connection.used and not connection.received and unread
            raise (StaleConnection if stale else errors.WorkerLost) from error
        return connection

    async def _connect(self, address: _Address) -> UpstreamConnection:
        """Open a connection; raise `WorkerUnreachable`."""
        host, port, tls, server_name = address
        of_fleet = self.fleet_tls if server_name else None

        def keep(connection: UpstreamConnection) -> None:
            self._idle[address].append((self._loop.time(), connection))

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self._loop, keep, self._wait_for_turn),
                    host,
                    port,
                    ssl=(of_fleet or certificate_authorities()) if tls else None,
                    server_hostname=server_name or None if tls else None,
                )
        except OSError as error:  # a timeout is one
            if error.errno in _OUT_OF_FILES:
                raise errors.Overloaded from error  # the gateway's fault, not the worker's
            log.warning("attempt.unreachable address=%s error=%r", address, error)
            raise errors.WorkerUnreachable from error
        _set_keepalive(transport.get_extra_info("socket"))
        self._open.add(connection)
        return connection

    def check(self, silent_urls: tuple[str, ...], silent_s: float) -> None:
        """Close connections that were idle for too long, and end responses that are late.

        Those from URLs that begin so are late if they are silent for so long.
        """
        now_s = self._loop.time()
        self._close_idle_since(now_s - _IDLE_CONNECTION_S)
        for connection in tuple(self._open):
            connection.check(now_s)
            if connection.silent_s(now_s) >= silent_s and connection.url.startswith(silent_urls):
                log.warning("attempt.silent url=%s", connection.url)
                connection.end(ReadTimeout("the worker sends neither bytes nor heartbeats"))

    def _wait_for_turn(self, connection: UpstreamConnection) -> None:
        if not self._waiting:
            self._loop.call_later(TURN_S, self._next_turn)
        self._waiting.append(connection)

    def _next_turn(self) -> None:
        """Let the first one take its turn, and the next one after a pause that is as long."""
        began_s = time.monotonic()
        try:
            self._waiting[0].take_turn()
        finally:
            self._waiting.popleft()
            if self._waiting:
                pause_s = max(TURN_S, time.monotonic() - began_s)
                self._loop.call_later(pause_s, self._next_turn)

    def _take_idle(self, address: _Address) -> UpstreamConnection | None:
        """Return the connection used last, if one is open and not idle for too long."""
        idle = self._idle.get(address)
        while idle:
            since_s, connection = idle.pop()
            if connection.open and self._loop.time() - since_s < _IDLE_CONNECTION_S:
                return connection
            connection.abort()
        return None

    def _close_idle_since(self, latest_s: float) -> None:
        for address, idle in tuple(self._idle.items()):
            while idle and idle[0][0] <= latest_s:
                idle.popleft()[1].abort()
            if not idle:
                del self._idle[address]  # after a restart a worker may have another port


def _chunk_starts(limit_bytes: int) -> list[tuple[bytes, ...]]:
    """List how a chunk of each total size starts: with its size in hex, lower or upper case."""
    found: list[tuple[bytes, ...]] = [()] * limit_bytes  # by total size; () matches no data
    for size in range(1, limit_bytes):
        begin = b"%x\r\n" % size
        if (whole := len(begin) + size + 2) < limit_bytes:
            found[whole] = (begin,) if begin == begin.upper() else (begin, begin.upper())
    return found


# The parser reads longer chunks; the tokens of a stream are shorter.
_CHUNK_STARTS = _chunk_starts(4096)


class UpstreamConnection(asyncio.Protocol):
    """A connection for one request at a time, and the response to it as it comes in.

    `on_free` is called when the connection is idle again, `on_flood` when it waits for its turn.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_free: Callable[[UpstreamConnection], None],
        on_flood: Callable[[UpstreamConnection], object],
    ) -> None:
        self._loop = loop
        self._on_free = on_free
        self._on_flood = on_flood
        self._reading = True
        self._rest = b""
        """Bytes that were read and wait for their turn."""
        self._queued = False
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._error: ConnectionLost | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._chunk_sink: Sink | None = None
        self._read_timeout_s = _NEVER_S
        self._waits_since_s = _NEVER_S
        """Since when a reader waits for bytes."""
        self._busy = False
        self.used = False
        """It has carried a request before."""
        self.url = ""
        """Of its first request."""
        self._reset()

    def _reset(self) -> None:
        """Begin the state of the next response."""
        self.status = 0
        self.retry_after: str | None = None
        self.tokens = 0
        """Tokens that the refused request may need, beyond its limit; 0: refused for no limit."""
        self._parts: list[bytes] = []
        self._head_bytes = 0
        self._phase = _HEAD
        self._framed = False
        """The head says where the body ends; otherwise it ends with the connection."""
        self._keep_alive = False
        self._paused = False
        self._in_chunk = True
        self._between_chunks = False
        self.received = False
        """Bytes have come since the last request was sent."""

    @property
    def open(self) -> bool:
        """Return whether it can carry a request."""
        return self._error is None and not self._busy

    async def request(self, head: bytes, body: Pieces, timeout_s: float) -> None:
        """Send a request and wait for the head of its response; raise `ConnectionLost`."""
        self._reset()
        self._busy = True
        self.set_read_timeout(timeout_s)
        self._transport.writelines((head, *body))
        try:
            while self._phase == _HEAD:
                await self._wait()
        except BaseException:
            self.abort()
            self._error = None  # its traceback has this frame, and so the body: a cycle
            raise

    async def chunk(self) -> bytes:
        """Return the bytes since the last call, at least one; none at the end.

        Raise `ConnectionLost` if the end is missing, after all bytes before it.
        """
        while not self._parts and self._phase != _END:
            await self._wait()
        self.pause(False)
        return self._take_parts()

    async def read(
        self,
        limit_bytes: int | None = None,
        hold: Callable[[int], None] = lambda _part_bytes: None,
    ) -> bytes:
        """Return the whole rest of the body, or the bytes up to about a limit.

        `hold` gets twice the size of each part, which are joined, before the next one is read; it
        may raise.
        """
        parts = []
        size = 0
        while (limit_bytes is None or size < limit_bytes) and (part := await self.chunk()):
            hold(2 * len(part))
            parts.append(part)
            size += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def pour(self, sink: Sink, chunk_sink: Sink | None = None) -> bytes:
        """Pass each piece to a sink in the same iteration of the loop, up to the end.

        Data that is one whole chunk is offered to `chunk_sink` first. Return the bytes that came
        with the end; raise `ConnectionLost` if the end is missing.
        """
        self._sink, self._chunk_sink = sink, chunk_sink
        try:
            self.pause(False)
            self._deliver()
            while self._sink is not None and self._phase != _END:
                await self._wait()
        finally:
            self._sink = self._chunk_sink = None
        return self._take_parts()

    def pause(self, paused: bool) -> None:
        """Pause or resume reading; a pause does not count as a wait for the worker."""
        if paused is not self._paused:
            self._paused = paused
            self._set_reading()

    def take_turn(self) -> None:
        """Process the bytes that were read for at most one turn, then read again."""
        until_s = time.monotonic() + TURN_S  # uvloop's own time is that of the iteration
        try:
            while self._rest and self._error is None and not self._paused:
                rest, self._rest = self._rest, b""
                self.data_received(rest)
                if time.monotonic() >= until_s:
                    break
        finally:
            self._queued = False
            self._set_reading()

    def _set_reading(self) -> None:
        """Read, unless the reader has paused or bytes wait for their turn."""
        if self._error is not None:
            return
        if self._rest and not (self._paused or self._queued):
            self._queued = True
            self._on_flood(self)
        reading = not (self._paused or self._rest)
        if not reading:
            self._waits_since_s = _NEVER_S
        elif self._waiter is not None:
            self._waits_since_s = self._loop.time()
        if reading is not self._reading:
            self._reading = reading
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    def set_read_timeout(self, seconds: float) -> None:
        """Limit each wait for new bytes from now on."""
        self._read_timeout_s = seconds
        if self._waits_since_s != _NEVER_S:
            self._waits_since_s = self._loop.time()

    def release(self) -> None:
        """Keep the connection if the end of its response allows it, else close it."""
        self._busy = False
        unsent = self._transport.get_write_buffer_size()
        ended = self._phase == _END
        if ended and self._keep_alive and self._error is None and not (unsent or self._rest):
            self.pause(False)  # the end may have come while reading was paused
            self.used = True
            self._on_free(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self.end(ConnectionLost("closed here"))

    def end(self, error: ConnectionLost) -> None:
        """Close at once; the reader gets this error."""
        self._fail(error)
        self._transport.abort()

    def check(self, now_s: float) -> None:
        """Fail the reader if it has waited for longer than the limit."""
        if self.silent_s(now_s) >= self._read_timeout_s:
            self._fail(ReadTimeout("nothing came in time"))

    def silent_s(self, now_s: float) -> float:
        """Return for how long a reader has waited for bytes; below 0 if none waits."""
        return now_s - self._waits_since_s

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes, and pass them on."""
        if not self._busy:
            self.abort()  # no request is waiting for it
            return
        # Nearly every token of a stream is one such chunk. Behind it the parser would be in the
        # same state as before it, so the parser need not see it.
        chunk_sink = self._chunk_sink
        if (
            chunk_sink is not None
            and self._between_chunks
            and (size := len(data)) < len(_CHUNK_STARTS)
            and data.startswith(_CHUNK_STARTS[size])
            and data.endswith(b"\r\n")
        ):
            self._waits_since_s = self._loop.time()  # first: the sink may pause
            if chunk_sink(data):
                return
        self.received = True
        if self._rest:
            self._rest += data
            return
        turn_bytes = TURN_BYTES if self._sink is not None else _BUFFER_LIMIT_BYTES
        if len(data) > turn_bytes and (self._sink is not None or self._phase == _HEAD):
            data, self._rest = data[:turn_bytes], data[turn_bytes:]
        if self._phase == _HEAD:
            self._head_bytes += len(data)
        invalid = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            invalid = f"no HTTP: {error!r:.200}"
        self._between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if self._phase == _HEAD and self._head_bytes > HEAD_LIMIT_BYTES:
            invalid = "the head of the response is too long"
        self._deliver()
        if invalid is not None:
            self._fail(ConnectionLost(invalid))
            self._transport.abort()
        elif self._rest:
            self._set_reading()

    def eof_received(self) -> None:
        """Let the transport close: nothing more will come from the worker."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response; it is complete only if its end is that of the connection."""
        while self._rest and self._error is None:  # TLS tells the end also while nobody reads
            rest, self._rest = self._rest, b""
            self.data_received(rest)
        if self._busy and self._phase == _BODY and not self._framed and exc is None:
            self._phase = _END  # HTTP/1.0: the end of the connection ends the response
        why = f"the connection broke: {exc!r}" if exc else "the worker closed the connection"
        self._fail(ConnectionLost(why, exc.errno if isinstance(exc, OSError) else None))

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Reject a second response: it would be taken for that of the next request."""
        if self._phase == _END:
            raise ConnectionLost("more came than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store the few headers that matter here; none is passed on."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"retry-after":
            self.retry_after = value.decode("latin-1")
        elif name == _TOKENS_HEADER and len(value) < _TOKENS_DIGITS and value.isdigit():
            self.tokens = int(value)

    def on_headers_complete(self) -> None:
        """Return the response to the caller, unless this is an interim one."""
        self.status = self._parser.get_status_code()
        if self.status >= _OK:
            self._phase = _BODY
            self._keep_alive = self._parser.should_keep_alive()
        elif self.status == _SWITCHING:
            raise ConnectionLost("the worker switched to another protocol")

    def on_chunk_header(self) -> None:
        """Record that the next bytes belong to a chunk, or follow the last one."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """Record that the next bytes are the size of a chunk."""
        self._in_chunk = False

    def on_body(self, body: bytes) -> None:
        """Buffer a part of the body until all that came with it is parsed."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Record the end of the response."""
        self._in_chunk = True
        if self._phase == _HEAD:
            self._framed = False  # an interim response, such as "100 Continue"
        else:
            self._phase = _END

    def _deliver(self) -> None:
        """Pass received bytes to the sink, else wake the reader; pause the worker beyond the bound.

        Bytes with the end go to the reader too, which ends the response with them.
        """
        ended = self._phase == _END
        if self._sink is None or ended:
            self._wake()
            if sum(map(len, self._parts)) > _BUFFER_LIMIT_BYTES and not ended:
                self.pause(True)
        elif self._parts:
            self._waits_since_s = self._loop.time()
            if not self._sink(self._take_parts()):
                self._sink = self._chunk_sink = None
                self._wake()

    def _take_parts(self) -> bytes:
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _wait(self) -> None:
        """Wait until something new has come; raise the error that ended the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        if self._reading:
            self._waits_since_s = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._waits_since_s = _NEVER_S
        if self._error is not None and not self._parts and self._phase != _END:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: ConnectionLost) -> None:
        self._error = self._error or error
        self._waits_since_s = _NEVER_S
        self._wake()


Judge = Callable[[int, bytes, Mapping[str, Any]], errors.GatewayError]
"""Returns the error for a status and a body, given the fields of the request."""


async def refusal(
    response: UpstreamConnection, timeout_s: float, judge: Judge, fields: Mapping[str, Any]
) -> errors.GatewayError:
    """Read a refusal by a worker and return the error for it, as its kind of engine judges."""
    if response.status in _BUSY:
        return errors.WorkerBusy(retry_after_s=retry_after_s(response.retry_after, time.time()))
    try:
        response.set_read_timeout(timeout_s)
        body = await response.read(_ERROR_LIMIT_BYTES)
    except ConnectionLost:
        log.warning("worker.failed status=%d", response.status)
        return errors.WorkerFailed()
    return judge(response.status, body, fields)


def retry_after_s(value: str | None, now_s: float) -> float:
    """Read a Retry-After, in seconds or as a date, within bounds; an invalid one is the least.

    `now_s` is in seconds since 1970.
    """
    low, high = RETRY_AFTER_RANGE_S
    try:
        if value is None or value.isdecimal():
            seconds = float(value[:9]) if value else low
        else:
            at = parsedate_to_datetime(value)
            seconds = at.replace(tzinfo=at.tzinfo or UTC).timestamp() - now_s
    except (ValueError, OverflowError):
        return low
    return min(max(seconds, low), high)


@functools.lru_cache(maxsize=1024)
def _parse_url(url: str, server_name: str) -> tuple[_Address, str]:
    """Return the address of a URL, and the first two lines of a head."""
    parts = urlsplit(url)
    tls, host = parts.scheme == "https", parts.hostname or ""
    port = parts.port or (443 if tls else 80)
    shown = f"[{host}]" if ":" in host else host
    return (host, port, tls, server_name), f"POST {parts.path} HTTP/1.1\r\nhost: {shown}:{port}"


def _encode_head(begin: str, headers: Mapping[str, str], body_bytes: int) -> bytes:
    """Encode a head; a header that would end its line early is a defect of the gateway."""
    lines = [begin, *[f"{name}: {value}" for name, value in headers.items()]]
    lines.append(f"content-length: {body_bytes}\r\n\r\n")
    head = "\r\n".join(lines)
    if head.count("\n") != len(headers) + 4:
        raise ValueError("a header holds the end of a line")
    return head.encode("latin-1")


def _set_keepalive(connected: socket.socket) -> None:
    """Let the system detect that the other machine is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, seconds)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # Linux alone
        connected.setsockopt(socket.IPPROTO_TCP, option, _UNACKNOWLEDGED_MS)
