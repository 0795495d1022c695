"""The retry budget: enough retries at once for a fault, too few for a retry storm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from policies.sections import Retries


class RetryBudget:
    """Counts active requests, and those that are retrying and have no response yet."""

    def __init__(self) -> None:
        self.active = 0
        self.retrying = 0
        self.denied = 0
        """Retries that the budget did not allow, since the start."""

    def allows(self, retries: Retries) -> bool:
        """Return whether one more request may retry; count it if not."""
        allowed = self.retrying < max(retries.at_least, int(retries.share * self.active))
        self.denied += not allowed
        return allowed

    @contextlib.contextmanager
    def retry(self) -> Iterator[None]:
        """Count a retry until its response begins; after that no request retries."""
        self.retrying += 1
        try:
            yield
        finally:
            self.retrying -= 1
