"""MTP head of an engine, with its health.

An error of the head costs the affected rows their drafts only: the target decodes without a head.
After several consecutive errors the head stays off until the worker restarts.
"""

import logging
from collections.abc import Mapping

from paceline.request.profile import Bypass
from workers.engine.decode.memory_pressure import is_out_of_memory
from workers.engine.decode.metrics import LaneCounters
from workers.engine.decode.row import Row
from workers.engine.model.mtp_head import MtpHead
from workers.engine.types import LaneName

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_ERRORS = 3


class DraftHead:
    """The head of all lanes; its health is stored in their counters."""

    def __init__(self, head: MtpHead | None, counters: Mapping[LaneName, LaneCounters]) -> None:
        self._head = head
        self._counters = counters
        self._consecutive_errors = 0

    @property
    def usable(self) -> MtpHead | None:
        """Return the head, or None if there is none or it is unhealthy."""
        healthy = all(counters.head_healthy for counters in self._counters.values())
        return self._head if healthy else None

    def record_success(self) -> None:
        """Reset the count of consecutive errors."""
        self._consecutive_errors = 0

    def record_error(self, error: Exception) -> None:
        """Count an error; mark the head unhealthy at `MAX_CONSECUTIVE_ERRORS`.

        A failed allocation is not the head's fault.
        """
        if is_out_of_memory(error):
            return
        self._consecutive_errors += 1
        logger.error(
            "mtp_head.failed consecutive_errors=%d", self._consecutive_errors, exc_info=error
        )
        if self._consecutive_errors == MAX_CONSECUTIVE_ERRORS:
            for counters in self._counters.values():
                counters.head_healthy = False

    def disable_for(self, row: Row) -> None:
        """Stop drafting for a row that was admitted as drafting, and count the bypass.

        Prompt lookup continues.
        """
        if row.uses_head:
            row.with_head = False
            if not row.looks_up:
                row.draft_tokens = 0
            self._counters[row.generation.lane].record_bypass(row, Bypass.HEAD_UNHEALTHY)
