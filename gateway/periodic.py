"""Jobs that run periodically beside the requests, and the clock of policy schedules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from gateway.errors import RecordsUnwritable

log = logging.getLogger(__name__)
Work = Callable[[], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class Job:
    """Work that is repeated; the period begins when the previous run has ended.

    A failure is logged once until a later run succeeds.
    """

    work: Work
    period_s: float
    name: str = ""
    at_start: bool = False
    """The first run does not wait for a period."""
    silent_errors: tuple[type[Exception], ...] = ()
    """Errors that another component reports."""
    failing: bool = False

    def __post_init__(self) -> None:
        self.name = self.name or self.work.__qualname__

    async def run(self) -> None:
        """Run once; log an error instead of raising it."""
        try:
            await self.work()
            self.failing = False
        except self.silent_errors:
            pass
        except Exception as error:
            if not self.failing:
                self.failing = True
                if isinstance(error, RecordsUnwritable):
                    log.warning("records.unwritable job=%s", self.name)
                else:
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
