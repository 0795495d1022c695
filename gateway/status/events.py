"""`/v1/status/events`: the status as server-sent events, rendered once a second for all viewers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from pydantic import BaseModel
from starlette.types import Scope

from gateway.errors import GatewayError, ShuttingDown, TooManyViewers
from gateway.http.downstream import (
    CancelScope,
    ClientDisconnected,
    ResponseWriter,
    response_writer,
)

log = logging.getLogger(__name__)

VIEWERS_LIMIT = 64
PERIOD_S = 1.0
_TIMER_TOLERANCE_S = 0.005  # no timer fires earlier than this before its time
_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
_END = b"event: end\ndata: {}\n\n"


class StatusFeed:
    """Streams the status to viewers; `render` is called only while there are viewers."""

    def __init__(self, render: Callable[[], Awaitable[BaseModel]]) -> None:
        self._render = render
        self._rendering = asyncio.Lock()
        self._second = -1
        self._event = b""
        self._closing = asyncio.Event()
        self.viewers = 0

    def close(self) -> None:
        """End every stream with an `end` event, and reject new viewers."""
        self._closing.set()

    async def stream_to(self, scope: Scope, authorize: Callable[[], Awaitable[None]]) -> None:
        """Send events to one viewer until it leaves, `authorize` raises, or the feed is closed."""
        if self._closing.is_set():
            raise ShuttingDown
        if self.viewers >= VIEWERS_LIMIT:
            raise TooManyViewers
        writer = response_writer(scope)
        self.viewers += 1
        try:
            with CancelScope(writer):
                await self._send_events(writer, authorize)
        except ClientDisconnected:
            pass
        except GatewayError as error:
            await writer.fail(error)
        except Exception:  # whatever a defect of ours raises: the feed ends with an error
            log.exception("status_feed.failed")
            await writer.fail(GatewayError())
        finally:
            self.viewers -= 1

    async def _send_events(
        self, writer: ResponseWriter, authorize: Callable[[], Awaitable[None]]
    ) -> None:
        paused = False

        def set_paused(value: bool) -> None:
            nonlocal paused
            paused = value

        await writer.open(_HEADERS, set_paused)
        while not self._closing.is_set():
            await authorize()  # the key may have been revoked since
            event = await self._current_event()
            if not paused:  # a slow viewer misses events, so nothing accumulates
                writer.write(event)
            await self._next_second()
        writer.end(_END)

    async def _current_event(self) -> bytes:
        """Return the event of this second; the first caller renders it for all."""
        async with self._rendering:
            second = int(_now_s() / PERIOD_S)
            if self._second != second:
                status = (await self._render()).model_dump_json()
                self._second, self._event = second, f"data: {status}\n\n".encode()
            return self._event

    async def _next_second(self) -> None:
        """Wait for the next second, or until the feed is closed."""
        left_s = PERIOD_S - _now_s() % PERIOD_S + _TIMER_TOLERANCE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):  # `wait_for` may swallow the viewer's disconnect
                await self._closing.wait()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
