"""A clock that a test sets."""

from __future__ import annotations

START_S = 1_000_000.0
"""Far from zero, so that a sign or an operand that is wrong shows."""


class FakeClock:
    """Returns the same time until a test sets another."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        """Move the clock forward."""
        self.now_s += by_s
