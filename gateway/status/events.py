"""The state of the line as a stream of events: taken once a second for all who watch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from pydantic import BaseModel

from gateway.errors import GatewayError, ShuttingDown, TooManyViewers
from gateway.http.downstream import (
    CancelScope,
    ClientDisconnected,
    ResponseWriter,
    Scope,
    response_writer,
)

log = logging.getLogger(__name__)

VIEWERS_LIMIT = 64
_PERIOD_S = 1.0
_TIMERS_EARLY_S = 0.005  # by more than this no timer comes before its time
_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
_END = b"event: end\ndata: {}\n\n"


class Feed:
    """Snapshots for viewers; `take` makes one, and is asked only while somebody watches."""

    def __init__(self, take: Callable[[], Awaitable[BaseModel]]) -> None:
        self._take = take
        self._taking = asyncio.Lock()
        self._taken: tuple[int, bytes] = (-1, b"")
        self._ending = asyncio.Event()
        self.viewers = 0

    def end(self) -> None:
        """End every stream, each with an event that says so, and begin no further one."""
        self._ending.set()

    async def show(self, scope: Scope, allowed: Callable[[], Awaitable[None]]) -> None:
        """Write to one viewer until it leaves, `allowed` raises, or all ends."""
        if self._ending.is_set():
            raise ShuttingDown
        if self.viewers >= VIEWERS_LIMIT:
            raise TooManyViewers
        writer = response_writer(scope)
        self.viewers += 1
        try:
            with CancelScope(writer):
                await self._stream(writer, allowed)
        except ClientDisconnected:
            pass
        except GatewayError as refused:
            await writer.fail(refused)
        except Exception:
            log.exception("feed.broken")
            await writer.fail(GatewayError())
        finally:
            self.viewers -= 1

    async def _stream(self, writer: ResponseWriter, allowed: Callable[[], Awaitable[None]]) -> None:
        behind = False

        def set_behind(paused: bool) -> None:
            nonlocal behind
            behind = paused

        await writer.open(_HEADERS, set_behind)
        while not self._ending.is_set():
            await allowed()  # a key that was revoked meanwhile sees no more
            event = await self._event()
            if not behind:  # who reads slowly misses snapshots, and makes nothing pile up
                writer.write(event)
            await self._next_second()
        writer.end(_END)

    async def _event(self) -> bytes:
        """Give the event of this second; the first who asks makes it for all."""
        async with self._taking:
            second = int(_now_s() / _PERIOD_S)
            if self._taken[0] != second:
                told = (await self._take()).model_dump_json()
                self._taken = (second, f"data: {told}\n\n".encode())
            return self._taken[1]

    async def _next_second(self) -> None:
        """Wait for the next second, or for the end."""
        left_s = _PERIOD_S - _now_s() % _PERIOD_S + _TIMERS_EARLY_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):  # `wait_for` may swallow that the viewer leaves
                await self._ending.wait()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
