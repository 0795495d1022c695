"""What happens beside requests: keys and cordons are read again, and what was used is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

from gateway.cordons import Cordons
from gateway.errors import RecordsUnwritable, StartRefused
from gateway.keys.book import KeyBook
from gateway.keys.budgets import day_of
from gateway.keys.usage import Ledger, UsageRow, fold, tidied
from gateway.records import Records

log = logging.getLogger(__name__)

_KIND = "usage"
# A key that another gateway revoked must stop within two seconds.
_LOOK_S = 1.0
_LOOKS_A_FLUSH = 5


class Keeping:
    """The context in which keys stay fresh and usage is kept; a crash loses some seconds of it."""

    def __init__(
        self,
        records: Records,
        book: KeyBook,
        cordons: Cordons,
        ledger: Ledger,
        wall: Callable[[], float],
    ) -> None:
        self._records = records
        self._book = book
        self._cordons = cordons
        self._ledger = ledger
        self._wall = wall
        self._tidied_on = -1
        self._troubled = False

    async def open(self) -> None:
        """Read what is kept, before the first request; raise `StartRefused`."""
        try:
            self._ledger.remember(await self._records.all(_KIND), self._wall())
            await self._book.open()
            await self._cordons.open()
        except RecordsUnwritable:
            raise StartRefused("What is kept of keys and their usage cannot be read.") from None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._go_on(), name="keys")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))
        await self._safely(self._flush)

    async def usage(self) -> Mapping[int, tuple[UsageRow, ...]]:
        """Tell what all keys have used, by day, up to this moment."""
        kept = await self._records.all(_KIND)
        return fold({**kept, **self._ledger.records()})

    async def _go_on(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            looks += 1
            await self._safely(self._book.refresh)
            await self._safely(self._cordons.refresh)
            if looks % _LOOKS_A_FLUSH == 0:
                await self._safely(self._flush)

    async def _flush(self) -> None:
        """Keep what was used since the last time."""
        for day in self._ledger.unkept():
            name, text = self._ledger.record(day)
            try:
                await self._records.replace(_KIND, name, text)
            except BaseException:
                self._ledger.lost(day)
                raise
        now_unix_s = self._wall()
        self._ledger.forget(now_unix_s)
        if self._tidied_on != (today := day_of(now_unix_s)):
            await self._tidy(today)
            self._tidied_on = today

    async def _tidy(self, today: int) -> None:
        """Keep one record for each day that is over, and none of days long ago."""
        kept, over = tidied(await self._records.all(_KIND), today)
        for name, text in kept.items():
            await self._records.replace(_KIND, name, text)
        for name in over:
            await self._records.remove(_KIND, name)

    async def _safely(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do this; what goes wrong is told once and tried again with the next turn."""
        try:
            await work()
            self._troubled = False
        except RecordsUnwritable:
            if not self._troubled:
                log.warning("records.unwritable keys and usage are kept in memory alone")
            self._troubled = True
        except Exception:
            log.exception("keys.broken")
