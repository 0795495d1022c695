"""Counts and workers' reports of all gateways: written to Redis each turn, read from memory.

A life of a gateway only ever writes its own totals, whole, under its own name. So a write that is
made twice counts once, one that fails is made up for by the next, and the sum is over lives. Lives
that ended long ago are folded into one, in a step that does nothing where anybody was faster.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from gateway.cluster.redis import RedisClient
from gateway.cluster.worker_reports import SharedWorkerReports
from gateway.storage.counters import CounterKey, TakePending
from workers.protocol import WorkerReport

_COUNTS = "paceline:{counts}:lives"
_EARLIER = "earlier"
_FOLD_AFTER_MS = 3_600_000
_FOLDED_KEPT_S = 30 * 86_400
_NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""
# A life that was folded while it could not reach Redis is told what was folded, and writes nothing.
_EXCHANGE = f"""{_NOW}
local folded = redis.call('GET', KEYS[2]) or ''
local known = redis.call('HEXISTS', KEYS[1], ARGV[1])
if folded == '' then
  redis.call('HSET', KEYS[1], ARGV[1], '[' .. string.format('%.0f', now) .. ',' .. ARGV[2] .. ']')
end
return {{now, folded, known, redis.call('HGETALL', KEYS[1])}}
"""
_FOLD = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if (redis.call('HGET', KEYS[1], 'earlier') or '') ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'earlier', ARGV[4])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[5])
return 1
"""
_PUT_BACK = """
for i = 1, #ARGV, 2 do
  if redis.call('EXISTS', KEYS[1 + (i + 1) / 2]) == 0 then
    redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return 1
"""


class _Life(NamedTuple):
    """What one life of a gateway has counted, and when it last said so, by the clock of Redis."""

    written: str
    told_ms: int
    totals: Mapping[CounterKey, int]


class SharedCounters:
    """The store that gateways share. `exchange` is to be called about twice a second."""

    def __init__(
        self, link: RedisClient, boots: SharedWorkerReports, take_pending: TakePending = dict
    ) -> None:
        self._link = link
        self._boots = boots
        self._exchange, self._fold, self._put_back = (
            link.script(lua) for lua in (_EXCHANGE, _FOLD, _PUT_BACK)
        )
        self._take_pending = take_pending
        self._life = secrets.token_hex(8)
        self._mine: Counter[CounterKey] = Counter()
        self._others: dict[str, _Life] = {}
        self._connections = -1

    async def counts(self) -> Mapping[CounterKey, int]:
        """Read all counts: this gateway's as of now, the others' as of the last exchange."""
        self._mine.update(self._take_pending())
        counts = Counter(self._mine)
        for life in self._others.values():
            counts.update(life.totals)
        return counts

    async def store_report(self, report: WorkerReport) -> None:
        """Keep a report unless a later one of that boot is already kept."""
        self._boots.store(report)

    async def reports(self) -> tuple[WorkerReport, ...]:
        """Read the last report of every boot, also of workers that are gone."""
        return self._boots.reports()

    async def exchange(self) -> None:
        """Write what this life has counted, and read what others have."""
        self._mine.update(self._take_pending())
        life, text = self._life, _written(self._mine)
        connections = self._link.connections
        now_ms, folded, known, told = await self._link.call("counts", lambda: self._ask(life, text))
        if folded is not None:
            self._begin_anew(folded)
            return
        if not known or self._connections != self._link.connections:
            await self._return({n: one for n, one in self._others.items() if n not in told})
            told = {**self._others, **told}
            self._connections = connections
        told.pop(life, None)
        self._others = told
        await self._fold_one(now_ms)

    async def _ask(self, life: str, text: str) -> tuple[int, _Life | None, bool, dict[str, _Life]]:
        now_ms, folded, known, flat = await self._exchange([_COUNTS, _folded(life)], [life, text])
        told = {
            name: self._others[name]
            if name in self._others and self._others[name].written == written
            else _read(written)
            for name, written in zip(flat[::2], flat[1::2], strict=True)
        }
        return now_ms, _read(folded) if folded else None, bool(known), told

    async def _return(self, lost: Mapping[str, _Life]) -> None:
        """Put back what Redis has lost, unless it was folded meanwhile."""
        if lost:
            keys = [_COUNTS, *(_folded(name) for name in lost)]
            pairs = [text for name, one in lost.items() for text in (name, one.written)]
            await self._link.call("counts", lambda: self._put_back(keys, pairs))

    def _begin_anew(self, folded: _Life) -> None:
        """Go on under another name, without what others have folded of this life."""
        self._mine.subtract(folded.totals)
        self._mine = +self._mine
        self._life = secrets.token_hex(8)

    async def _fold_one(self, now_ms: int) -> None:
        """Add a life that has been silent for an hour to the sum of earlier ones."""
        silent = [
            (name, life)
            for name, life in self._others.items()
            if name != _EARLIER and now_ms - life.told_ms > _FOLD_AFTER_MS
        ]
        if not silent:
            return
        name, life = silent[0]
        earlier = self._others.get(_EARLIER, _Life("", 0, {}))
        summed = f"[0,{_written(Counter(earlier.totals) + Counter(life.totals))}]"
        keys = [_COUNTS, _folded(name)]
        steps: list[str | int] = [name, life.written, earlier.written, summed, _FOLDED_KEPT_S]
        if await self._link.call("counts", lambda: self._fold(keys, steps)):
            del self._others[name]
            self._others[_EARLIER] = _read(summed)


def _folded(life: str) -> str:
    return f"paceline:{{counts}}:folded:{life}"


def _written(totals: Mapping[CounterKey, int]) -> str:
    return json.dumps([[list(key), amount] for key, amount in totals.items()])


def _read(written: str) -> _Life:
    """Read a life; raise `ValueError` where it is none."""
    try:
        told_ms, totals = json.loads(written)
        return _Life(written, int(told_ms), {tuple(key): int(amount) for key, amount in totals})
    except TypeError:
        raise ValueError("not the counts of a gateway") from None
