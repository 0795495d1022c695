"""The stored usage of keys: written every few seconds, compacted by day."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.auth.rate_limits import day_of
from gateway.auth.usage import UsageLedger, UsageRow, compacted, rows_by_day
from gateway.storage.records import Records

USAGE_KIND = "usage"
"""The kind of its records."""


class UsageStore:
    """The stored usage of all keys; a crash loses the seconds since the last `flush`."""

    def __init__(self, records: Records, ledger: UsageLedger, wall: Callable[[], float]) -> None:
        self._records = records
        self._ledger = ledger
        self._wall = wall
        self._tidied_on = -1

    async def usage(self) -> Mapping[int, tuple[UsageRow, ...]]:
        """Tell what all keys have used, by day, up to this moment."""
        kept = await self._records.all(USAGE_KIND)
        return rows_by_day({**kept, **self._ledger.records()})

    async def flush(self) -> None:
        """Store the usage since the last flush."""
        for day in self._ledger.unsaved_days():
            name, text = self._ledger.save(day)
            try:
                await self._records.replace(USAGE_KIND, name, text)
            except BaseException:
                self._ledger.mark_unsaved(day)
                raise
        now_unix_s = self._wall()
        self._ledger.drop_saved_days(now_unix_s)
        # Each time, also with nothing to tidy: a store that was away is found to be well again.
        records = await self._records.all(USAGE_KIND)
        if self._tidied_on != (today := day_of(now_unix_s)) and self._records.is_current(
            USAGE_KIND
        ):
            await self._tidy(records, today)
            self._tidied_on = today

    async def _tidy(self, records: Mapping[str, str], today: int) -> None:
        """Keep one record for each day that is over, and none of days long ago."""
        kept, over = compacted(records, today)
        for name, text in kept.items():
            await self._records.replace(USAGE_KIND, name, text)
        for name in over:
            await self._records.remove(USAGE_KIND, name)
