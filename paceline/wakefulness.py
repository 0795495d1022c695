"""Keep a Mac awake while requests run: macOS counts no request, and sleeps in the middle of one.

The tests use a scripted `caffeinate`: this has not been tested on a Mac. Nothing holds off a sleep
that a person or a closed lid starts. It sends no signal; only IOKit (`IORegisterForSystemPower`)
announces it, which this module does not ask. After the wake, a heartbeat joins within ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable

log = logging.getLogger(__name__)
CHECK_S = 1.0
LINGER_S = 60.0
"""A Mac that nobody touches would sleep soon after a request, between two steps of an agent."""


@contextlib.asynccontextmanager
async def awake_while(running: Callable[[], int]) -> AsyncIterator[None]:
    """Hold off the idle sleep of a Mac, not that of its display, while there are requests."""
    watch = asyncio.create_task(_watch(running)) if platform.system() == "Darwin" else None
    try:
        yield
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.wait((watch,))


async def _watch(running: Callable[[], int]) -> None:
    """Run one `caffeinate` in each busy period, until cancelled."""
    # It ends with this process, however this process ends.
    command = ("caffeinate", "-i", "-w", str(os.getpid()))
    while True:
        await asyncio.sleep(CHECK_S)
        if not running():
            continue
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=DEVNULL)
        except OSError as error:
            log.warning("sleep.allowed: caffeinate cannot run: %s", error.strerror)
            return
        try:
            idle_s = 0.0
            while idle_s < LINGER_S and process.returncode is None:
                await asyncio.sleep(CHECK_S)
                idle_s = 0.0 if running() else idle_s + CHECK_S
        finally:
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                process.terminate()
            await process.wait()
