"""HTTP to the workers: one request sent, its answer's head back, and what a refusal means."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import socket
import time
from contextvars import ContextVar
from datetime import UTC
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import aiohttp
from pydantic_core import from_json
from yarl import URL

from gateway.errors import (
    GatewayError,
    RefusedByWorker,
    WorkerBusy,
    WorkerFailed,
    WorkerLost,
    WorkerSilent,
    WorkerUnreachable,
)
from gateway.settings import Settings

log = logging.getLogger(__name__)

# Shorter than uvicorn's 5 s for idle connections: we never write into one that is closing.
_IDLE_CONNECTION_S = 3.0
# A connection that the worker was closing when we wrote breaks at once. What breaks later may have
# been read, and then the request may have begun.
_STALE_WITHIN_S = 0.25
_REFUSALS = frozenset((400, 413, 422))
_BUSY = frozenset((429, 503))
_ERROR_LIMIT_BYTES = 64 * 1024
_ONE_PIECE_BYTES = 256 * 1024
_RETRY_AFTER_RANGE_S = (1.0, 60.0)
# A machine that fell asleep says nothing, not even goodbye; where the system can be asked to find
# that out, it takes half a minute and not the whole time that an answer may take.
_PROBING = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNACKNOWLEDGED_MS = 30_000

_connection_used: ContextVar[bool] = ContextVar("connection_used", default=False)


class StaleConnection(WorkerLost):
    """An idle connection broke as we wrote into it, before any byte of an answer."""


class Connections:
    """Kept connections to all workers. An async context: it holds them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kept: aiohttp.ClientSession
        self._single: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        kept = _Connector(
            limit=0, keepalive_timeout=_IDLE_CONNECTION_S, socket_factory=_open_socket
        )
        self._kept = self._session(kept)
        self._single = self._session(
            aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_open_socket)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._kept.close()
        await self._single.close()

    async def send(
        self, url: str, body: bytes, headers: dict[str, str], *, fresh: bool = False
    ) -> aiohttp.ClientResponse:
        """Send a request and return its answer once the head is there; raise a `WorkerError`.

        Whoever gets the answer closes it: early, that ends the connection, and so frees the
        worker's row. `fresh` takes a connection that nobody used before; a `StaleConnection` says
        that this is worth an attempt.
        """
        session = self._single if fresh else self._kept
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.answer_timeout_s):
                # A redirect would carry the token to wherever a worker points.
                return await session.post(
                    URL(url, encoded=True),
                    data=_in_pieces(body),
                    headers=headers,
                    allow_redirects=False,
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            log.warning("attempt.unreachable url=%s error=%s", url, _told(error))
            raise WorkerUnreachable from error
        except TimeoutError as error:
            raise WorkerSilent from error
        except (aiohttp.ClientError, OSError) as error:
            log.warning("attempt.lost url=%s error=%s", url, _told(error))
            elapsed_s = time.monotonic() - began_s
            stale = not fresh and _connection_used.get() and _never_read(error, elapsed_s)
            raise (StaleConnection if stale else WorkerLost) from error

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._settings.connect_timeout_s
            ),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )


async def refusal(answer: aiohttp.ClientResponse, timeout_s: float) -> GatewayError:
    """Read what a worker's refusal means for us."""
    if answer.status in _BUSY:
        return WorkerBusy(retry_after_s(answer.headers.get("retry-after"), time.time()))
    if answer.status not in _REFUSALS:
        log.warning("worker.failed status=%d", answer.status)
        return WorkerFailed()
    try:
        async with asyncio.timeout(timeout_s):
            told = from_json(await answer.content.read(_ERROR_LIMIT_BYTES))["error"]
        param, code = told.get("param"), told.get("code")
        return RefusedByWorker(
            answer.status,
            str(told["message"]),
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, TimeoutError):
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


class _Connector(aiohttp.TCPConnector):
    """Tells the one who asks for a connection whether it was used before."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._seen: WeakSet[object] = WeakSet()

    async def connect(self, *given: Any, **named: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*given, **named)
        used = connection.protocol in self._seen
        if not used:
            self._seen.add(connection.protocol)
        _connection_used.set(used)
        return connection


def _told(error: Exception) -> str:
    """Describe an error for the log; the `repr` of some shows the request with its join token."""
    return f"{type(error).__name__}: {error}"


def _never_read(error: Exception, elapsed_s: float) -> bool:
    """Say whether the worker cannot have read the request from a connection that broke so."""
    if isinstance(error, aiohttp.ClientResponseError):
        return False  # it answered, if only nonsense
    if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
        return True  # nothing of it was ever acknowledged
    return elapsed_s < _STALE_WITHIN_S


def _in_pieces(body: bytes) -> bytes | io.BytesIO:
    """Let a large body be sent piece by piece: in one piece it would hold up all other streams."""
    return body if len(body) < _ONE_PIECE_BYTES else io.BytesIO(body)


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    """Open a socket that notices when the other machine is gone."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _PROBING.items():
        if (option := getattr(socket, name, None)) is not None:
            opened.setsockopt(socket.IPPROTO_TCP, option, seconds)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # Linux alone
        opened.setsockopt(socket.IPPROTO_TCP, option, _UNACKNOWLEDGED_MS)
    return opened
