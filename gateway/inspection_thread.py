"""The thread that inspects large bodies, so that the event loop goes on.

CPython runs the thread and the event loop by turns (`server.py` sets how long one is), so one body
that is inspected delays other requests by little, and several would delay them by more: the thread
inspects one at a time. `gateway.strict_json` keeps the calls short that nothing interrupts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, Self, TypeVar
from weakref import WeakValueDictionary

from gateway.memory_budget import MemoryHold
from gateway.strict_json import footprint_bytes
from gateway.types import RawBody

_SMALL_BYTES = 16 * 1024
_LARGE_BYTES = 512 * 1024
_LARGE_CONTAINERS, _LARGE_VALUES = 1000, 10_000
"""Objects and lists, and other values, that take a few milliseconds."""
_REFERENCES = (b"previous_response_id", b"conversation", b"item_reference")
"""Only a body with one of these continues a stored response, which may be large."""

P = ParamSpec("P")
T = TypeVar("T")


class Turn(NamedTuple):
    """The inspection of one body, here or in a thread."""

    hold: MemoryHold
    """Has the bytes of the body, and of all that is made of it."""
    thread: InspectionThread
    size_bytes: int = 0
    """Of the body with the items that it continues, as far as they decide the place."""

    def grown(self, size_bytes: int) -> Turn:
        """Return the turn of a body that has this size with the items that it continues."""
        return self._replace(size_bytes=max(self.size_bytes, size_bytes))

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function; return its result."""
        if self.size_bytes <= _LARGE_BYTES:
            return work(*args, **kwargs)
        return await self.thread.run(self.size_bytes, work, *args, **kwargs)


class InspectionThread:
    """The turns of large bodies: one at a time, and those of a client after each other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspection")
        self._clients: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, hold: MemoryHold, raw: RawBody) -> AsyncIterator[Turn]:
        """Yield the turn of a body, once its hold has room for the parsed form.

        Raise `BodyNotJson` for one that would take long to parse.
        """
        if not is_large(raw):
            hold.add(footprint_bytes(raw, bounded=True))
            yield Turn(hold, self)
            return
        async with self._clients.setdefault(hold.client, asyncio.Lock()):
            hold.add(await self.run(len(raw), footprint_bytes, raw, bounded=True))
            yield Turn(hold, self, sys.maxsize)

    async def run(
        self, size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function whose time grows with a number of bytes; return its result."""
        if size_bytes <= _LARGE_BYTES:
            return work(*args, **kwargs)
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread after its current task."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def is_large(raw: RawBody) -> bool:
    """Return whether a body, with the response that it continues, may take long to inspect."""
    size = len(raw)
    if size > _LARGE_BYTES:
        return True
    if size > _SMALL_BYTES:
        containers = raw.count(b"{") + raw.count(b"[")
        if containers > _LARGE_CONTAINERS or raw.count(b",") > _LARGE_VALUES:
            return True
    return any([name in raw for name in _REFERENCES])  # noqa: C419  # a generator is slower
