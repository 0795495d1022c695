"""Claims that a worker caches a system prompt, exchanged between gateways by a Redis stream.

A gateway that starts reads the last claims first. A lost claim costs one prompt that is read again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.cluster.redis import RedisClient
from gateway.cluster.shared_hash import NOW
from gateway.routing.prefix_affinity import (
    MAX_PENDING_CLAIMS,
    MAX_PREFIXES,
    PrefixClaim,
    PrefixIndex,
)

_STREAM = "paceline:{prefixes}:claims"
_MAX_ENTRIES = 2 * MAX_PREFIXES
# Returns the time, from which the ids of entries show their age, and the entries behind the last
# one that was read, or the newest of all.
_EXCHANGE = f"""{NOW}
local last_read, gateway, max_entries = ARGV[1], ARGV[2], ARGV[3]
for i = 4, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', max_entries, '*', 'gateway', gateway, 'claim', ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 86400000)
if last_read ~= '' then return {{now, redis.call('XRANGE', KEYS[1], '(' .. last_read, '+')}} end
local newest_first = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', max_entries)
local entries = {{}}
for i = #newest_first, 1, -1 do entries[#entries + 1] = newest_first[i] end
return {{now, entries}}
"""


class SharedPrefixClaims:
    """The claims that gateways share. Only one task calls `exchange`."""

    def __init__(self, redis: RedisClient, prefixes: PrefixIndex) -> None:
        self._redis = redis
        self._prefixes = prefixes
        self._exchange = redis.script(_EXCHANGE)
        self._last_read = ""
        self._connections = -1
        self._unsent: list[PrefixClaim] = []

    async def exchange(self) -> None:
        """Send the claims made here since the last exchange, and merge those of other gateways."""
        self._unsent = [*self._unsent, *self._prefixes.take_pending()][-MAX_PENDING_CLAIMS:]
        claims = [json.dumps(claim) for claim in self._unsent]
        connections = self._redis.connections
        # Behind a new connection may be another Redis.
        last_read = self._last_read if self._connections == connections else ""
        now_ms, entries = await self._redis.call("prefixes", lambda: self._ask(last_read, claims))
        self._unsent = []
        self._connections = connections
        for entry_id, gateway, claim in entries:
            self._last_read = entry_id
            if claim is not None and gateway != self._redis.gateway_id:
                age_s = (now_ms - int(entry_id.split("-")[0])) / 1000
                self._prefixes.merge(claim, max(0.0, age_s))

    async def _ask(
        self, last_read: str, claims: Sequence[str]
    ) -> tuple[int, list[tuple[str, str, PrefixClaim | None]]]:
        arguments: list[str | int] = [last_read, self._redis.gateway_id, _MAX_ENTRIES, *claims]
        now_ms, entries = await self._exchange([_STREAM], arguments)
        return now_ms, [_parse(entry_id, fields) for entry_id, fields in entries]


def _parse(entry_id: str, fields: Sequence[str]) -> tuple[str, str, PrefixClaim | None]:
    """Parse an entry; one of another version of Paceline has no claim."""
    entry = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        name, worker_id, boot_id, for_s = json.loads(entry["claim"])
        claim = PrefixClaim(str(name), str(worker_id), str(boot_id), float(for_s))
        return entry_id, entry["gateway"], claim
    except (KeyError, TypeError, ValueError):
        return entry_id, "", None
