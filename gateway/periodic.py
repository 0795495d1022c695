"""Work beside requests that is done again and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

from gateway.errors import RecordsUnwritable

log = logging.getLogger(__name__)
Work = Callable[[], Awaitable[None]]


class PeriodicTasks:
    """The context in which works take turns, each every so many seconds and none behind another.

    What goes wrong is told once, until a turn of the same work goes well, and tried again with the
    next turn; faults of the kinds `untold` are told elsewhere.
    """

    def __init__(
        self, works: Iterable[tuple[Work, float]], untold: tuple[type[Exception], ...] = ()
    ) -> None:
        self._works = tuple(works)
        self._untold = untold
        self._failing: set[str] = set()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._go_on(work, every_s), name=f"turns {work.__qualname__}")
            for work, every_s in self._works
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, work: Work) -> None:
        """Do this now; raise nothing of what goes wrong with it."""
        part = work.__qualname__
        try:
            await work()
            self._failing.discard(part)
        except self._untold:
            pass
        except Exception as fault:
            if part not in self._failing:
                self._failing.add(part)
                if isinstance(fault, RecordsUnwritable):
                    log.warning("records.unwritable part=%s", part)
                else:
                    log.exception("turns.broken part=%s", part)

    async def _go_on(self, work: Work, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.take(work)


class WeekClock:
    """Tells the minute of the week in local time, from Monday 00:00; worked out once a minute.

    `now` gives seconds since 1970.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._minute = -1
        self._of_week = 0

    def minute(self) -> int:
        """Tell the minute of the week that it is now."""
        minute = int(self._now() // 60)
        if minute != self._minute:
            local = time.localtime(minute * 60)
            self._of_week = (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min
            self._minute = minute
        return self._of_week
