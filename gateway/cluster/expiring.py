"""Kept responses and conversations in Redis, so that a client may go on at any gateway.

They are compressed and sealed with the join token, so Redis holds no text of a conversation. A
request that goes on from one waits for Redis, within the deadline; no other request does.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any

from gateway.cluster.redis import RedisClient, Reply
from gateway.cluster.shared_hash import NOW
from gateway.errors import RecordsUnwritable
from gateway.protocols.responses import Sealer
from gateway.storage.expiring import RECORD_LIMIT_BYTES, TOTAL_LIMIT_BYTES, TTL_S

_PART = "responses"
_PREFIX = "paceline:{responses}:kept:"
_SIZES, _EXPIRY = "paceline:{responses}:sizes", "paceline:{responses}:expiry"
_TTL_MS = int(TTL_S * 1000)
_DROPS = 1000
"""Records dropped in one step: the rest waits for the next one."""
# KEYS: the sizes of the records, and the records by the time at which they expire, then records.
_DROP = f"""{NOW}
local function drop(key)
  redis.call('DEL', key)
  redis.call('ZREM', KEYS[2], key)
  local size = tonumber(redis.call('HGET', KEYS[1], key) or '0')
  redis.call('HDEL', KEYS[1], key)
  return redis.call('HINCRBY', KEYS[1], 'total', 0 - size)
end
"""
_GET = f"""{NOW}
local found = {{}}
for i = 3, #KEYS do
  found[i - 2] = redis.call('GET', KEYS[i])
  if found[i - 2] then
    redis.call('PEXPIRE', KEYS[i], ARGV[1])
    redis.call('ZADD', KEYS[2], now + ARGV[1], KEYS[i])
  end
end
return found
"""
_PUT = f"""{_DROP}
local text, ttl_ms, limit, replaces = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if replaces ~= '' and redis.call('GET', KEYS[3]) ~= replaces then return 0 end
drop(KEYS[3])
redis.call('SET', KEYS[3], text, 'PX', ttl_ms)
redis.call('ZADD', KEYS[2], now + ttl_ms, KEYS[3])
redis.call('HSET', KEYS[1], KEYS[3], #text)
local total = redis.call('HINCRBY', KEYS[1], 'total', #text)
for _ = 1, {_DROPS} do
  local first = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not first[1] or (tonumber(first[2]) > now and total <= limit) then break end
  total = drop(first[1])
end
redis.call('PEXPIRE', KEYS[1], 2 * ttl_ms)
redis.call('PEXPIRE', KEYS[2], 2 * ttl_ms)
return 1
"""
_DELETE = f"""{_DROP}
local there = redis.call('EXISTS', KEYS[3])
drop(KEYS[3])
return there
"""


class SharedExpiringRecords:
    """The `ExpiringRecords` of all gateways on one Redis."""

    def __init__(
        self, redis: RedisClient, sealer: Sealer, *, limit_bytes: int = TOTAL_LIMIT_BYTES
    ) -> None:
        self._redis = redis
        self._sealer = sealer
        self._limit_bytes = limit_bytes
        self._get, self._put = redis.script(_GET), redis.script(_PUT)
        self._delete = redis.script(_DELETE)

    async def get(self, owner: str, names: Sequence[str]) -> list[bytes | None]:
        """Return the records of these names, and count them as used."""
        keys = [_key(owner, name) for name in names]

        async def read() -> list[str | None]:
            reply = await self._get(keys=[_SIZES, _EXPIRY, *keys], args=[_TTL_MS])
            # A missing record is false in Lua, which ends no list.
            return [text if isinstance(text, str) else None for text in _list(reply, len(keys))]

        texts = await self._call(read)
        return [
            None if text is None else await asyncio.to_thread(self._open, text, key)
            for text, key in zip(texts, keys, strict=True)
        ]

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

        async def write() -> bool:
            return bool(await self._put(keys=[_SIZES, _EXPIRY, key], args=arguments))

        return await self._call(write)

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a record; return whether there was one."""

        async def remove() -> bool:
            return bool(await self._delete(keys=[_SIZES, _EXPIRY, _key(owner, name)]))

        return await self._call(remove)

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


def _key(owner: str, name: str) -> str:
    """Return the key of a record; it tells nobody whose it is."""
    digest = blake2b(f"{owner}\n{name}".encode(), digest_size=24).hexdigest()
    return _PREFIX + digest


def _list(reply: Any, length: int) -> list[Any]:
    if not isinstance(reply, list) or len(reply) > length:
        raise ValueError("not a list of records")
    return [*reply, *[None] * (length - len(reply))]
