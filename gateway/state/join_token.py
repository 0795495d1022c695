"""The join token, which all gateways over one Redis must share: Redis holds a digest of it.

With another token a gateway would route to the workers of the others, and each would reject it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib

from gateway.errors import RecordsUnwritable, StartupError
from gateway.state.redis import OtherJoinToken, RedisClient

_KEY = "paceline:{join_token}:digest"
_EXPIRE_MS = 10_000
"""So long after the end of the last gateway, the token may change."""
_SHARE = """
local stored = redis.call('GET', KEYS[1])
if not stored then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif stored == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  return 0
end
return 1
"""


class SharedJoinToken:
    """The check of this gateway's join token against that of the other gateways."""

    def __init__(self, redis: RedisClient, token: str) -> None:
        self._redis = redis
        self._share = redis.script(_SHARE)
        self._digest = _digest(token)
        self._differs = False

    async def check(self) -> None:
        """Raise `StartupError` if other gateways have another token; pass without Redis."""
        with contextlib.suppress(RecordsUnwritable):
            await self.exchange()
        if self._differs:
            raise StartupError(
                "Other gateways on this Redis have another join token. For a second fleet, use "
                "another database in PACELINE_REDIS_URL, such as redis://host:6379/1. To join "
                "theirs, give all of them the same PACELINE_JOIN_TOKEN; to change it, stop all of "
                "them and wait ten seconds."
            )

    async def exchange(self) -> None:
        """Store the digest, or compare it; raise `RecordsUnwritable`, also if it differs."""
        await self._redis.call("join_token", self._compare)

    async def _compare(self) -> None:
        self._differs = not await self._share([_KEY], [self._digest, _EXPIRE_MS])
        if self._differs:
            raise OtherJoinToken


@functools.lru_cache(maxsize=1)
def _digest(token: str) -> str:
    # Slow, because a token that an operator made up could be guessed.
    return hashlib.scrypt(token.encode(), salt=_KEY.encode(), n=2**14, r=8, p=1, dklen=16).hex()
