"""Who uses most: the requests, tokens and waits of each key in the last minute and hour."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

_STEPS_A_MINUTE = 6
_MINUTES = 60
Counts = Counter[tuple[str, str]]
"""Requests, tokens and seconds in queues, by key and by one of these names."""


class RecentUsage:
    """Counts of this moment, of the steps of ten seconds before it, and of minutes."""

    def __init__(self) -> None:
        self._now: Counts = Counter()
        self._steps = deque[Counts](maxlen=_STEPS_A_MINUTE)
        self._minutes = deque[Counts](maxlen=_MINUTES)
        self._turns = 0

    def add(self, key: str, tokens: int, waited_s: float) -> None:
        """Count a request that has ended; keys are those that admins have created."""
        counts = self._now
        counts[key, "requests"] += 1
        counts[key, "tokens"] += tokens
        if waited_s:
            counts[key, "waited_ms"] += round(1000 * waited_s)

    async def turn(self) -> None:
        """Begin a step, every ten seconds."""
        self._steps.append(self._now)
        self._now = Counter()
        self._turns += 1
        if self._turns % _STEPS_A_MINUTE == 0:
            self._minutes.append(_sum(self._steps))

    def last_minute(self) -> Counts:
        """Return the counts of the last minute; up to ten seconds more."""
        return _sum([*self._steps, self._now])

    def last_hour(self) -> Counts:
        """Return the counts of the last hour; up to a minute more."""
        begun = self._turns % _STEPS_A_MINUTE
        return _sum([*self._minutes, *list(self._steps)[len(self._steps) - begun :], self._now])


def _sum(parts: Iterable[Counts]) -> Counts:
    counts: Counts = Counter()
    for part in parts:
        counts.update(part)
    return counts
