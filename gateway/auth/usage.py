"""The usage of keys by day, stored under one name for each day and process. Pure.

A gateway process only ever replaces its own records. So gateways never overwrite each other, and a
repeated write counts once. The records of a past day are folded into one, which lists the processes
that it includes: a record that was folded and still exists does not count again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from operator import add, attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

RETENTION_DAYS = 93
_FOLDED = "folded"
# No gateway writes to a day that ended so many days ago.
OPEN_DAYS = 2


class UsageRow(NamedTuple):
    """The usage of one key, for one team, on one day."""

    key: str
    team: str
    requests: int
    """Requests that a worker started."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt tokens."""
    guessed_tokens: int
    """Estimated, because the worker reported no usage: mostly for clients that disconnected."""
    cached_unknown_requests: int = 0
    """Requests whose worker reported no cached tokens; `cached_tokens` excludes them."""

    @property
    def tokens(self) -> int:
        """Return all tokens that count against a budget."""
        return self.prompt_tokens + self.completion_tokens + self.guessed_tokens


class DayRecord(BaseModel):
    """The rows of one day, of one process or of all that are listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: tuple[UsageRow, ...]
    lives: tuple[str, ...] = ()


def rows_by_day(texts: Mapping[str, str]) -> dict[int, tuple[UsageRow, ...]]:
    """Return the sums of all records by day; unreadable records are skipped."""
    read = _read(texts)
    folded = {(day, life) for (day, _), record in read.items() for life in record.lives}
    rows: defaultdict[int, list[UsageRow]] = defaultdict(list)
    for (day, life), record in sorted(read.items()):
        if (day, life) not in folded:
            rows[day] += record.rows
    return {day: tuple(sum_by(one, "key", "team").values()) for day, one in rows.items()}


def compacted(texts: Mapping[str, str], today: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the records to store for past days, and the names of those to remove then."""
    read = _read(texts)
    kept: dict[str, str] = {}
    over: list[str] = []
    for day, rows in rows_by_day(texts).items():
        lives = [life for of_day, life in read if of_day == day]
        parts = [life for life in lives if life != _FOLDED]
        if day <= today - RETENTION_DAYS:
            over += [f"{date_of(day)}/{life}" for life in lives]
        elif day <= today - OPEN_DAYS and parts:
            earlier = read[day, _FOLDED].lives if _FOLDED in lives else ()
            record = DayRecord(rows=rows, lives=tuple(sorted({*earlier, *parts})))
            kept[f"{date_of(day)}/{_FOLDED}"] = record.model_dump_json()
            over += [f"{date_of(day)}/{life}" for life in parts]
    return kept, tuple(over)


def sum_by(rows: Iterable[UsageRow], *names: str) -> dict[Any, UsageRow]:
    """Return sums of rows by their field `key`, by `team`, or by both."""
    sums: dict[Any, UsageRow] = {}
    for row in rows:
        shared = attrgetter(*names)(row)
        before = sums[shared][2:] if shared in sums else (0,) * len(row[2:])
        sums[shared] = UsageRow(row.key, row.team, *map(add, before, row[2:]))
    return sums


def date_of(day: int) -> date:
    """Return the date of a day."""
    return date(1970, 1, 1) + timedelta(days=day)


def _read(texts: Mapping[str, str]) -> dict[tuple[int, str], DayRecord]:
    read = {}
    for name, text in texts.items():
        day, _, life = name.partition("/")
        try:
            number = (date.fromisoformat(day) - date_of(0)).days
            read[number, life] = DayRecord.model_validate_json(text)
        except ValueError:
            continue
    return read
