"""Records that clients create and that expire: responses and conversations, each of one owner.

In Redis a client may continue at any gateway. These records have a share of its memory, within
which the owner with the most gives way. They are compressed and sealed with the join token, so
Redis holds no text of a conversation. A request that continues one waits for Redis, within the
deadline.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from gateway.errors import RecordsUnwritable
from gateway.memory_budget import MemoryBudget, MemoryHold
from gateway.protocols.sealing import Sealer
from gateway.state.redis import RedisClient, Reply
from gateway.state.shared_hash import NOW
from gateway.state.shares import EVEN_IF_FULL, FREE, KEPT, MEMORY

TTL_S = 24 * 3600.0
"""A record expires so long after its last use."""
RECORD_LIMIT_BYTES = 16 * 1024 * 1024
TOTAL_LIMIT_BYTES = 256 * 1024 * 1024
"""Of all records; beyond it the owner with the most gives way, so that none pushes out others."""
OVERHEAD_BYTES = 1024
"""Of a record beside its data, so that empty records are bounded too."""


class _Record(NamedTuple):
    data: bytes
    expires_s: float


class MemoryRecords:
    """Records by owner and name, in the memory of this process, up to a limit.

    Owners are ids of API keys; no owner sees that another one has a record. `clock` returns
    monotonic seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        memory: MemoryBudget,
        *,
        limit_bytes: int = TOTAL_LIMIT_BYTES,
    ) -> None:
        self._clock = clock
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._records: dict[str, OrderedDict[str, _Record]] = {}
        """By owner, those used longest ago first."""
        self._holds: dict[str, MemoryHold] = {}
        """By owner."""

    async def get(
        self,
        owner: str,
        names: Sequence[str],
        hold: Callable[[int], None] = lambda _bytes: None,
    ) -> list[bytes | None]:
        """Return the records of these names, and count them as used.

        `hold` gets their bytes, before they are read from another machine; it may raise.
        """
        await self.drop_expired()
        records = self._records.get(owner, OrderedDict())
        found: list[bytes | None] = []
        for name in names:
            record = records.get(name)
            if record is not None:
                records[name] = record._replace(expires_s=self._clock() + TTL_S)
                records.move_to_end(name)
            found.append(record.data if record else None)
        hold(sum(len(data) for data in found if data))  # they may be dropped meanwhile
        return found

    async def put(
        self, owner: str, name: str, data: bytes, *, replaces: bytes | None = None
    ) -> bool:
        """Store a record, in place of this one only if there is one to replace.

        Return whether it is stored: not if it is too large, or if another has come before. Raise
        `Overloaded` without memory.
        """
        await self.drop_expired()
        present = self._records.get(owner, OrderedDict()).get(name)
        changed = replaces is not None and (present is None or present.data != replaces)
        if changed or len(data) > RECORD_LIMIT_BYTES or _size(data) > self._limit_bytes:
            return False
        with self._memory.hold(owner) as hold:
            hold.add(_size(data))
        self._drop(owner, name)
        records = self._records.setdefault(owner, OrderedDict())
        records[name] = _Record(data, self._clock() + TTL_S)
        self._holds.setdefault(owner, self._memory.hold(owner)).count(_size(data))
        while sum(hold.size_bytes for hold in self._holds.values()) > self._limit_bytes:
            largest = max(self._holds, key=lambda one: self._holds[one].size_bytes)
            self._drop(largest, next(iter(self._records[largest])))
        return name in records

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a record; return whether there was one."""
        await self.drop_expired()
        return self._drop(owner, name)

    async def drop_expired(self) -> None:
        """Delete expired records, also of owners that never return."""
        now_s = self._clock()
        for owner, records in tuple(self._records.items()):
            while records and (oldest := next(iter(records.items())))[1].expires_s <= now_s:
                self._drop(owner, oldest[0])

    def _drop(self, owner: str, name: str) -> bool:
        records = self._records.get(owner)
        if records is None or (record := records.pop(name, None)) is None:
            return False
        self._holds[owner].count(-_size(record.data))
        if not records:
            self._holds.pop(owner).release()
            del self._records[owner]
        return True


def _size(data: bytes) -> int:
    return len(data) + OVERHEAD_BYTES


_PART = "responses"
_PREFIX = "paceline:{responses}:"
_INDEX = [_PREFIX + name for name in ("sizes", "expires", "owners")]
_TTL_MS = int(TTL_S * 1000)
_DROPS = 1000
"""Records dropped in one step, so that Redis serves others in between."""
_STEPS = 32
_FIRST_READ_BYTES = 256 * 1024
"""Read at once; larger records only once there is memory for them."""
_FORMS = 3
"""As Redis sends a record, as text, and unsealed."""
# KEYS: the sizes of records, records by the time at which they expire, and owners by what they
# have, `~` by what all have; then records, or one. Each owner has its records by their time too.
_FUNCTIONS = f"""{NOW}
local sizes, expiry, owners = KEYS[1], KEYS[2], KEYS[3]
local function of(key) return string.match(key, '^(.+):') end
local function count(key, bytes)
  if redis.call('ZINCRBY', owners, bytes, of(key)) + 0 <= 0 then
    redis.call('ZREM', owners, of(key))
  end
  return redis.call('ZINCRBY', owners, bytes, '~') + 0
