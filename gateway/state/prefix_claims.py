"""Claims that workers have cached prompts, exchanged between gateways by a Redis stream.

A lost claim costs one prompt that is read again.
"""

from __future__ import annotations

import contextlib
import json

from pydantic import TypeAdapter, ValidationError

from gateway.routing.prefix_affinity import MAX_PENDING_CLAIMS, PrefixClaim, PrefixIndex
from gateway.state.redis import RedisClient
from gateway.state.shared_stream import SharedStream
from gateway.state.shares import CLAIMS

_MAX_ENTRIES = 200_000
"""One for each turn."""
_PAGES = 5
"""Of claims that a gateway reads in one exchange if it has just started."""
_CLAIM = TypeAdapter(PrefixClaim)


class SharedPrefixClaims:
    """The claims that gateways share. Only one task calls `exchange`."""

    def __init__(self, redis: RedisClient, prefixes: PrefixIndex) -> None:
        self._stream = SharedStream(
            redis, "prefixes", "claims", "claim", max_entries=_MAX_ENTRIES, share=CLAIMS
        )
        self._prefixes = prefixes
        self._unsent: list[PrefixClaim] = []

    async def exchange(self) -> None:
        """Send the claims made here since the last exchange, and merge those of other gateways."""
        self._unsent = [*self._unsent, *self._prefixes.take_pending()][-MAX_PENDING_CLAIMS:]
        for _ in range(_PAGES):
            entries = await self._stream.exchange([json.dumps(claim) for claim in self._unsent])
            self._unsent = []
            for entry in entries:
                with contextlib.suppress(ValidationError):  # of another version of Paceline
                    self._prefixes.merge(_CLAIM.validate_json(entry.text), entry.age_s)
            if not self._stream.behind:
                break
