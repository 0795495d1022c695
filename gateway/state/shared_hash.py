"""A Redis hash that several gateways write, and the copy of it in memory.

The copy is refreshed twice a second, from the fields that were written since the last read or,
after a reconnect or a loss, from all of them. A write replaces a field only if it still equals the
copy, so gateways merge their data in Python and Redis only compares. Fields that Redis has lost are
restored from the copies. Old fields are folded: added to a sum in the same hash and removed, in one
step. A tombstone prevents that a folded field counts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from gateway.state.redis import RedisClient

_HASH_FIELDS = frozenset(("created_ms", "folds"))
"""They describe the hash itself: a new hash is another hash, and each fold removes a field."""
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# KEYS: the hash, and its fields sorted by the time of their last write. Where the latter were
# evicted, or are from before the clock of Redis was set back, all gateways read all fields, as
# after a fold. Reads start some seconds before the last one, in case the clock was set back.
_READ = f"""{NOW}
local last_read_ms, known_hash = ARGV[1], ARGV[2]
local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
if not newest or tonumber(newest) > now then
  redis.call('DEL', KEYS[2])
  redis.call('HINCRBY', KEYS[1], 'folds', 1)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 3600000)
redis.call('HSETNX', KEYS[1], 'created_ms', string.format('%.0f', now))
local created = redis.call('HGET', KEYS[1], 'created_ms')
local hash = created .. ' ' .. (redis.call('HGET', KEYS[1], 'folds') or '0')
if last_read_ms == '' or known_hash ~= hash or last_read_ms + 0 < now - 3600000 then
  return {{now, hash, 1, redis.call('HGETALL', KEYS[1])}}
end
local updated = {{}}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], last_read_ms - 3000, '+inf')) do
  updated[#updated + 1] = name
  updated[#updated + 1] = redis.call('HGET', KEYS[1], name) or ''
end
return {{now, hash, 0, updated}}
"""
# Lists of a name, the text that is replaced, and the new one. Returns the names that were refused,
# each with its tombstone.
_SET = f"""{NOW}
local function set(name, text)
  redis.call('HSET', KEYS[1], name, text)
  redis.call('ZADD', KEYS[2], now, name)
  redis.call('PEXPIRE', KEYS[2], 3600000)
end
local function is(name, text) return (redis.call('HGET', KEYS[1], name) or '') == text end
"""
_WRITE = f"""{_SET}
local refused = {{}}
for i = 2, #ARGV, 3 do
  local tombstone = redis.call('GET', ARGV[1] .. ARGV[i])
  if tombstone or not is(ARGV[i], ARGV[i + 1]) then
    refused[#refused + 1] = ARGV[i]
    refused[#refused + 1] = tombstone or ''
  else
    set(ARGV[i], ARGV[i + 2])
  end
end
return refused
"""
_FOLD = f"""{_SET}
local name, sum_name = ARGV[2], ARGV[4]
if not is(name, ARGV[3]) or not is(sum_name, ARGV[5]) then return 0 end
redis.call('HDEL', KEYS[1], name)
set(sum_name, ARGV[6])
redis.call('HINCRBY', KEYS[1], 'folds', 1)
redis.call('SET', ARGV[1] .. name, ARGV[7], 'EX', ARGV[8])
return 1
"""
Value = TypeVar("Value")


class Changes(NamedTuple, Generic[Value]):
    """The result of a read."""

    now_ms: int
    """The time, by the clock of Redis."""
    updated: Mapping[str, Value]
    folded: frozenset[str]
    """The fields that other gateways have folded."""


class SharedHash(Generic[Value]):
    """One shared hash; only one task calls its methods.

    `part` names it in Redis and in logs. `parse` returns None for text of another version of
    Paceline, and raises `ValueError` where the read must fail.
    """

    def __init__(
        self, redis: RedisClient, part: str, name: str, parse: Callable[[str], Value | None]
    ) -> None:
        self._redis = redis
        self._part = part
        self._keys = [f"paceline:{{{part}}}:{name}", f"paceline:{{{part}}}:updates"]
        self._tombstones = f"paceline:{{{part}}}:folded:"
        self._parse = parse
        self._read, self._write, self._fold = map(redis.script, (_READ, _WRITE, _FOLD))
        self.values: dict[str, Value] = {}
        self._texts: dict[str, str] = {}
        self._last_read_ms = ""
        self._hash = ""
        """When the hash was created, and how many fields were folded since."""
        self._reconnections = -1

    async def read(self) -> Changes[Value]:
        """Read the fields written since the last read, and restore the ones that Redis has lost."""
        reconnections = self._redis.reconnections
        # Behind a new connection may be another Redis, or one that has lost data.
        last_read_ms = self._last_read_ms if reconnections == self._reconnections else ""
        now_ms, hash_, whole, texts, updated = await self._redis.call(
            self._part, lambda: self._ask(last_read_ms)
        )
        folded: set[str] = set()
        missing = {name: text for name, text in self._texts.items() if whole and name not in texts}
        created, _, folds = self._hash.partition(" ")
        if hash_.startswith(f"{created} ") and not hash_.endswith(f" {folds}"):
            folded = set(missing)
        elif missing:
            refused = await self._replace((name, "", text) for name, text in missing.items())
            folded = {name for name, tombstone in refused.items() if tombstone}
            hash_ = ""  # another gateway may have restored other text: read all again
        self._texts.update(texts)
        self.values.update(updated)
        for name in folded:
            del self._texts[name]
            self.values.pop(name, None)
        self._last_read_ms, self._hash, self._reconnections = str(now_ms), hash_, reconnections
        return Changes(now_ms, updated, frozenset(folded))

    async def write(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Write fields, but none that another gateway has written or folded since the last read.

        Return the names that were refused, each with its tombstone; it is empty without one.
        """
        refused = await self._replace(
            (name, self._texts.get(name, ""), text) for name, text in texts.items()
        )
        for name, text in texts.items():
            if name not in refused:
                self._keep(name, text)
        return refused

    async def fold(
        self, name: str, sum_name: str, new_sum: str, *, tombstone: str, keep_s: int
    ) -> bool:
        """Replace a field and a sum by the new sum; return False where either has changed."""
        old_sum = self._texts.get(sum_name, "")
        texts = [name, self._texts[name], sum_name, old_sum, new_sum, tombstone, str(keep_s)]
        if not await self._redis.call(
            self._part, lambda: self._fold(self._keys, [self._tombstones, *texts])
        ):
            return False
        del self._texts[name], self.values[name]
        self._keep(sum_name, new_sum)
        return True

    async def _ask(
        self, last_read_ms: str
    ) -> tuple[int, str, bool, dict[str, str], dict[str, Value]]:
        now_ms, hash_, whole, flat = await self._read(self._keys, [last_read_ms, self._hash])
        texts, updated = {}, {}
        for name, text in zip(flat[::2], flat[1::2], strict=True):
            if not text or name in _HASH_FIELDS:
                continue
            texts[name] = text
            value = self.values.get(name) if self._texts.get(name) == text else self._parse(text)
            if value is not None:
                updated[name] = value
        return now_ms, hash_, bool(whole), texts, updated

    async def _replace(self, changes: Iterable[tuple[str, str, str]]) -> dict[str, str]:
        arguments = [self._tombstones, *(text for change in changes for text in change)]
        flat = await self._redis.call(self._part, lambda: self._write(self._keys, arguments))
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _keep(self, name: str, text: str) -> None:
        self._texts[name] = text
        if (value := self._parse(text)) is not None:
            self.values[name] = value
