"""Clocks that a test sets or moves."""

import time
from collections.abc import Callable

START_S = 1_000_000.0
"""Far from zero, so that a wrong sign or operand changes a result."""


class FakeClock:
    """A clock that returns the same time until a test changes it."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        self.now_s += by_s


class MovedClock:
    """The clock of this machine, which a test moves forward."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved_s = 0.0

    def __call__(self) -> float:
        return self._clock() + self._moved_s

    def advance(self, by_s: float) -> None:
        self._moved_s += by_s
