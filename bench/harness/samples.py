"""Measured values of every repetition, by the name of the metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass
class Samples:
    """Values of one contender; `failures` contains the reason for each missing metric."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *values: float) -> None:
        """Add one or more values of a metric."""
        self.figures.setdefault(name, []).extend(values)

    def median(self, name: str) -> float | None:
        """Return the median, or None without values."""
        values = self.figures.get(name)
        return median(values) if values else None

    def percentile(self, name: str, share: float) -> float | None:
        """Return the smallest value that at least this share of all values does not exceed."""
        values = self.figures.get(name)
        return nearest_rank(values, share) if values else None


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the percentile that is one of the values."""
    ordered = sorted(values)
    rank = max(-(-len(ordered) * share // 1), 1)  # ceiling
    return ordered[min(int(rank), len(ordered)) - 1]
