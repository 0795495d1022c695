"""The MTP head of a lane, and whether it is still trusted.

A head that raises costs the rows that it drafted for their drafts and nothing else: the target
needs no head to go on. One that goes on raising is given up until the worker starts again.
"""

from __future__ import annotations

import logging

from policies.request.profile import Bypass
from workers.engine.metrics import LaneCounters
from workers.engine.model import MtpHead
from workers.engine.row import Row

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_ERRORS = 3
"""So many without a sound round between them are no accident."""


class DraftHead:
    """Hands out the head while it may be used; what it found is in the lane's counters."""

    def __init__(self, head: MtpHead | None, counters: LaneCounters) -> None:
        self._head = head
        self._counters = counters
        self._consecutive_errors = 0

    @property
    def exists(self) -> bool:
        """Say whether there is a head at all."""
        return self._head is not None

    @property
    def usable(self) -> MtpHead | None:
        """Return the head unless it is found to be unhealthy."""
        return self._head if self._counters.head_healthy else None

    def for_row(self, row: Row) -> MtpHead | None:
        """Return the head for a row that is drafted for, None for one that is not or no more."""
        if self.usable is None:
            self.disable_for(row)
        return self.usable if row.draft_tokens else None

    def record_success(self) -> None:
        """Note a round that it drafted for without an error."""
        self._consecutive_errors = 0

    def record_error(self, error: Exception) -> None:
        """Note an error; after a few in a row the head is used no more."""
        self._consecutive_errors += 1
        logger.error("head.failed errors_in_a_row=%d", self._consecutive_errors, exc_info=error)
        if self._consecutive_errors == MAX_CONSECUTIVE_ERRORS:
            self._counters.head_healthy = False

    def disable_for(self, row: Row) -> None:
        """Draft no more for a row that was admitted to be drafted for, and count why."""
        if row.draft_tokens:
            row.draft_tokens = 0
            self._counters.record_bypass(row, Bypass.HEAD_UNHEALTHY)
