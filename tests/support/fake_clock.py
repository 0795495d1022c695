"""Clocks that a test sets or moves."""

from __future__ import annotations

import time

START_S = 1_000_000.0
"""Far from zero, so that a wrong sign or operand changes a result."""


class FakeClock:
    """A clock that returns the same time until a test changes it."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        """Move the clock forward."""
        self.now_s += by_s


class MovedClock:
    """A clock that runs, and that a test moves forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def advance(self, by_s: float) -> None:
        """Move the clock forward."""
        self._ahead_s += by_s
