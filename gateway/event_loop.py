"""The event loop of a process that serves or measures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


def run(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine on uvloop if it is installed."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415  # absent on some platforms
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
