"""One connection to a worker: a POST goes out, its answer comes in.

The HTTP is parsed by httptools, as on the client's side. A general client would bring redirects,
cookies, compression and pools for the whole internet, and cost more than all else that a request
needs here; a relay asks known machines one kind of question.

HTTP to the workers: one request sent, its answer's head back, and what a refusal means.

How long somebody has waited for something new, and the alarm for who has waited too long.

A worker's answer as it comes in, for whoever relays it.
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
from functools import cache
from types import TracebackType
from typing import NamedTuple, Self, cast
from urllib.parse import urlsplit

import httptools
import httpx
from pydantic_core import from_json

from gateway.errors import (
    GatewayError,
    Overloaded,
    RefusedByWorker,
    WorkerBusy,
    WorkerFailed,
    WorkerLost,
    WorkerSilent,
    WorkerUnreachable,
)


class Silence:
    """Calls `on_silence` once nothing was heard for longer than the limit, while somebody listens.

    Streams are heard from all the time, so what is heard only notes the time. One alarm serves
    waits and limits; it rings early rather than be set anew, looks at the clock, and goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_silence: Callable[[], None]) -> None:
        self._loop = loop
        self._on_silence = on_silence
        self._limit_s = 0.0
        self._since_s = 0.0
        self._listening = False
        self._alarm: asyncio.TimerHandle | None = None

    def limit(self, seconds: float) -> None:
        """Bound each silence from here on."""
        self._limit_s = seconds
        self._since_s = self._loop.time()
        self._set_alarm()

    def listen(self) -> None:
        """Count from here on, also where it was counted already: something was heard."""
        self._listening = True
        self._since_s = self._loop.time()
        if self._alarm is None:
            self._set_alarm()

    def stop_listening(self) -> None:
        """Count no more: nobody wants to hear anything now."""
        self._listening = False

    def end(self) -> None:
        """Never call again."""
        self._listening = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self) -> None:
        due_s = self._since_s + self._limit_s
        if self._alarm is not None:
            if self._alarm.when() <= due_s:
                return
            self._alarm.cancel()
        self._alarm = self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if not self._listening:
            return  # who listens again sets it again
        if self._loop.time() >= self._since_s + self._limit_s:
            self._on_silence()
        else:
            self._set_alarm()


Sink = Callable[[bytes], bool]
"""Takes what came, there and then; says whether more is wanted."""
Through = Callable[[bytes], bool]
"""Takes one HTTP chunk as it came, frame and all; says whether it did."""


