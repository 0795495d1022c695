"""The client's side of one request: its body, its presence, the reply to it."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Self

from gateway.errors import BodyTooLarge, BodyTooSlow, GatewayError, to_body, to_event, to_headers
from gateway.exchange import EXCHANGE, Exchange
from gateway.types import Header, Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


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
    given = header(scope, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
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


class Presence:
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


class Reply:
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
