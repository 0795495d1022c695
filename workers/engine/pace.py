"""How fast a lane reads and writes, as it was lately: for gateways, to guess what a request waits.

Pure: durations come in, no clock is read.
"""

from __future__ import annotations

_FADE = 0.8
"""Weight of what was before against one more measurement."""


class Pace:
    """Tokens in a second, over the last few measurements."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: float, duration_s: float) -> None:
        """Learn how long so many tokens took."""
        self._tokens = _FADE * self._tokens + tokens
        self._seconds = _FADE * self._seconds + duration_s

    @property
    def tokens_s(self) -> float:
        """Tell how many a second it were; 0 while nothing was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0
