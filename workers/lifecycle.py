"""Start and shutdown of an HTTP server, alike in gateways and workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import uvicorn


class Shutdown:
    """A shutdown in two steps: requested (running requests finish first), then forced."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self.lame_duck = False
        """New requests are served for some seconds more, until load balancers have noticed."""

    def request(self, *, lame_duck: bool = False) -> None:
        """Request the shutdown; a second request forces it."""
        if self.requested.is_set():
            self.forced.set()
        else:
            self.lame_duck = lame_duck
        self.requested.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM request the shutdown within the context.

        The system that also runs the load balancers sends SIGTERM; a person's Ctrl-C has none.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.request)
        loop.add_signal_handler(signal.SIGTERM, functools.partial(self.request, lame_duck=True))
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers; `serving` is the task that runs it."""

    serving: asyncio.Task[None]

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listening = asyncio.Event()

    @contextlib.asynccontextmanager
    async def on(self, listener: socket.socket) -> AsyncIterator[None]:
        """Accept connections within the context; the listener listens already."""
        self.serving = asyncio.create_task(self.serve(sockets=[listener]), name="server")
        try:
            await first_of(self.serving, self._listening.wait())
            if self.serving.done():
                self.serving.result()
            yield
        finally:
            self.should_exit = True
            await self.serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report that connections are accepted."""
        await super().startup(sockets)
        self._listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Shutdown`: uvicorn would close the listener at once."""
        yield


async def first_of(
    *awaited: asyncio.Task[Any] | Coroutine[object, object, object],
    timeout_s: float | None = None,
) -> None:
    """Wait for the first one, or for the timeout; cancel the coroutines, not the tasks."""
    waits = [
        wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in awaited
    ]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, given in zip(waits, awaited, strict=True):
            if wait is not given:
                wait.cancel()
