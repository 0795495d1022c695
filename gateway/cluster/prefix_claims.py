"""Claims to system prompts over several gateways: a stream of news, and a copy in each gateway.

Half a second's claims go out together and those of others come in, so no request waits for Redis
and a gateway that starts reads the last ones first. What is lost costs a prompt that is read again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from gateway.cluster.redis import RedisClient
from gateway.routing.prefix_affinity import (
    MAX_PENDING_CLAIMS,
    MAX_PREFIXES,
    PrefixClaim,
    PrefixIndex,
)

_NEWS = "paceline:{prefixes}:news"
_KEPT = 2 * MAX_PREFIXES
# Answers with the clock of Redis, by which ids of entries tell their age, and with the entries
# behind the last one that was read; with the last ones of all where none was.
_EXCHANGE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for i = 4, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'by', ARGV[2], 'claim', ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 86400000)
if ARGV[1] == '' then
  local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[3])
  local entries = {}
  for i = #last, 1, -1 do entries[#entries + 1] = last[i] end
  return {now, entries}
end
return {now, redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+')}
"""


class SharedPrefixClaims:
    """The claims that gateways share. Only one task calls `exchange`."""

    def __init__(self, link: RedisClient, prefixes: PrefixIndex) -> None:
        self._link = link
        self._prefixes = prefixes
        self._exchange = link.script(_EXCHANGE)
        self._life = secrets.token_hex(8)
        self._last = ""
        self._connections = -1
        self._untold: list[PrefixClaim] = []

    async def exchange(self) -> None:
        """Tell of the claims made here since the last turn, and hear of the others'."""
        # What could not be told is told later, unless there is too much of it.
        self._untold = [*self._untold, *self._prefixes.take_pending()][-MAX_PENDING_CLAIMS:]
        news = [json.dumps(claim) for claim in self._untold]
        anew = self._connections != self._link.connections  # perhaps another Redis
        now_ms, entries = await self._link.call(
            "prefixes", lambda: self._ask("" if anew else self._last, news)
        )
        self._untold = []
        self._connections = self._link.connections
        for at, by, claim in entries:
            self._last = at
            if claim is not None and by != self._life:
                self._prefixes.merge(claim, max(0.0, (now_ms - int(at.split("-")[0])) / 1000))

    async def _ask(
        self, last: str, news: Sequence[str]
    ) -> tuple[int, list[tuple[str, str, PrefixClaim | None]]]:
        arguments: list[str | int] = [last, self._life, _KEPT, *news]
        now_ms, entries = await self._exchange([_NEWS], arguments)
        return now_ms, [_read(at, fields) for at, fields in entries]


def _read(at: str, fields: Sequence[str]) -> tuple[str, str, PrefixClaim | None]:
    """Read one entry; no claim where another version of Paceline wrote it, or nobody knows who."""
    told = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        name, worker_id, boot_id, for_s = json.loads(told["claim"])
        return at, told["by"], PrefixClaim(str(name), str(worker_id), str(boot_id), float(for_s))
    except (KeyError, TypeError, ValueError):
        return at, "", None
