"""How many requests may be on a further attempt at once: enough for a fault, not for a storm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from policies.sections import Retries


class RetryBudget:
    """Counts active requests, and those among them that are on a further attempt without answer."""

    def __init__(self) -> None:
        self.active = 0
        self.retrying = 0
        self.denied = 0
        """Retries that were not made since the start."""

    def allows(self, retries: Retries) -> bool:
        """Say whether one more request may be tried again; a refusal is counted."""
        allowed = self.retrying < max(retries.at_least, int(retries.share * self.active))
        self.denied += not allowed
        return allowed

    @contextlib.contextmanager
    def retry(self) -> Iterator[None]:
        """Count a further attempt until its answer begins: from then on nothing is tried again."""
        self.retrying += 1
        try:
            yield
        finally:
            self.retrying -= 1