end
local function touch(key, ttl_ms)
  redis.call('PEXPIRE', key, ttl_ms)
  redis.call('ZADD', expiry, now + ttl_ms, key)
  redis.call('ZADD', of(key), now + ttl_ms, key)
  for _, index in ipairs({{sizes, expiry, owners, of(key)}}) do
    redis.call('PEXPIRE', index, 2 * ttl_ms)
  end
end
local function drop(key)
  local size = tonumber(redis.call('HGET', sizes, key) or '0')
  redis.call('DEL', key)
  redis.call('HDEL', sizes, key)
  redis.call('ZREM', expiry, key)
  redis.call('ZREM', of(key), key)
  return size, count(key, 0 - size)
end
"""
# Returns the records, or their size where that is more than the gateway has room for.
_GET = f"""{_FUNCTIONS}
local found, size = {{}}, 0
for i = 4, #KEYS do size = size + tonumber(redis.call('HGET', sizes, KEYS[i]) or '0') end
if size > tonumber(ARGV[2]) then return size end
for i = 4, #KEYS do
  found[i - 3] = redis.call('GET', KEYS[i])
  if found[i - 3] then touch(KEYS[i], ARGV[1]) end
end
return found
"""
# A record is written where there is room alone, but others give way in a full Redis too.
_PUT = f"""{_FUNCTIONS}{MEMORY}{EVEN_IF_FULL}
local key, text, ttl_ms, replaces = KEYS[4], ARGV[1], ARGV[2], ARGV[4]
if replaces ~= '' and redis.call('GET', key) ~= replaces then return 0 end
local limit = math.min(ARGV[3], maxmemory * {KEPT})
local size = #text + {OVERHEAD_BYTES}
if size > limit then return 0 end
local function first(records, until_ms)
  return redis.call('ZRANGEBYSCORE', records, '-inf', until_ms, 'LIMIT', 0, 1)[1]
end
local before = tonumber(redis.call('HGET', sizes, key) or '0')
local room = maxmemory * {1 - FREE} - used + before - size
local total = count(key, size - before)
if before > 0 then touch(key, ttl_ms + 1) end -- it goes last of its owner's
local function give_up(reply)
  count(key, before - size)
  return reply
end
for _ = 1, {_DROPS} do
  local victim = first(expiry, now)
  if not victim then
    if total <= limit and room >= 0 then
      redis.call('SET', key, text)
      redis.call('HSET', sizes, key, size)
      touch(key, ttl_ms)
      return 1
    end
    local largest = redis.call('ZREVRANGE', owners, 1, 1)[1] or of(key)
    victim = first(largest, '+inf')
    if largest == of(key) and (not victim or victim == key) then
      return give_up(room < 0 and redis.error_reply('OOM too little of the memory is left') or 0)
    end
  end
  if not victim or not redis.call('HGET', sizes, victim) then
    -- Redis has evicted a part of the index: what it counted expires within a day.
    redis.call('DEL', sizes, expiry, owners)
    return 0
  end
  local freed
  freed, total = drop(victim)
  room = room + freed
