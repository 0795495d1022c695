"""The retry budget: enough requests read again at once for a fault, too few for a retry storm."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from policies.sections import Retries


class RetryBudget:
    """Counts active requests, and retries that have no response yet."""

    def __init__(self) -> None:
        self.active = 0
        self.retrying = 0
        self.delayed = 0
        """Retries that have waited because the budget was spent, since the start."""
        self._ended = asyncio.Event()
        """Set when the next retry has ended."""

    def allows(self, retries: Retries) -> bool:
        """Return whether requests may retry at all."""
        return self._most(retries) > 0

    async def begin(self, retries: Retries) -> ExitStack:
        """Wait until one more request may retry, and count it until the result is closed.

        None is dropped for the budget: the deadline of the request bounds the wait.
        """
        self.delayed += self.retrying >= self._most(retries)
        while self.retrying >= self._most(retries):
            await self._ended.wait()
        self.retrying += 1
        turn = ExitStack()
        turn.callback(self._end)
        return turn

    def _end(self) -> None:
        """Stop counting a retry, and let waiting ones check again."""
        self.retrying -= 1
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()

    def _most(self, retries: Retries) -> int:
        return max(retries.at_least, int(retries.share * self.active))
