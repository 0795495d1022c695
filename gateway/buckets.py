"""How durations spread: counts in buckets from ten microseconds to a quarter of an hour.

The bounds are Renard's ten to a decade. Each is about a quarter above the last, so a percentile is
right to about an eighth; and 1, 2.5 and 5 are among them, which is what Prometheus is shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_STEPS = ("1", "1.25", "1.6", "2", "2.5", "3.15", "4", "5", "6.3", "8")
BOUNDS_S = tuple(float(f"{step}e{ten}") for ten in range(-5, 3) for step in _STEPS)
"""Each bucket holds what is at most its bound; one more holds all that is above the last."""
Counts = tuple[int, ...]
_ROUNDING = 1e-6
NONE: Counts = (0,) * (len(BOUNDS_S) + 1)


class Buckets:
    """Counts durations: two additions for each."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = list(NONE)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


def percentile(counts: Sequence[int], share: float) -> float:
    """Find what this share of the durations took at most; 0 where there is none."""
    rank = share * sum(counts) - _ROUNDING
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = BOUNDS_S[index - 1] if index else 0.0
            high = BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return 0.0


def cumulative(counts: Sequence[int], bounds_s: Sequence[float]) -> list[tuple[str, int]]:
    """List how many took at most each of these bounds of ours, as Prometheus does."""
    told = []
    below, start = 0, 0
    for bound in bounds_s:
        end = bisect_left(BOUNDS_S, bound) + 1
        below += sum(counts[start:end])
        start = end
        told.append((str(bound), below))
    return [*told, ("+Inf", below + sum(counts[start:]))]
