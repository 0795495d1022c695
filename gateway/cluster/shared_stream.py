"""A Redis stream that several gateways write, and that each of them reads once.

A gateway that starts reads the newest entries first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.cluster.redis import RedisClient
from gateway.cluster.shared_hash import NOW

# Returns the time, from which the ids of entries show their age, and the entries behind the last
# one that was read, or the newest of all.
_EXCHANGE = f"""{NOW}
local last_read, gateway, max_entries, field = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
for i = 5, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', max_entries, '*', 'gateway', gateway, field, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 86400000)
if last_read ~= '' then return {{now, redis.call('XRANGE', KEYS[1], '(' .. last_read, '+')}} end
local newest_first = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', max_entries)
local entries = {{}}
for i = #newest_first, 1, -1 do entries[#entries + 1] = newest_first[i] end
return {{now, entries}}
"""


class StreamEntry(NamedTuple):
    """One entry of another gateway."""

    entry_id: str
    age_s: float
    text: str


class SharedStream:
    """One stream. Only one task calls `exchange`.

    `part` and `name` are its name in Redis, `field` is that of the text of an entry. It has about
    `max_entries` entries.
    """

    def __init__(
        self, redis: RedisClient, part: str, name: str, field: str, max_entries: int
    ) -> None:
        self._redis = redis
        self._part = part
        self._key = f"paceline:{{{part}}}:{name}"
        self._field = field
        self._max_entries = max_entries
        self._exchange = redis.script(_EXCHANGE)
        self._last_read = ""
        self._connections = -1

    async def exchange(self, texts: Sequence[str]) -> list[StreamEntry]:
        """Add entries; return those of other gateways since the last call, the oldest first."""
        connections = self._redis.connections
        # Behind a new connection may be another Redis.
        last_read = self._last_read if self._connections == connections else ""
        last_read, entries = await self._redis.call(self._part, lambda: self._ask(last_read, texts))
        self._last_read, self._connections = last_read, connections
        return entries

    async def _ask(self, last_read: str, texts: Sequence[str]) -> tuple[str, list[StreamEntry]]:
        gateway_id = self._redis.gateway_id
        arguments = [last_read, gateway_id, str(self._max_entries), self._field, *texts]
        now_ms, entries = await self._exchange([self._key], arguments)
        received = []
        for entry_id, fields in entries:
            last_read = entry_id
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            text = entry.get(self._field)
            if text is not None and entry.get("gateway") != gateway_id:
                age_s = (now_ms - int(entry_id.split("-")[0])) / 1000
                received.append(StreamEntry(entry_id, max(0.0, age_s), text))
        return last_read, received
