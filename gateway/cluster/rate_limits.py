"""Limits of keys over several gateways, without a request that waits for the others.

Each gateway lets in by what it knows, tells the others twice a second what it has let in, and takes
off what they have. So a key gets its limit over all gateways, and beyond it at most what the others
let in between two turns; that is made up for, because levels go below nothing. While Redis is away
each gateway allows its share of every limit.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping

from gateway.auth.rate_limits import AdmittedTotals, RateLimiter
from gateway.cluster.redis import RedisClient
from gateway.errors import RecordsUnwritable

_USED = "paceline:{limits}:used"
_SEEN = "paceline:{limits}:seen"
_ALIVE_MS = 5_000
_KEPT_MS = 60_000
_EXCHANGE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
for _, life in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[4])) do
  redis.call('HDEL', KEYS[1], life)
  redis.call('ZREM', KEYS[2], life)
end
redis.call('PEXPIRE', KEYS[1], 3600000)
redis.call('PEXPIRE', KEYS[2], 3600000)
local alive = redis.call('ZRANGEBYSCORE', KEYS[2], now - ARGV[3], '+inf')
return {alive, redis.call('HGETALL', KEYS[1])}
"""
_LEAVE = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
# Who starts while Redis is away does not know; nobody shares with less than two.
_GATEWAYS_UNKNOWN = 2
_LIVES_KEPT = 64
_UNUSED = AdmittedTotals(0, 0, 0, 0, 0, 0)
_Life = Mapping[str, AdmittedTotals]


class SharedRateLimits:
    """The limits that gateways share. `clock` is monotonic; only one task calls `exchange`."""

    def __init__(
        self,
        link: RedisClient,
        allowances: Callable[[], Iterable[tuple[str, RateLimiter]]],
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._allowances = allowances
        self._clock = clock
        self._exchange, self._leave = link.script(_EXCHANGE), link.script(_LEAVE)
        self._life = secrets.token_hex(8)
        self._seen: dict[str, dict[str, AdmittedTotals]] = {}
        """What other lives had let in when they were last heard of."""
        self._begun = False
        self._away = False
        self.gateways = 0
        """Those that share now, this one too; 0 before that is known."""

    async def exchange(self) -> None:
        """Tell what was let in, take off what others let in; away from Redis, allow a share."""
        used = {name: allowance.admitted() for name, allowance in self._allowances()}
        told = json.dumps({name: one for name, one in used.items() if any(one)})
        try:
            alive, lives = await self._link.call("limits", lambda: self._ask(told))
        except RecordsUnwritable:
            self._away = True
            self._share(self.gateways or _GATEWAYS_UNKNOWN)
            raise
        self._share(1)
        self.gateways = len(alive)
        # What others let in within their shares is no debt of this minute; of the day it is.
        self._take(lives, alive, minute=not self._away)
        self._away, self._begun = False, True

    async def leave(self) -> None:
        """Let the others have this gateway's part at once."""
        await self._link.call("limits", lambda: self._leave([_USED, _SEEN], [self._life]))

    async def _ask(self, told: str) -> tuple[frozenset[str], dict[str, _Life]]:
        arguments: list[str | int] = [self._life, told, _ALIVE_MS, _KEPT_MS]
        alive, flat = await self._exchange([_USED, _SEEN], arguments)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return frozenset(alive), {life: _read(text) for life, text in pairs if life != self._life}

    def _share(self, gateways: int) -> None:
        now_s = self._clock()
        for _, allowance in self._allowances():
            allowance.divide(gateways, now_s)

    def _take(self, lives: Mapping[str, _Life], alive: frozenset[str], *, minute: bool) -> None:
        now_s = self._clock()
        for life in lives:
            self._seen[life] = self._seen.pop(life, {})  # last of those that were heard of
            if not self._begun:
                # What was used before this life began is in its budgets already.
                self._seen[life].update(lives[life])
        for name, allowance in self._allowances():
            running = reserved = 0
            day = allowance.admitted().day
            for life, keys in lives.items():
                if (now := keys.get(name)) is None:
                    continue
                before = self._seen[life].get(name, _UNUSED)
                self._seen[life][name] = now
                same_day = before.day == now.day
                allowance.charge_remote(
                    now.requests - before.requests if minute else 0,
                    now.tokens - before.tokens if minute else 0,
                    now.day,
                    max(0, now.day_tokens - (before.day_tokens if same_day else 0)),
                    now_s,
                )
                if life in alive:
                    running += now.running
                    reserved += now.reserved if now.day == day else 0
            allowance.set_remote_load(running, reserved)
        while len(self._seen) > _LIVES_KEPT:
            del self._seen[next(iter(self._seen))]


def _read(text: str) -> dict[str, AdmittedTotals]:
    """Read what a life has let in; raise `ValueError` where it is none."""
    try:
        return {
            name: AdmittedTotals(*map(int, counts)) for name, counts in json.loads(text).items()
        }
    except (AttributeError, TypeError):
        raise ValueError("not the use of a gateway") from None
