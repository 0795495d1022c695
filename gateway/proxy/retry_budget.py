"""The retry budget: enough requests read again at once for a fault, too few for a retry storm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from policies.sections import Retries


class Event(Protocol):
    """An event of the loop, as `asyncio.Event`."""

    def set(self) -> object:
        """Wake all who wait."""

    def wait(self) -> Awaitable[object]:
        """Wait until it is set."""


class RetryBudget:
    """Counts active requests, and those that are retrying and have no response yet."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self.active = 0
        self.retrying = 0
        self.delayed = 0
        """Retries that have waited because the budget was spent, since the start."""
        self._ended: Event | None = None
        """Set when a retry has ended; None while nobody waits."""

    def allows(self, retries: Retries) -> bool:
        """Return whether requests may retry at all."""
        return max(retries.at_least, int(retries.share * self.active)) > 0

    async def begin(self, retries: Retries) -> RetryTurn:
        """Wait until one more request may retry, and count it until its turn ends.

        None is dropped for the budget: the deadline of the request bounds the wait.
        """
        if not self._has_room(retries):
            self.delayed += 1
            while not self._has_room(retries):
                self._ended = self._ended or self._new_event()
                await self._ended.wait()
        self.retrying += 1
        return RetryTurn(self)

    def end(self) -> None:
        """Count a retry no more, and let those that wait look again."""
        self.retrying -= 1
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.set()

    def _has_room(self, retries: Retries) -> bool:
        return self.retrying < max(retries.at_least, int(retries.share * self.active))


class RetryTurn:
    """A retry that counts until its end."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget: RetryBudget | None = budget

    def end(self) -> None:
        """Count the retry no more; do nothing if it has ended."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.end()