class ConnectionLost(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""

    def __init__(self, why: str, errno: int | None = None) -> None:
        super().__init__(why)
        self.errno = errno


class ReadTimeout(ConnectionLost):
    """Nothing came for as long as the asker was ready to wait."""


class UpstreamResponse:
    """An answer as it comes in. Whoever got it closes it."""

    def __init__(self, link: UpstreamConnection) -> None:
        self._link = link
        self.status = 0
        self.retry_after: str | None = None

    async def chunk(self) -> bytes:
        """Return what came since the last call, at least a byte; nothing at the end.

        Raise `ConnectionLost` where the end is missing, after all that came before it.
        """
        return await self._link.take()

    async def pour(self, sink: Sink, through: Through | None = None) -> bytes:
        """Hand each piece to a sink in the turn of the loop in which it comes, up to the end.

        What comes as one whole chunk is offered to `through` first. Return what came with the end
        itself. Raise `ConnectionLost` where the end is missing.
        """
        return await self._link.pour(sink, through)

    def pause(self, paused: bool) -> None:
        """Make the worker wait for as long as what it sends cannot be passed on."""
        self._link.pause(paused)

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """Return the whole rest, or what came up to about a limit."""
        parts = []
        size = 0
        while (limit_bytes is None or size < limit_bytes) and (part := await self.chunk()):
            parts.append(part)
            size += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def limit_silence(self, seconds: float) -> None:
        """Bound each wait for something new from here on."""
        self._link.limit_silence(seconds)

    def close(self) -> None:
        """Free the connection: for the next request if this answer ended, else for good."""
        self._link.release()


HEAD_LIMIT_BYTES = 64 * 1024
# What may wait here for a client that reads slowly, before the worker is made to wait.
_HELD_LIMIT_BYTES = 64 * 1024
_CONTINUE, _SWITCHING, _OK = 100, 101, 200


def _beginnings(limit_bytes: int) -> list[tuple[bytes, ...]]:
    """List how a chunk of so many bytes in all begins: with its size, in small or large letters."""
    found: list[tuple[bytes, ...]] = [()] * limit_bytes  # () begins nothing
    for size in range(1, limit_bytes):
        begin = b"%x\r\n" % size
        if (whole := len(begin) + size + 2) < limit_bytes:
            found[whole] = (begin,) if begin == begin.upper() else (begin, begin.upper())
    return found


# The parser reads what is longer; the words of a stream are not.
_BEGINNINGS = _beginnings(4096)


class UpstreamConnection(asyncio.Protocol):
    """A connection that carries one request at a time. `on_free` is called when it may be kept."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_free: Callable[[UpstreamConnection], None]
    ) -> None:
        self._loop = loop
        self._on_free = on_free
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._error: ConnectionLost | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._through: Through | None = None
        self._silence = Silence(loop, lambda: self._fail(ReadTimeout("nothing came in time")))
        self._busy = False
        self._begin_answer()
        self.used = False
        """It has carried a request before."""
        self.heard: bool
        """Something came since the last request was sent."""

    def _begin_answer(self) -> None:
        self._answer = UpstreamResponse(self)
        self._parts: list[bytes] = []
        self._head_bytes = 0
        self._headed = self._framed = self._complete = self._kept_alive = self._paused = False
        self._in_chunk = True
        self._between_chunks = False
        self.heard = False

    @property
    def open(self) -> bool:
        """Say whether it can carry a request."""
        return self._error is None and not self._busy

    async def ask(self, request: bytes, body: bytes, silence_s: float) -> UpstreamResponse:
        """Send a request and return its answer once the head is there; raise `ConnectionLost`."""
        self._begin_answer()
        self._busy = True
        self._silence.limit(silence_s)
        self._transport.writelines((request, body))
        while not self._headed:
            await self._more()
        return self._answer

    async def take(self) -> bytes:
        """Return the bytes of the answer's body that came, when there are some, or it ended."""
        while not self._parts and not self._complete:
            await self._more()
        self.pause(False)
        return self._gathered()

    async def pour(self, sink: Sink, through: Through | None) -> bytes:
        """Hand what comes to a sink, and return what came with the end."""
        self._sink, self._through = sink, through
        try:
            self.pause(False)
            self._deliver()
            while self._sink is not None and not self._complete:
                await self._more()
        finally:
            self._sink = self._through = None
        return self._gathered()

    def pause(self, paused: bool) -> None:
        """Read nothing for a while, or go on; what is not read is no silence."""
        if paused is self._paused or self._error is not None:
            return
        self._paused = paused
        if paused:
            self._silence.stop_listening()
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
            if self._waiter is not None:
                self._silence.listen()

    def limit_silence(self, seconds: float) -> None:
        """Bound each wait."""
        self._silence.limit(seconds)

    def release(self) -> None:
        """Keep the connection if its answer came to an end that allows it, else close it."""
        self._busy = False
        unsent = self._transport.get_write_buffer_size()
        if self._complete and self._kept_alive and self._error is None and not unsent:
            self.pause(False)  # the end may have come with more than its reader could take
            self.used = True
            self._on_free(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._fail(ConnectionLost("closed here"))
        self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        """Parse, and hand on what came."""
        if not self._busy:
            self.abort()  # nobody asked
            return
        # Nearly every word of a stream comes so. The parser would be behind such a chunk as it was
        # before it, so it need not see it.
        through = self._through
        if (
            through is not None
            and self._between_chunks
            and (size := len(data)) < len(_BEGINNINGS)
            and data.startswith(_BEGINNINGS[size])
            and data.endswith(b"\r\n")
        ):
            self._silence.listen()  # before it: it may press, and then nobody listens
            if through(data):
                return
        self.heard = True
        if not self._headed:
            self._head_bytes += len(data)
        wrong = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            wrong = f"no HTTP: {error!r:.200}"
        self._between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if not self._headed and self._head_bytes > HEAD_LIMIT_BYTES:
            wrong = "the head of the answer is too long"
        self._deliver()
        if wrong is not None:
            self._fail(ConnectionLost(wrong))
            self._transport.abort()

    def eof_received(self) -> None:
        """Let the transport close: a worker that has ended its side has nothing more to say."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer: well only where its end is the connection's."""
        if self._busy and self._headed and not self._framed and exc is None:
            self._complete = True  # HTTP/1.0: the end of the connection ends the answer
        why = f"the connection broke: {exc!r}" if exc else "the worker closed the connection"
        self._fail(ConnectionLost(why, exc.errno if isinstance(exc, OSError) else None))

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Let nothing follow an answer: it would be taken for that of the next request."""
        if self._complete:
            raise ConnectionLost("more came than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the few headers that matter here; none is passed on."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"retry-after":
            self._answer.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Let the asker have the answer, unless it is still to come."""
        self._answer.status = self._parser.get_status_code()
        if self._answer.status >= _OK:
            self._headed = True
            self._kept_alive = self._parser.should_keep_alive()
        elif self._answer.status == _SWITCHING:
            raise ConnectionLost("the worker wants another protocol")

    def on_chunk_header(self) -> None:
        """Note that the next bytes are a chunk's, or what follows the last one."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """Note that the next bytes are the size of a chunk."""
        self._in_chunk = False

    def on_body(self, body: bytes) -> None:
        """Hold a part of the body until all that came with it is parsed."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        self._complete = self._headed
        self._in_chunk = True
        self._framed &= self._headed  # "100 Continue" and its like: the answer is still to come

    def _deliver(self) -> None:
        """Hand what came to the sink, else wake who waits; let the worker wait for who does not.

        What came with the end is for who waits too: with it there is an answer to be ended.
        """
        if self._sink is None or self._complete:
            self._wake()
            if sum(map(len, self._parts)) > _HELD_LIMIT_BYTES and not self._complete:
                self.pause(True)
        elif self._parts:
            self._silence.listen()
            if not self._sink(self._gathered()):
                self._sink = self._through = None
                self._wake()

    def _gathered(self) -> bytes:
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _more(self) -> None:
        """Wait until something new came; raise what ended the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        if not self._paused:
            self._silence.listen()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._silence.stop_listening()
        if self._error is not None and not self._parts and not self._complete:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: ConnectionLost) -> None:
        self._error = self._error or error
        self._silence.end()
        self._wake()


log = logging.getLogger(__name__)

# Shorter than uvicorn's 5 s for idle connections: we never write into one that is closing.
_IDLE_CONNECTION_S = 3.0

# A connection that the worker was closing when we wrote breaks at once. What breaks later may have
# been read, and then the request may have begun.
_STALE_WITHIN_S = 0.25
_REFUSALS = frozenset((400, 413, 422))
_BUSY = frozenset((429, 503))
_OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))
_ERROR_LIMIT_BYTES = 64 * 1024
_RETRY_AFTER_RANGE_S = (1.0, 60.0)

# A machine that fell asleep says nothing, not even goodbye; where the system can be asked to find
# that out, it takes half a minute and not the whole time that an answer may take.
_PROBING = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNACKNOWLEDGED_MS = 30_000


class StaleConnection(WorkerLost):
    """An idle connection broke as we wrote into it, before any byte of an answer."""


class ConnectionPool:
    """Kept connections to all workers. An async context: it holds them."""

    def __init__(self, connect_timeout_s: float, answer_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._idle: defaultdict[_Place, deque[tuple[float, UpstreamConnection]]] = defaultdict(
            deque
        )
        self._tidying: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_idle_since(self._loop.time())

    async def send(
        self,
        url: str,
        body: bytes,
        headers: dict[str, str],
        on_begin: Callable[[], None],
        *,
        fresh: bool = False,
    ) -> UpstreamResponse:
        """Send a request and return its answer once the head is there; raise a `WorkerError`.

        `on_begin` is called when there is a connection, and before anything goes out on it.
        Whoever gets the answer closes it: early, that ends the connection, and so frees the
        worker's row. `fresh` takes a connection that nobody used before; a `StaleConnection` says
        that this is worth an attempt.
        """
        place, path = _place(url)
        link = None if fresh else self._kept(place)
        if link is None:
            link = await self._connected(place)
        began_s = self._loop.time()
        on_begin()
        answered = False
        try:
            answer = await link.ask(
                _head(path, place, headers, len(body)), body, self._answer_timeout_s
            )
            answered = True
            return answer
        except ReadTimeout as error:
            raise WorkerSilent from error
        except ConnectionLost as error:
            log.warning("attempt.lost url=%s error=%r", url, error)
            unheard = link.used and not link.heard
            stale = unheard and _never_read(error, self._loop.time() - began_s)
            raise (StaleConnection if stale else WorkerLost) from error
        finally:
            if not answered:
                link.abort()

    async def _connected(self, place: _Place) -> UpstreamConnection:
        """Open a connection; raise `WorkerUnreachable`."""

        def keep(link: UpstreamConnection) -> None:
            self._idle[place].append((self._loop.time(), link))
            if self._tidying is None:
                self._tidying = self._loop.call_later(_IDLE_CONNECTION_S, self._tidy)

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, link = await self._loop.create_connection(
                    lambda: UpstreamConnection(self._loop, keep),
                    place.host,
                    place.port,
                    ssl=certificate_authorities() if place.tls else None,
                )
        except OSError as error:  # a timeout is one
            if error.errno in _OUT_OF_FILES:
                raise Overloaded from error  # ours, and no fault of the worker
            log.warning("attempt.unreachable place=%s error=%r", place, error)
            raise WorkerUnreachable from error
        _probe(transport.get_extra_info("socket"))
        return link

    def _kept(self, place: _Place) -> UpstreamConnection | None:
        """Take the connection that was used last, if one is open and not idle for too long."""
        idle = self._idle.get(place)
        while idle:
            since_s, link = idle.pop()
            if link.open and self._loop.time() - since_s < _IDLE_CONNECTION_S:
                return link
            link.abort()
        return None

    def _tidy(self) -> None:
        """Close what was idle for too long, and look again while something is left."""
        self._close_idle_since(self._loop.time() - _IDLE_CONNECTION_S)
        self._tidying = None
        if any(self._idle.values()):
            self._tidying = self._loop.call_later(_IDLE_CONNECTION_S, self._tidy)

    def _close_idle_since(self, latest_s: float) -> None:
        for place, idle in tuple(self._idle.items()):
            while idle and idle[0][0] <= latest_s:
                idle.popleft()[1].abort()
            if not idle:
                del self._idle[place]  # a worker may have another port in its next life


async def refusal(answer: UpstreamResponse, timeout_s: float) -> GatewayError:
    """Read what a worker's refusal means for us."""
    if answer.status in _BUSY:
        return WorkerBusy(retry_after_s(answer.retry_after, time.time()))
    if answer.status not in _REFUSALS:
        log.warning("worker.failed status=%d", answer.status)
        return WorkerFailed()
    try:
        answer.limit_silence(timeout_s)
        told = from_json(await answer.read(_ERROR_LIMIT_BYTES))["error"]
        param, code = told.get("param"), told.get("code")
        return RefusedByWorker(
            answer.status,
            str(told["message"]),
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, ConnectionLost):
        return WorkerFailed()  # not in OpenAI's shape, so not meant for a client


def retry_after_s(value: str | None, now_s: float) -> float:
    """Read a Retry-After in seconds or as a date, within reason; nonsense counts as the least.

    `now_s` is the time of the day, since the epoch.
    """
    low, high = _RETRY_AFTER_RANGE_S
    if value is None:
        return low
    if value.isdecimal():
        return min(max(float(value[:9]), low), high)
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return low
    return min(max(at.replace(tzinfo=at.tzinfo or UTC).timestamp() - now_s, low), high)


class _Place(NamedTuple):
    """Where a worker listens."""

    host: str
    port: int
    tls: bool


@functools.lru_cache(maxsize=1024)
def _place(url: str) -> tuple[_Place, str]:
    """Part a URL into where it leads and what is asked there."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return _Place(parts.hostname or "", parts.port or (443 if tls else 80), tls), parts.path


def _head(path: str, place: _Place, headers: Mapping[str, str], body_bytes: int) -> bytes:
    """Write the head of a request; what would break out of its line is a fault of ours."""
    host = f"[{place.host}]" if ":" in place.host else place.host
    lines = [f"POST {path} HTTP/1.1", f"host: {host}:{place.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append(f"content-length: {body_bytes}\r\n\r\n")
    head = "\r\n".join(lines)
    if head.count("\n") != len(headers) + 4:
        raise ValueError("a header holds the end of a line")
    return head.encode("latin-1")


def _never_read(error: ConnectionLost, elapsed_s: float) -> bool:
    """Say whether the worker cannot have read the request from a connection that broke so."""
    # Timed out: nothing of it was ever acknowledged.
    return error.errno == errno.ETIMEDOUT or elapsed_s < _STALE_WITHIN_S


def _probe(opened: socket.socket) -> None:
    """Let the system find out when the other machine is gone."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _PROBING.items():
        if (option := getattr(socket, name, None)) is not None:
            opened.setsockopt(socket.IPPROTO_TCP, option, seconds)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # Linux alone
        opened.setsockopt(socket.IPPROTO_TCP, option, _UNACKNOWLEDGED_MS)


@cache
def certificate_authorities() -> ssl.SSLContext:
    """Return whom to believe about a server's name, read once: each reading takes 40 ms."""
    context = httpx.create_ssl_context()
    context.load_default_certs()  # the system's own too: a company's authority is known there alone
    return context
