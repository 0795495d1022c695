"""HTTP to the workers: one request sent, its answer's head back, and what a refusal means."""

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
from typing import NamedTuple, Self
from urllib.parse import urlsplit

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
from gateway.http.upstream import Link
from gateway.worker_answer import Answer, LinkLost, LinkSilent

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


class Connections:
    """Kept connections to all workers. An async context: it holds them."""

    def __init__(self, connect_timeout_s: float, answer_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._idle: defaultdict[_Place, deque[tuple[float, Link]]] = defaultdict(deque)
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
    ) -> Answer:
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
        except LinkSilent as error:
            raise WorkerSilent from error
        except LinkLost as error:
            log.warning("attempt.lost url=%s error=%r", url, error)
            unheard = link.used and not link.heard
            stale = unheard and _never_read(error, self._loop.time() - began_s)
            raise (StaleConnection if stale else WorkerLost) from error
        finally:
            if not answered:
                link.abort()

    async def _connected(self, place: _Place) -> Link:
        """Open a connection; raise `WorkerUnreachable`."""

        def keep(link: Link) -> None:
            self._idle[place].append((self._loop.time(), link))
            if self._tidying is None:
                self._tidying = self._loop.call_later(_IDLE_CONNECTION_S, self._tidy)

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, link = await self._loop.create_connection(
                    lambda: Link(self._loop, keep),
                    place.host,
                    place.port,
                    ssl=authorities() if place.tls else None,
                )
        except OSError as error:  # a timeout is one
            if error.errno in _OUT_OF_FILES:
                raise Overloaded from error  # ours, and no fault of the worker
            log.warning("attempt.unreachable place=%s error=%r", place, error)
            raise WorkerUnreachable from error
        _probe(transport.get_extra_info("socket"))
        return link

    def _kept(self, place: _Place) -> Link | None:
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


async def refusal(answer: Answer, timeout_s: float) -> GatewayError:
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
    except (ValueError, TypeError, KeyError, AttributeError, LinkLost):
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


def _never_read(error: LinkLost, elapsed_s: float) -> bool:
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
def authorities() -> ssl.SSLContext:
    """Return whom to believe about a server's name, read once: each reading takes 40 ms."""
    context = httpx.create_ssl_context()
    context.load_default_certs()  # the system's own too: a company's authority is known there alone
    return context
