"""The shutdown and the heap of a process that serves, alike in gateways and workers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

TRIM_INTERVAL_S = 10.0
"""Trimming takes 2 ms, and as long again to get the pages back that are used again."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class Shutdown:
    """A shutdown in two steps: requested (running requests finish first), then forced."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self.lame_duck = False
        """New requests are served for some seconds more, until load balancers have noticed."""
        self.restart = False
        """The process begins again afterwards."""

    def request(self, *, lame_duck: bool = False, restart: bool = False) -> None:
        """Request the shutdown; a second request forces it."""
        self.restart = restart
        if self.requested.is_set():
            self.forced.set()
        else:
            self.lame_duck = lame_duck
        self.requested.set()

    @contextlib.contextmanager
    def on_signals(self, *, restarts: bool = False) -> Iterator[None]:
        """Let SIGINT and SIGTERM, and SIGUSR2 for a restart, request it within the context.

        The system that also runs the load balancers sends SIGTERM; a person's Ctrl-C does not.
        """
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, *((signal.SIGUSR2,) if restarts else ()))
        for number in numbers:
            meaning = {"lame_duck": number == signal.SIGTERM, "restart": number == signal.SIGUSR2}
            loop.add_signal_handler(number, functools.partial(self.request, **meaning))
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


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


def trim_heap() -> None:
    """Return the freed heap of this process to the system; takes some milliseconds.

    An allocator keeps freed memory between blocks in use, and the footprint counts it: after a text
    of a million characters a tokenizer leaves 130 MB behind on Linux.
    """
    system = ctypes.CDLL(None)
    if sys.platform == "darwin":
        system.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
    elif hasattr(system, "malloc_trim"):  # glibc has it, musl has not
        # A freed block of 32 MB would raise both thresholds for good: each thread then keeps up to
        # 64 MB at the end of its heap, which only a freeing thread gives back, never this call.
        system.mallopt(_MMAP_THRESHOLD, 1024 * 1024)
        system.mallopt(_TRIM_THRESHOLD, 128 * 1024)
        system.malloc_trim(ctypes.c_size_t(0))
