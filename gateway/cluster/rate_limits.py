"""Rate limits of keys over several gateways; no request waits for another gateway.

Each gateway admits requests by its own copy, writes its admissions twice a second, and charges
those of the others. So a key gets its limit over all gateways, and exceeds it at most by the
admissions of the others between two exchanges; a level below zero makes up for that. While Redis is
unreachable, each gateway enforces its share of every limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from pydantic import TypeAdapter

from gateway.auth.rate_limits import AdmittedTotals, RateLimiter
from gateway.errors import RecordsUnwritable
from gateway.state.redis import RedisClient
from gateway.state.shared_hash import NOW

_KEYS = ["paceline:{rate_limits}:admitted", "paceline:{rate_limits}:gateways"]
_ALIVE_MS = 5_000
_EXPIRE_MS = 60_000
_EXCHANGE = f"""{NOW}
local gateway, admitted, alive_ms, expire_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- Without the times of the last writes, ended gateways would count for ever.
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], gateway, admitted)
redis.call('ZADD', KEYS[2], now, gateway)
local function expire(from, to)
  for _, expired in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], from, to)) do
    redis.call('HDEL', KEYS[1], expired)
    redis.call('ZREM', KEYS[2], expired)
  end
end
expire('-inf', now - expire_ms)
-- From before the clock of Redis was set back; a running gateway returns with its next exchange.
expire(string.format('(%.0f', now), '+inf')
redis.call('PEXPIRE', KEYS[1], 3600000)
redis.call('PEXPIRE', KEYS[2], 3600000)
local alive = redis.call('ZRANGEBYSCORE', KEYS[2], now - alive_ms, '+inf')
return {{alive, redis.call('HGETALL', KEYS[1])}}
"""
_LEAVE = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
# Before the first exchange; a gateway with a Redis rarely runs alone.
_ASSUMED_GATEWAYS = 2
# A gateway that stood still for longer than Redis remembers it is not charged again.
_MAX_ABSENT = 64
_NOTHING = AdmittedTotals(0, 0, 0, 0, 0, 0)
_ByKey = dict[str, AdmittedTotals]
_BY_KEY = TypeAdapter(_ByKey)


class SharedRateLimits:
    """The rate limits that gateways share. `clock` is monotonic; one task calls `exchange`."""

    def __init__(
        self,
        redis: RedisClient,
        limiters: Callable[[], Iterable[tuple[str, RateLimiter]]],
        clock: Callable[[], float],
    ) -> None:
        self._redis = redis
        self._limiters = limiters
        self._clock = clock
        self._exchange, self._leave = redis.script(_EXCHANGE), redis.script(_LEAVE)
        self._charged: dict[str, dict[str, AdmittedTotals]] = {}
        """By gateway and key, the charges here; the least recently seen gateway first."""
        self._started = False
        self._cut_off = False
        self.gateways = 0
        """The gateways that share the limits, with this one; 0 before the first exchange."""

    async def exchange(self) -> None:
        """Write the admissions of this gateway, and charge those of other gateways."""
        admitted = {name: limiter.admitted() for name, limiter in self._limiters()}
        text = json.dumps({name: totals for name, totals in admitted.items() if any(totals)})
        try:
            alive, others = await self._redis.call("rate_limits", lambda: self._ask(text))
        except RecordsUnwritable:
            self._cut_off = True
            self._divide(self.gateways or _ASSUMED_GATEWAYS)
            raise
        self._divide(1)
        self.gateways = len(alive)
        # Shares already bounded this minute on both sides of an outage; they did not for the day.
        self._charge(others, alive, with_minute=not self._cut_off)
        self._cut_off, self._started = False, True

    async def leave(self) -> None:
        """Remove this gateway, so that its running requests no longer count elsewhere."""
        await self._redis.call("rate_limits", lambda: self._leave(_KEYS, [self._redis.gateway_id]))

    async def _ask(self, admitted: str) -> tuple[frozenset[str], dict[str, _ByKey]]:
        own = self._redis.gateway_id
        alive, flat = await self._exchange(_KEYS, [own, admitted, _ALIVE_MS, _EXPIRE_MS])
        pairs = zip(flat[::2], flat[1::2], strict=True)
        others = {name: _BY_KEY.validate_json(text) for name, text in pairs if name != own}
        return frozenset(alive), others

    def _divide(self, gateways: int) -> None:
        now_s = self._clock()
        for _, limiter in self._limiters():
            limiter.divide(gateways, now_s)

    def _charge(
        self, others: Mapping[str, _ByKey], alive: frozenset[str], *, with_minute: bool
    ) -> None:
        now_s = self._clock()
        for gateway, by_key in others.items():
            # What was admitted before this process started is in its daily budgets already.
            charged = self._charged.pop(gateway, {} if self._started else by_key.copy())
            self._charged[gateway] = charged
        for name, limiter in self._limiters():
            running = reserved = 0
            day = limiter.admitted().day
            for gateway, by_key in others.items():
                if (now := by_key.get(name)) is None:
                    continue
                before = self._charged[gateway].get(name, _NOTHING)
                self._charged[gateway][name] = now
                same_day = before.day == now.day
                limiter.charge_remote(
                    now.requests - before.requests if with_minute else 0,
                    now.tokens - before.tokens if with_minute else 0,
                    now.day,
                    max(0, now.day_tokens - (before.day_tokens if same_day else 0)),
                    now_s,
                )
                if gateway in alive:
                    running += now.running
                    reserved += now.reserved if now.day == day else 0
            limiter.set_remote_load(running, reserved)
        while len(self._charged) > len(others) + _MAX_ABSENT:
            del self._charged[next(iter(self._charged))]
