"""A Redis stream that several gateways write, and that each of them reads once.

Each exchange reads a page of entries, the oldest first, so that a gateway which starts or was away
neither stops for thousands of entries nor lets Redis stop for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.state.redis import RedisClient
from gateway.state.shared_hash import NOW
from gateway.state.shares import MEMORY

# Returns the time, from which the ids of entries show their age, and the next entries behind the
# last one that was read.
_EXCHANGE = f"""{NOW}
local last_read, gateway, entries, field, page = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local bytes = #ARGV > 6 and redis.call('MEMORY', 'USAGE', KEYS[1])
if bytes then
  {MEMORY}
  entries = math.min(entries, redis.call('XLEN', KEYS[1]) * maxmemory * ARGV[6] / bytes)
end
for i = 7, #ARGV do
  local bound = string.format('%.0f', entries)
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', bound, '*', 'gateway', gateway, field, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 86400000)
local begin = last_read == '' and '-' or '(' .. last_read
return {{now, redis.call('XRANGE', KEYS[1], begin, '+', 'COUNT', page)}}
"""
PAGE_ENTRIES = 1000
"""Entries that one exchange reads at most."""


class StreamEntry(NamedTuple):
    """One entry of another gateway."""

    entry_id: str
    age_s: float
    text: str


class SharedStream:
    """One stream. Only one task calls `exchange`.

    `part` and `name` are its name in Redis, `field` is that of the text of an entry. It has about
    `max_entries` entries, and at most this share of the memory of Redis.
    """

    def __init__(
        self,
        redis: RedisClient,
        part: str,
        name: str,
        field: str,
        *,
        max_entries: int,
        share: float = 1.0,
    ) -> None:
        self._redis = redis
        self._part = part
        self._key = f"paceline:{{{part}}}:{name}"
        self._field = field
        self._max_entries = max_entries
        self._share = share
        self._exchange = redis.script(_EXCHANGE)
        self._last_read = ""
        self._reconnections = -1
        self.behind = False
        """Whether the last exchange left entries to read."""

    async def exchange(self, texts: Sequence[str]) -> list[StreamEntry]:
        """Add entries; return the next ones of other gateways, the oldest first."""
        reconnections = self._redis.reconnections
        # Behind a new connection may be another Redis.
        known = self._last_read if self._reconnections == reconnections else ""
        last_read, entries = await self._redis.call(self._part, lambda: self._ask(known, texts))
        # Entries from the start on are those of a connection that this call has made, too.
        self._reconnections = reconnections if known else self._redis.reconnections
        self._last_read = last_read
        return entries

    async def _ask(self, last_read: str, texts: Sequence[str]) -> tuple[str, list[StreamEntry]]:
        gateway_id = self._redis.gateway_id
        limits = str(self._max_entries), self._field, str(PAGE_ENTRIES), str(self._share)
        arguments = [last_read, gateway_id, *limits, *texts]
        now_ms, entries = await self._exchange([self._key], arguments)
        self.behind = len(entries) == PAGE_ENTRIES
        received = []
        for entry_id, fields in entries:
            last_read = entry_id
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            text = entry.get(self._field)
            if text is not None and entry.get("gateway") != gateway_id:
                age_s = (now_ms - int(entry_id.split("-")[0])) / 1000
                received.append(StreamEntry(entry_id, max(0.0, age_s), text))
        return last_read, received
