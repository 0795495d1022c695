"""The last errors of all gateways, exchanged by a Redis stream.

An entry has the age of its error, so that the clocks of two gateways may differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from gateway.cluster.redis import RedisClient
from gateway.cluster.shared_stream import SharedStream
from gateway.storage.recent_errors import MAX_ERRORS, ErrorRecord, RecentErrors

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
        texts = [_to_text(record, now_s) for record in self._unsent]
        entries = await self._stream.exchange(texts)
        self._unsent = []
        for entry in entries:
            record = _parse(entry.text, self._wall() - entry.age_s)
            if record is not None and entry.entry_id not in self._merged:
                self._errors.merge(record)
                self._merged[entry.entry_id] = None
        for entry_id in tuple(self._merged)[: -2 * _MAX_ENTRIES]:
            del self._merged[entry_id]


def _to_text(record: ErrorRecord, now_s: float) -> str:
    fields = record.model_dump(exclude={"unix_s"})
    return json.dumps({**fields, "age_s": round(now_s - record.unix_s, 3)})


def _parse(text: str, sent_s: float) -> ErrorRecord | None:
    """Parse an error; return None for one of another version of Paceline."""
    try:
        fields = json.loads(text)
        age_s = float(fields.pop("age_s"))
        return ErrorRecord(**fields, unix_s=sent_s - max(0.0, age_s))
    except (AttributeError, KeyError, TypeError, ValueError):  # pydantic's is a ValueError
        return None
