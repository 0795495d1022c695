"""Measured values of every repetition, by the name of the metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

Item = TypeVar("Item")


@dataclass
class Samples:
    """Values of one contender; `failures` contains the reason for each missing metric."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *values: float) -> None:
        self.figures.setdefault(name, []).extend(values)

    def median(self, name: str) -> float | None:
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


def rotated(items: Sequence[Item], number: int) -> tuple[Item, ...]:
    """Return items in another order for each repetition: a busy machine slows all of them alike."""
    first = number % len(items)
    return (*items[first:], *items[:first])
