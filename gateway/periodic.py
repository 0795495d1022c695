"""Jobs that run periodically or for several callers at once, and the clock of policy schedules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.errors import RecordsUnwritable

log = logging.getLogger(__name__)
Work = Callable[[], Awaitable[None]]
Result = TypeVar("Result")
_SHORTEST_PAUSE_S = 0.1


@dataclass(slots=True, kw_only=True)
class Job:
    """Work that is repeated; the period begins when the previous run has ended.

    A failure is logged once until a later run succeeds; the records log their own.
    """

    work: Work
    period_s: float
    at_start: bool = False
    """The first run does not wait for a period."""
    failing: bool = False

    @property
    def name(self) -> str:
        """Return the name in logs."""
        return self.work.__qualname__

    async def run(self) -> None:
        """Run once; log an error instead of raising it."""
        try:
            await self.work()
            self.failing = False
        except RecordsUnwritable:
            pass
        except Exception:  # whatever a job raises: it runs again, and no other job ends
            if not self.failing:
                self.failing = True
                log.exception("job.failed job=%s", self.name)

    async def repeat(self) -> None:
        """Run again and again until cancelled."""
        if self.at_start:
            await self.run()
        while True:
            await asyncio.sleep(self.period_s)
            await self.run()


@contextlib.asynccontextmanager
async def periodic_tasks(jobs: Iterable[Job]) -> AsyncIterator[None]:
    """Run each job in a task of its own within the context, so that none delays another."""
    tasks = [asyncio.create_task(job.repeat(), name=f"job {job.name}") for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SharedRuns(Generic[Result]):
    """Runs work once for all callers; each gets the result of a run that begins after its call.

    One run takes place at a time, and as long as it took, or 0.1 s, passes before the next one.
    """

    def __init__(self, work: Callable[[], Awaitable[Result]]) -> None:
        self._work = work
        self._next: asyncio.Task[Result] | None = None
        self._running = asyncio.Lock()
        self._pause_until_s = float("-inf")

    async def __call__(self) -> Result:
        """Return the result of the next run."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(), name="shared run")
        return await asyncio.shield(self._next)  # a caller that leaves ends no other's wait

    async def _run(self) -> Result:
        loop = asyncio.get_running_loop()
        async with self._running:
            await asyncio.sleep(self._pause_until_s - loop.time())
            self._next = None
            begin_s = loop.time()
            try:
                return await self._work()
            finally:
                now_s = loop.time()
                self._pause_until_s = now_s + max(_SHORTEST_PAUSE_S, now_s - begin_s)


class WeekClock:
    """The minute of the week in local time, from Monday 00:00; computed once a minute."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        """Seconds since 1970."""
        self._minute = -1
        self._of_week = 0

    def minute(self) -> int:
        """Return the present minute of the week."""
        minute = int(self._now() // 60)
        if minute != self._minute:
            local = time.localtime(minute * 60)
            self._of_week = (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min
            self._minute = minute
        return self._of_week
