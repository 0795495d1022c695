"""The last requests that ended in an error, in memory and shared over a Redis stream.

They show errors, their clients and workers without a log, and contain no text of a prompt. An
entry of the stream has the age of its error, so that the clocks of two gateways may differ.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gateway.errors import EndedKeyRefused
from gateway.state.redis import RedisClient
from gateway.state.shared_stream import SharedStream

log = logging.getLogger(__name__)

MAX_ERRORS = 100
MAX_TEXT_CHARS = 300
_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


class ErrorRecord(BaseModel):
    """One request that ended in an error, or the last of several that ended alike."""

    model_config = ConfigDict(frozen=True)

    unix_s: Annotated[float, Field(ge=0, le=1e11)]
    count: Annotated[int, Field(ge=1, le=1 << 53)] = 1
    request_id: _Text
    key: _Text
    """The id of the API key; empty without one."""
    model: _Text = ""
    """Empty if the request was rejected before its model was known."""
    worker_id: _Text = ""
    """The worker that had the request last; empty if none had it."""
    status: Annotated[int, Field(ge=100, le=599)]
    code: _Text
    reason: _Text
    """A sentence without text of the request."""
    address: _Text = ""
    """The address of the client, or of the proxy in front; empty if it is unknown."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the properties that errors with the same end share."""
        place = self.key, self.model, self.worker_id, self.address
        return (*place, self.status, self.code, self.reason)


_Folded = dict[tuple[object, ...], ErrorRecord]


class RecentErrors:
    """The last errors, at most `MAX_ERRORS`; those that end alike are one, with their count.

    A new one replaces the oldest with the most frequent key and code, so that a client
    that repeats a request hides neither a crash nor the errors of another key.
    """

    def __init__(self) -> None:
        self._records: _Folded = {}
        self._pending: _Folded = {}

    def add(self, record: ErrorRecord) -> None:
        """Add an error of this gateway."""
        if record.code == EndedKeyRefused.counted_as and not self.of_ended_key(record.key):
            log.warning("key.ended_in_use key=%s address=%r", record.key, record.address)
        _fold(self._pending, record)
        _fold(self._records, record)

    def merge(self, record: ErrorRecord) -> None:
        """Add an error of another gateway."""
        _fold(self._records, record)

    def take_pending(self) -> list[ErrorRecord]:
        """Return the last errors of this gateway since the last call, for other gateways."""
        pending, self._pending = self._pending, {}
        return list(pending.values())

    def newest_first(self) -> list[ErrorRecord]:
        """Return all errors."""
        return sorted(self._records.values(), key=lambda one: one.unix_s)[::-1]

    def of_ended_key(self, key: str) -> list[ErrorRecord]:
        """Return the refusals of a key that has ended."""
        code = EndedKeyRefused.counted_as
        return [one for one in self._records.values() if (one.key, one.code) == (key, code)]


def _fold(records: _Folded, record: ErrorRecord) -> None:
    """Add an error to bounded ones, as the newest with the same end."""
    if before := records.pop(record.kind, None):
        newest = max(before, record, key=lambda one: one.unix_s)
        record = newest.model_copy(update={"count": before.count + record.count})
    records[record.kind] = record
    if len(records) > MAX_ERRORS:
        counts = Counter((one.key, one.code) for one in records.values())
        ((key, code), _), *_ = counts.most_common(1)
        alike = [one for one in records.values() if (one.key, one.code) == (key, code)]
        del records[min(alike, key=lambda one: one.unix_s).kind]


# More than a gateway keeps: a gateway that starts reads errors of more than one key and code.
_MAX_ENTRIES = 5 * MAX_ERRORS


class SharedErrors:
    """The errors that gateways share. `wall` returns seconds since 1970.

    Only one task calls `exchange`.
    """

    def __init__(self, redis: RedisClient, errors: RecentErrors, wall: Callable[[], float]) -> None:
        self._stream = SharedStream(redis, "errors", "recent", "error", max_entries=_MAX_ENTRIES)
        self._errors = errors
        self._wall = wall
        self._unsent: list[ErrorRecord] = []
        self._merged: dict[str, None] = {}
        """The entries that were merged: after a reconnect they are read again."""

    async def exchange(self) -> None:
        """Send the errors of this gateway since the last exchange, and merge those of others."""
        self._unsent = [*self._unsent, *self._errors.take_pending()][-MAX_ERRORS:]
        now_s = self._wall()
        texts = [
            json.dumps(record.model_dump(exclude={"unix_s"}) | {"age_s": now_s - record.unix_s})
            for record in self._unsent
        ]
        entries = await self._stream.exchange(texts)
        self._unsent = []
        for entry in entries:
            record = _parse(entry.text, self._wall() - entry.age_s)
            if record is not None and entry.entry_id not in self._merged:
                self._errors.merge(record)
                self._merged[entry.entry_id] = None
        for entry_id in tuple(self._merged)[: -2 * _MAX_ENTRIES]:
            del self._merged[entry_id]


def _parse(text: str, sent_s: float) -> ErrorRecord | None:
    """Parse an error; return None for one of another version of Paceline."""
    try:
        fields = json.loads(text)
        age_s = float(fields.pop("age_s"))
        return ErrorRecord(**fields, unix_s=sent_s - max(0.0, age_s))
    except (AttributeError, KeyError, TypeError, ValueError):  # pydantic's is a ValueError
        return None
