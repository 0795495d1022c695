"""The usage of keys by day: counted in memory, stored under one name for each day and process.

A gateway process only ever replaces its own records. So gateways never overwrite each other, and a
repeated write counts once. The records of a past day are folded into one, which lists the processes
that it includes: a record that was folded and still exists does not count again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.auth.rate_limits import DAY_S, day_of
from gateway.types import Caller, Spent, Usage

RETENTION_DAYS = 93
_FOLDED = "folded"
# No gateway writes to a day that ended so many days ago.
_OPEN_DAYS = 2


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

    @property
    def tokens(self) -> int:
        """Return all tokens that count against a budget."""
        return self.prompt_tokens + self.completion_tokens + self.guessed_tokens


class _DayRecord(BaseModel):
    """The rows of one day, of one process or of all that are listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: tuple[UsageRow, ...]
    lives: tuple[str, ...] = ()


class UsageLedger:
    """The usage counted by this process."""

    def __init__(self, life: str) -> None:
        self._life = life
        self._days: dict[int, dict[tuple[str, str], list[int]]] = {}
        self._unsaved: set[int] = set()
        self._before: dict[tuple[str, int], int] = {}
        """Tokens by key and day, of earlier and other processes."""

    def load_today(self, texts: Mapping[str, str], unix_s: float) -> None:
        """Load the usage of this day from the records, so that a restart resets no budget."""
        today = day_of(unix_s)
        rows = sum_by(rows_by_day(texts).get(today, ()), "key")
        self._before = {(key, today): row.tokens for key, row in rows.items()}

    def tokens_used(self, key: str, unix_s: float) -> int:
        """Return the tokens that a key has used on the day of this time."""
        day = day_of(unix_s)
        counts = [one for (name, _), one in self._days.get(day, {}).items() if name == key]
        own = sum(prompt + completion + guessed for _, prompt, completion, _, guessed in counts)
        return own + self._before.get((key, day), 0)

    def add(self, caller: Caller, usage: Usage, cost: Spent, unix_s: float) -> None:
        """Add one request that ended at this time."""
        day = day_of(unix_s)
        rows = self._days.get(day)
        if rows is None:
            rows = self._days[day] = {}
        counts = rows.get((caller.key, caller.team))
        if counts is None:
            counts = rows[caller.key, caller.team] = [0, 0, 0, 0, 0]
        counts[0] += cost.requests
        counts[1] += usage.prompt_tokens
        counts[2] += usage.completion_tokens
        counts[3] += usage.cached_tokens
        counts[4] += cost.guessed_tokens
        self._unsaved.add(day)

    def unsaved_days(self) -> tuple[int, ...]:
        """Return the days with unsaved usage, oldest first."""
        return tuple(sorted(self._unsaved))

    def save(self, day: int) -> tuple[str, str]:
        """Return the name and text of a day; it counts as saved until `mark_unsaved`."""
        self._unsaved.discard(day)
        return self._name(day), self._text(day)

    def mark_unsaved(self, day: int) -> None:
        """Mark a day whose record could not be stored."""
        self._unsaved.add(day)

    def drop_saved_days(self, unix_s: float) -> None:
        """Drop past days that are saved."""
        today = day_of(unix_s)
        self._days = {
            day: rows
            for day, rows in self._days.items()
            if day > today - _OPEN_DAYS or day in self._unsaved
        }

    def records(self) -> dict[str, str]:
        """Return the records of all days in memory, by name."""
        return {self._name(day): self._text(day) for day in self._days}

    def _name(self, day: int) -> str:
        return f"{date_of(day)}/{self._life}"

    def _text(self, day: int) -> str:
        rows = tuple(UsageRow(*place, *counts) for place, counts in self._days[day].items())
        return _DayRecord(rows=rows).model_dump_json()


def rows_by_day(texts: Mapping[str, str]) -> dict[int, tuple[UsageRow, ...]]:
    """Return the sums of all records by day; unreadable records are skipped."""
    read = _read(texts)
    folded = {(day, life) for (day, _), record in read.items() for life in record.lives}
    sums: dict[int, dict[tuple[str, str], UsageRow]] = {}
    for (day, life), record in sorted(read.items()):
        if (day, life) not in folded:
            rows = sums.setdefault(day, {})
            for row in record.rows:
                rows[row.key, row.team] = _added(rows.get((row.key, row.team)), row)
    return {day: tuple(rows.values()) for day, rows in sums.items()}


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
        elif day <= today - _OPEN_DAYS and parts:
            earlier = read[day, _FOLDED].lives if _FOLDED in lives else ()
            record = _DayRecord(rows=rows, lives=tuple(sorted({*earlier, *parts})))
            kept[f"{date_of(day)}/{_FOLDED}"] = record.model_dump_json()
            over += [f"{date_of(day)}/{life}" for life in parts]
    return kept, tuple(over)


def sum_by(rows: Iterable[UsageRow], name: str) -> dict[str, UsageRow]:
    """Return sums of rows by their field `key` or `team`."""
    sums: dict[str, UsageRow] = {}
    for row in rows:
        shared = getattr(row, name)
        sums[shared] = _added(sums.get(shared), row)
    return sums


def date_of(day: int) -> date:
    """Return the date of a day."""
    return (datetime.fromtimestamp(0, UTC) + timedelta(seconds=day * DAY_S)).date()


def _read(texts: Mapping[str, str]) -> dict[tuple[int, str], _DayRecord]:
    read = {}
    for name, text in texts.items():
        day, _, life = name.partition("/")
        try:
            number = (date.fromisoformat(day) - date_of(0)).days
            read[number, life] = _DayRecord.model_validate_json(text)
        except (ValueError, ValidationError):
            continue
    return read


def _added(sum_so_far: UsageRow | None, row: UsageRow) -> UsageRow:
    if sum_so_far is None:
        return row
    counts = (total + more for total, more in zip(sum_so_far[2:], row[2:], strict=True))
    return UsageRow(row.key, row.team, *counts)
