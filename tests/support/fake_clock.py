"""A clock that stands still until a test sets it."""

from __future__ import annotations


class FakeClock:
    """Begins at nothing, and tells the second that it was last set to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
