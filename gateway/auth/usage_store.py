"""The usage of keys: counted in memory, stored every few seconds, compacted by day."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from gateway.auth.rate_limits import day_of
from gateway.auth.usage import (
    OPEN_DAYS,
    DayRecord,
    UsageRow,
    compacted,
    date_of,
    rows_by_day,
    sum_by,
)
from gateway.state.records import Records
from gateway.types import UNUSED, Caller, Spent, Usage

_KIND = "usage"


class UsageStore:
    """The usage of all keys; a crash loses the seconds since the last `flush`.

    `wall` returns seconds since 1970. `life` identifies this process.
    """

    def __init__(self, records: Records, wall: Callable[[], float], life: str) -> None:
        self._records = records
        self._wall = wall
        self._life = life
        self._days: defaultdict[int, defaultdict[tuple[str, str], list[int]]] = defaultdict(
            lambda: defaultdict(lambda: [0, 0, 0, 0, 0, 0])
        )
        """The usage in this process by day, and by key and team."""
        self._unsaved: set[int] = set()
        self._before: dict[tuple[str, int], int] = {}
        """Tokens by key and day, of earlier and other processes."""
        self._compacted_on = -1

    async def open(self) -> None:
        """Load the usage of this day, so that a restart resets no budget."""
        today = day_of(self._wall())
        days = rows_by_day(await self._records.all(_KIND))
        rows = sum_by(days.get(today, ()), "key")
        self._before = {(key, today): row.tokens for key, row in rows.items()}

    def tokens_used(self, key: str, unix_s: float) -> int:
        """Return the tokens that a key has used on the day of this time."""
        day = day_of(unix_s)
        own = sum(row.tokens for row in self._rows(day) if row.key == key)
        return own + self._before.get((key, day), 0)

    def add(self, caller: Caller, usage: Usage, cost: Spent, unix_s: float) -> None:
        """Add one request that ended at this time."""
        day = day_of(unix_s)
        counts = self._days[day][caller.key, caller.team]
        counts[0] += cost.requests
        counts[1] += usage.prompt_tokens
        counts[2] += usage.completion_tokens
        counts[3] += usage.cached_tokens
        counts[4] += cost.guessed_tokens
        counts[5] += usage is UNUSED or not usage.cached_known
        self._unsaved.add(day)

    async def usage(self) -> Mapping[int, tuple[UsageRow, ...]]:
        """Return the usage of all keys by day, up to this moment."""
        stored = await self._records.all(_KIND)
        return rows_by_day({**stored, **self.records()})

    async def flush(self) -> None:
        """Store the usage since the last flush."""
        for day in sorted(self._unsaved):
            self._unsaved.discard(day)  # first: a request may end during the write
            try:
                await self._records.replace(_KIND, self._name(day), self._text(day))
            except BaseException:
                self._unsaved.add(day)
                raise
        today = day_of(self._wall())
        for day in self._days.keys() - self._unsaved:
            if day <= today - OPEN_DAYS:
                del self._days[day]
        # Each time, also with nothing to compact: the records may be readable again.
        records = await self._records.all(_KIND)
        if self._compacted_on != today and self._records.is_current(_KIND):
            # One record for each past day, and none for days long ago.
            kept, over = compacted(records, today)
            for name, text in kept.items():
                await self._records.replace(_KIND, name, text)
            for name in over:
                await self._records.remove(_KIND, name)
            self._compacted_on = today

    def records(self) -> dict[str, str]:
        """Return the records of all days in memory, by name."""
        return {self._name(day): self._text(day) for day in self._days}

    def _name(self, day: int) -> str:
        return f"{date_of(day)}/{self._life}"

    def _text(self, day: int) -> str:
        return DayRecord(rows=self._rows(day)).model_dump_json()

    def _rows(self, day: int) -> tuple[UsageRow, ...]:
        counts = self._days[day].items() if day in self._days else ()
        return tuple(UsageRow(*place, *amounts) for place, amounts in counts)
