"""The last requests that ended in an error, of all gateways, in memory.

They answer "what went wrong, for whom and where" without a log. None holds text of a prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_ERRORS = 100
MAX_TEXT_CHARS = 300
_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


class ErrorRecord(BaseModel):
    """One request that ended in an error."""

    model_config = ConfigDict(frozen=True)

    unix_s: Annotated[float, Field(ge=0, le=1e11)]
    request_id: _Text
    key: _Text
    """The id of the API key; empty without one."""
    model: _Text
    """Empty if the request was rejected before its model was known."""
    worker_id: _Text
    """The worker that had the request last; empty if none had it."""
    status: Annotated[int, Field(ge=100, le=599)]
    code: _Text
    reason: _Text
    """A sentence without text of the request."""


class RecentErrors:
    """The last errors, at most `MAX_ERRORS`.

    A new one replaces the oldest of those with the most frequent key and code, so that a client
    that repeats a request hides neither a crash nor the errors of another key.
    """

    def __init__(self) -> None:
        self._records: list[ErrorRecord] = []
        self._pending: deque[ErrorRecord] = deque(maxlen=MAX_ERRORS)

    def add(self, record: ErrorRecord) -> None:
        """Add an error of this gateway."""
        self._pending.append(record)
        self.merge(record)

    def merge(self, record: ErrorRecord) -> None:
        """Add an error of another gateway."""
        self._records.append(record)
        if len(self._records) > MAX_ERRORS:
            counts = Counter((one.key, one.code) for one in self._records)
            ((key, code), _), *_ = counts.most_common(1)
            alike = [one for one in self._records if (one.key, one.code) == (key, code)]
            self._records.remove(min(alike, key=lambda one: one.unix_s))

    def take_pending(self) -> list[ErrorRecord]:
        """Return the last errors of this gateway since the last call, for other gateways."""
        pending = list(self._pending)
        self._pending.clear()
        return pending

    def newest_first(self) -> list[ErrorRecord]:
        """Return all errors."""
        return sorted(self._records, key=lambda one: one.unix_s)[::-1]
