"""What gateways tell each other over Redis, twice a second and beside all requests.

Every part has its own copy in memory, which is what requests read. A part that cannot be shared now
stays as it was last known, and is tried again with the next turn.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Self

from gateway.cluster.counters import RedisStore
from gateway.cluster.prefix_claims import RedisPrefixes
from gateway.cluster.rate_limits import RedisLimits
from gateway.cluster.redis import RedisLink
from gateway.cluster.worker_reports import RedisBoots
from gateway.errors import RecordsUnwritable
from gateway.neighbours import Neighbours
from gateway.periodic import Turns, Work

TURN_S = 0.5


class Shared(NamedTuple):
    """All that is shared over one Redis."""

    link: RedisLink
    store: RedisStore
    boots: RedisBoots
    limits: RedisLimits
    prefixes: RedisPrefixes


class Sharing:
    """The context in which a gateway shares; without Redis it does nothing."""

    def __init__(self, shared: Shared | None, neighbours: Neighbours | None) -> None:
        self._shared = shared
        works: tuple[Work, ...] = ()
        if shared is not None and neighbours is not None:
            works = (
                shared.store.exchange,
                shared.limits.exchange,
                shared.prefixes.exchange,
                neighbours.exchange,
                neighbours.ask_silent,
            )
        # That records are unwritable the link tells, and how it is with Redis stands in the state.
        self._turns = Turns([(work, TURN_S) for work in works], untold=(RecordsUnwritable,))

    def told(self) -> dict[str, Any]:
        """Tell, for `/v1/status`, where state is kept and how it is with that."""
        if self._shared is None:
            return {"kind": "memory", "state": "ok", "why": "", "gateways": 1}
        link = self._shared.link
        state = "degraded" if link.degraded else "ok"
        gateways = self._shared.limits.gateways
        return {"kind": "redis", "state": state, "why": link.why, "gateways": gateways}

    @property
    def why_degraded(self) -> str:
        """Say what is wrong with what is shared; empty where nothing is."""
        return "" if self._shared is None else self._shared.link.why

    async def __aenter__(self) -> Self:
        await self._turns.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._turns.__aexit__(kind, error, trace)
        if self._shared is not None:
            await self._turns.take(self._shared.store.exchange)
            await self._turns.take(self._shared.limits.leave)
