"""Who uses most: the requests, tokens and waits of each key in the last minute and hour."""

from __future__ import annotations

from collections import Counter, deque

_STEPS_A_MINUTE = 6
_MINUTES = 60
Counts = Counter[tuple[str, str]]
"""`requests`, `tokens` and `waited_ms` in queues, by key and by these names."""


class RecentUsage:
    """Counts of this moment, of the steps of ten seconds before it, and of minutes."""

    def __init__(self) -> None:
        self.current: Counts = Counter()
        """Accounting adds finished requests; keys are the ones that admins have created."""
        self._steps = deque[Counts](maxlen=_STEPS_A_MINUTE)
        self._minutes = deque[Counts](maxlen=_MINUTES)
        self._turns = 0

    async def turn(self) -> None:
        """Begin a step, every ten seconds."""
        self._steps.append(self.current)
        self.current = Counter()
        self._turns += 1
        if self._turns % _STEPS_A_MINUTE == 0:
            self._minutes.append(sum(self._steps, Counts()))

    def last_minute(self) -> Counts:
        """Return the counts of the last minute; up to ten seconds more."""
        return sum(self._steps, +self.current)

    def last_hour(self) -> Counts:
        """Return the counts of the last hour; up to a minute more."""
        begun = self._turns % _STEPS_A_MINUTE
        return sum((*self._minutes, *list(self._steps)[len(self._steps) - begun :]), +self.current)