end
return give_up(-1)
"""
_DELETE = f"""{_FUNCTIONS}
if redis.call('EXISTS', KEYS[4]) == 0 then return 0 end
drop(KEYS[4])
return 1
"""


class SharedExpiringRecords:
    """The records of all gateways on one Redis. All methods raise `RecordsUnwritable`."""

    def __init__(
        self, redis: RedisClient, sealer: Sealer, *, limit_bytes: int = TOTAL_LIMIT_BYTES
    ) -> None:
        self._redis = redis
        self._sealer = sealer
        self._limit_bytes = limit_bytes
        self._get, self._put = redis.script(_GET), redis.script(_PUT)
        self._delete = redis.script(_DELETE)

    async def get(
        self,
        owner: str,
        names: Sequence[str],
        hold: Callable[[int], None] = lambda _bytes: None,
    ) -> list[bytes | None]:
        """Return the records of these names, and count them as used."""
        keys = [_key(owner, name) for name in names]
        room = _FIRST_READ_BYTES

        async def read() -> int | list[str | None]:
            reply = await self._get(keys=[*_INDEX, *keys], args=[_TTL_MS, room])
            if isinstance(reply, int):
                return reply
            if not isinstance(reply, list) or len(reply) > len(keys):
                raise ValueError("not a list of records")
            # A missing record is false in Lua, which ends no list.
            return [*reply, *[None] * (len(keys) - len(reply))]

        hold(_FORMS * room)
        try:
            while isinstance(texts := await self._call(read), int):
                hold(_FORMS * (texts - room))
                room = texts
            found: list[bytes | None] = []
            for text, key in zip(texts, keys, strict=True):
                data = None if text is None else await asyncio.to_thread(self._open, text, key)
                hold(len(data or b""))
                found.append(data)
            return found
        finally:
            hold(-_FORMS * room)

    async def put(
        self, owner: str, name: str, data: bytes, *, replaces: bytes | None = None
    ) -> bool:
        """Store a record; return whether it is stored."""
        if len(data) > RECORD_LIMIT_BYTES:
            return False
        key = _key(owner, name)
        text = await asyncio.to_thread(self._seal, data, key)
        before = "" if replaces is None else await asyncio.to_thread(self._seal, replaces, key)
        arguments: list[str | int] = [text, _TTL_MS, self._limit_bytes, before]
        for _ in range(_STEPS):
            if (stored := await self._call(lambda: self._put([*_INDEX, key], arguments))) >= 0:
                return bool(stored)
        return False

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a record; return whether there was one."""
        return bool(await self._call(lambda: self._delete([*_INDEX, _key(owner, name)])))

    async def drop_expired(self) -> None:
        """Do nothing: Redis deletes records at their time."""

    async def _call(self, command: Callable[[], Awaitable[Reply]]) -> Reply:
        """Run a command; fail at once while Redis does not answer."""
        if self._redis.unreachable:
            raise RecordsUnwritable
        return await self._redis.call(_PART, command)

    def _seal(self, data: bytes, key: str) -> str:
        # One text must have one sealed form, by which `put` knows what it replaces.
        return self._sealer.seal(zlib.compress(data, 1), key.encode())

    def _open(self, text: str, key: str) -> bytes | None:
        compressed = self._sealer.unseal(text, key.encode())
        if compressed is None:
            return None  # of gateways with another join token
        inflater = zlib.decompressobj()
        data = inflater.decompress(compressed, RECORD_LIMIT_BYTES)
        return data if inflater.eof else None


ExpiringRecords = MemoryRecords | SharedExpiringRecords


def _key(owner: str, name: str) -> str:
    """Return the key of a record; it names neither owner nor record, but groups those of one."""
    group = blake2b(owner.encode(), digest_size=8).hexdigest()
    return f"{_PREFIX}kept:{group}:{blake2b(name.encode(), digest_size=16).hexdigest()}"
