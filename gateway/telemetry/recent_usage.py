"""Who uses most: the requests, tokens and waits of each key in the last minute and hour.

A request adds to the counts of this moment. Every ten seconds these become a step; six steps are a
minute, and sixty minutes are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from operator import add

from typing_extensions import TypedDict

_STEPS_A_MINUTE = 6
_MINUTES = 60
# Keys beyond them count together, those with the fewest requests.
_KEYS_LIMIT = 256
OTHER_KEYS = "other"
_UNUSED = [0, 0, 0.0]
Counts = dict[str, list[float]]


class RecentUse(TypedDict):
    """What one key has used within a time."""

    requests: int
    tokens: int
    waited_s: float
    """Of all its requests together, in queues of this gateway."""


class RecentUsage:
    """The recent usage of all keys at this gateway."""

    def __init__(self) -> None:
        self._now: Counts = {}
        self._steps = deque[Counts](maxlen=_STEPS_A_MINUTE)
        self._minutes = deque[Counts](maxlen=_MINUTES)
        self._turns = 0

    def add(self, key: str, tokens: int, waited_s: float) -> None:
        """Count a request that has ended."""
        counts = self._now.get(key) or self._now.setdefault(key, [0, 0, 0.0])
        counts[0] += 1
        counts[1] += tokens
        counts[2] += waited_s

    async def turn(self) -> None:
        """Begin a step, every ten seconds."""
        self._steps.append(_sum([self._now]))
        self._now = {}
        self._turns += 1
        if self._turns % _STEPS_A_MINUTE == 0:
            self._minutes.append(_sum(self._steps))

    def last_minute(self) -> Mapping[str, RecentUse]:
        """Return the usage of the last minute by key; up to ten seconds more."""
        return _shown([*self._steps, self._now])

    def last_hour(self) -> Mapping[str, RecentUse]:
        """Return the usage of the last hour by key; up to a minute more."""
        begun = self._turns % _STEPS_A_MINUTE
        return _shown([*self._minutes, *(list(self._steps)[-begun:] if begun else ()), self._now])


def _sum(parts: Iterable[Counts]) -> Counts:
    """Add up counts by key, for a bounded number of keys."""
    sums: Counts = {}
    for part in parts:
        for key, counts in part.items():
            sums[key] = [*map(add, sums.get(key, _UNUSED), counts)]
    for key in sorted(sums, key=lambda key: sums[key][0])[:-_KEYS_LIMIT]:
        counts = sums.pop(key)
        sums[OTHER_KEYS] = [*map(add, sums.get(OTHER_KEYS, _UNUSED), counts)]
    return sums


def _shown(parts: Iterable[Counts]) -> Mapping[str, RecentUse]:
    return {key: used(*counts) for key, counts in _sum(parts).items()}


def used(requests: float = 0, tokens: float = 0, waited_s: float = 0.0) -> RecentUse:
    """Return what a key has used; without arguments nothing."""
    return {"requests": int(requests), "tokens": int(tokens), "waited_s": round(waited_s, 3)}
