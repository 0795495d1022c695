"""What keys have used, by day: counted in memory, kept under one name for each day and life.

A life of a gateway only ever replaces records of its own. So gateways never count over each other,
and a write that is made twice counts once. Days that are over are folded into one record, which
names the lives that are in it: one that was folded and is still there counts once, too.
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
# Nobody writes to a day any more that ended so many days ago.
_OPEN_DAYS = 2


class UsageRow(NamedTuple):
    """What one key used, for one team, in one day."""

    key: str
    team: str
    requests: int
    """Those that a worker began."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt tokens."""
    guessed_tokens: int
    """Charged without that a worker told of them: mostly for clients that left early."""

    @property
    def tokens(self) -> int:
        """All that counts against a budget."""
        return self.prompt_tokens + self.completion_tokens + self.guessed_tokens


class _DayRecord(BaseModel):
    """The rows of one life in one day, or of all those named."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: tuple[UsageRow, ...]
    lives: tuple[str, ...] = ()


class UsageLedger:
    """What this life of the gateway has counted."""

    def __init__(self, life: str) -> None:
        self._life = life
        self._days: dict[int, dict[tuple[str, str], list[int]]] = {}
        self._unkept: set[int] = set()
        self._before: dict[tuple[str, int], int] = {}
        """Tokens by key and day."""

    def load_today(self, texts: Mapping[str, str], unix_s: float) -> None:
        """Take over what was used on this day before this life began: no restart is a new one."""
        today = day_of(unix_s)
        rows = sum_by(rows_by_day(texts).get(today, ()), "key")
        self._before = {(key, today): row.tokens for key, row in rows.items()}

    def tokens_used(self, key: str, unix_s: float) -> int:
        """Tell the tokens that a key has used on the day of this moment, as far as is known."""
        day = day_of(unix_s)
        counts = [one for (name, _), one in self._days.get(day, {}).items() if name == key]
        mine = sum(prompt + completion + guessed for _, prompt, completion, _, guessed in counts)
        return mine + self._before.get((key, day), 0)

    def add(self, caller: Caller, usage: Usage, cost: Spent, unix_s: float) -> None:
        """Enter one request that has ended at this moment."""
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
        self._unkept.add(day)

    def unsaved_days(self) -> tuple[int, ...]:
        """List the days of which something is not kept yet, oldest first."""
        return tuple(sorted(self._unkept))

    def save(self, day: int) -> tuple[str, str]:
        """Write down a day, under its name; it counts as saved until `mark_unsaved`."""
        self._unkept.discard(day)
        return self._name(day), self._text(day)

    def mark_unsaved(self, day: int) -> None:
        """Hear that a day could not be kept."""
        self._unkept.add(day)

    def drop_saved_days(self, unix_s: float) -> None:
        """Drop days that are over and kept."""
        today = day_of(unix_s)
        self._days = {
            day: rows
            for day, rows in self._days.items()
            if day > today - _OPEN_DAYS or day in self._unkept
        }

    def records(self) -> dict[str, str]:
        """Write down all that is in memory, by name."""
        return {self._name(day): self._text(day) for day in self._days}

    def _name(self, day: int) -> str:
        return f"{date_of(day)}/{self._life}"

    def _text(self, day: int) -> str:
        rows = tuple(UsageRow(*place, *counts) for place, counts in self._days[day].items())
        return _DayRecord(rows=rows).model_dump_json()


def rows_by_day(texts: Mapping[str, str]) -> dict[int, tuple[UsageRow, ...]]:
    """Add up, by day, what the records of all lives tell; what cannot be read counts nothing."""
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
    """Say what to keep in place of days that are over, and then which records to remove."""
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
    """Add up rows that share this field, `key` or `team`."""
    sums: dict[str, UsageRow] = {}
    for row in rows:
        shared = getattr(row, name)
        sums[shared] = _added(sums.get(shared), row)
    return sums


def date_of(day: int) -> date:
    """Name a day by its date."""
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
    counts = (mine + more for mine, more in zip(sum_so_far[2:], row[2:], strict=True))
    return UsageRow(row.key, row.team, *counts)
