"""A Redis hash that several gateways write, and the copy of it in memory.

The copy is refreshed twice a second, from the fields that were written since the last exchange or,
after a reconnect or a loss, from all of them. Fields that Redis has lost are restored from the
copies. Old fields are folded: added to a sum in the same hash and removed, in one step that does
nothing where another gateway was faster. A tombstone prevents that a folded field counts again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from redis.commands.core import AsyncScript

from gateway.state.redis import RedisClient

_HASH_FIELDS = frozenset(("created_ms", "folds"))
"""They describe the hash itself: a new hash is another hash, and each fold removes a field."""
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# KEYS: the hash, and its fields sorted by the time of their last write.
_BEGIN = f"""{NOW}
local last_read_ms, known_hash, tombstones = ARGV[1], ARGV[2], ARGV[3]
local function tombstone(name) return redis.call('GET', tombstones .. name) end
local function write(name, text)
  redis.call('HSET', KEYS[1], name, text)
  redis.call('ZADD', KEYS[2], now, name)
end
"""
# Where the sorted fields were evicted, or are from before the clock of Redis was set back, all
# gateways read all fields, as after a fold.
_CHECK = """
local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
if not newest or tonumber(newest) > now then
  redis.call('DEL', KEYS[2])
  redis.call('HINCRBY', KEYS[1], 'folds', 1)
end
"""
# Reads start some seconds earlier than the last one: the clock of Redis may have been set back.
_END = """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 3600000)
redis.call('PEXPIRE', KEYS[2], 3600000)
redis.call('HSETNX', KEYS[1], 'created_ms', string.format('%.0f', now))
local created = redis.call('HGET', KEYS[1], 'created_ms')
local hash = created .. ' ' .. (redis.call('HGET', KEYS[1], 'folds') or '0')
if last_read_ms == '' or known_hash ~= hash or last_read_ms + 0 < now - 3600000 then
  return {now, hash, 1, redis.call('HGETALL', KEYS[1]), result}
end
local updated = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], last_read_ms - 3000, '+inf')) do
  updated[#updated + 1] = name
  updated[#updated + 1] = redis.call('HGET', KEYS[1], name) or ''
end
return {now, hash, 0, updated, result}
"""
_RESTORE = f"""{_BEGIN}
local folded = {{}}
for i = 4, #ARGV, 2 do
  if tombstone(ARGV[i]) then
    folded[#folded + 1] = ARGV[i]
  elseif redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then
    write(ARGV[i], ARGV[i + 1])
  end
end
return folded
"""
_FOLD = f"""{_BEGIN}
local name, text, sum_name, old_sum, new_sum = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
if redis.call('HGET', KEYS[1], name) ~= text then return 0 end
if (redis.call('HGET', KEYS[1], sum_name) or '') ~= old_sum then return 0 end
redis.call('HDEL', KEYS[1], name)
write(sum_name, new_sum)
redis.call('HINCRBY', KEYS[1], 'folds', 1)
redis.call('SET', tombstones .. name, ARGV[9], 'EX', ARGV[10])
return 1
"""


class Stored(Protocol):
    """The value of a field, with the text that Redis has."""

    @property
    def text(self) -> str:
        """Return the text."""


Value = TypeVar("Value", bound=Stored)


class Exchanged(NamedTuple, Generic[Value]):
    """The outcome of one exchange."""

    now_ms: int
    """The time, by the clock of Redis."""
    updated: Mapping[str, Value]
    folded: frozenset[str]
    """The fields that other gateways have folded."""
    result: str
    """What the script of the part has left in its variable `result`."""


class SharedHash(Generic[Value]):
    """One shared hash. Only one task calls `exchange` and `fold`.

    `part` names it in Redis and in logs. `writes` is Lua: it calls `write` and `tombstone` and sets
    a local `result`; its own arguments begin at ARGV[4]. `parse` returns None for text of another
    version of Paceline, and raises `ValueError` where the exchange must fail.
    """

    def __init__(
        self,
        redis: RedisClient,
        part: str,
        name: str,
        writes: str,
        parse: Callable[[str], Value | None],
    ) -> None:
        self._redis = redis
        self._part = part
        self._keys = [f"paceline:{{{part}}}:{name}", f"paceline:{{{part}}}:updates"]
        self._tombstones = f"paceline:{{{part}}}:folded:"
        self._parse = parse
        self._exchange = redis.script(_BEGIN + _CHECK + writes + _END)
        self._restore, self._fold = redis.script(_RESTORE), redis.script(_FOLD)
        self.values: dict[str, Value] = {}
        self._last_read_ms = ""
        self._hash = ""
        """When the hash was created, and how many fields were folded since."""
        self._reconnections = -1

    async def exchange(self, arguments: Sequence[str]) -> Exchanged[Value]:
        """Write, and read what was written since the last exchange."""
        reconnections = self._redis.reconnections
        # Behind a new connection may be another Redis, or one that has lost data.
        last_read_ms = self._last_read_ms if reconnections == self._reconnections else ""
        now_ms, hash_, whole, updated, result = await self._redis.call(
            self._part, lambda: self._ask(last_read_ms, arguments)
        )
        folded: frozenset[str] = frozenset()
        if whole:
            missing = {name: one for name, one in self.values.items() if name not in updated}
            created, _, folds = self._hash.partition(" ")
            if hash_.startswith(f"{created} ") and not hash_.endswith(f" {folds}"):
                folded = frozenset(missing)
            elif missing:
                texts = [text for name, one in missing.items() for text in (name, one.text)]
                folded = frozenset(
                    await self._redis.call(self._part, lambda: self._run(self._restore, texts))
                )
                hash_ = ""  # another gateway may have restored other text: read all again
            values = {**missing, **updated}
            self.values = {name: one for name, one in values.items() if name not in folded}
        else:
            self.values.update(updated)
        self._last_read_ms, self._hash, self._reconnections = str(now_ms), hash_, reconnections
        return Exchanged(now_ms, updated, folded, result)

    async def fold(
        self, name: str, sum_name: str, new_sum: str, *, tombstone: str, keep_s: int
    ) -> bool:
        """Replace a field and a sum by the new sum; return False where either has changed."""
        folded, old, summed = self.values[name], self.values.get(sum_name), self._parse(new_sum)
        texts = [name, folded.text, sum_name, old.text if old else "", new_sum]
        if not await self._redis.call(
            self._part, lambda: self._run(self._fold, [*texts, tombstone, str(keep_s)])
        ):
            return False
        del self.values[name]
        assert summed is not None, "a sum is of this version of Paceline"
        self.values[sum_name] = summed
        return True

    async def _ask(
        self, last_read_ms: str, arguments: Sequence[str]
    ) -> tuple[int, str, bool, dict[str, Value], str]:
        now_ms, hash_, whole, flat, result = await self._run(
            self._exchange, arguments, last_read_ms
        )
        updated = {}
        for name, text in zip(flat[::2], flat[1::2], strict=True):
            before = self.values.get(name)
            if before is not None and before.text == text:
                updated[name] = before
            elif text and name not in _HASH_FIELDS and (value := self._parse(text)) is not None:
                updated[name] = value
        return now_ms, hash_, bool(whole), updated, result

    def _run(
        self, script: AsyncScript, arguments: Sequence[str], last_read_ms: str = ""
    ) -> Awaitable[Any]:
        return script(self._keys, [last_read_ms, self._hash, self._tombstones, *arguments])
