"""What gateways tell each other over Redis, twice a second and beside all requests.

Every part has its own copy in memory, which is what requests read. A part that cannot be shared now
stays as it was last known, and is tried again with the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from gateway.errors import RecordsUnwritable
from gateway.keys.book import KeyBook
from gateway.neighbours import Neighbours
from gateway.policy_book import PolicyBook
from gateway.redis_boots import RedisBoots
from gateway.redis_limits import RedisLimits
from gateway.redis_link import RedisLink
from gateway.redis_prefixes import RedisPrefixes
from gateway.redis_store import RedisStore

log = logging.getLogger(__name__)

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

    def __init__(
        self,
        shared: Shared | None,
        neighbours: Neighbours | None,
        book: PolicyBook,
        keys: KeyBook,
    ) -> None:
        self._shared = shared
        self._turns: tuple[Callable[[], Awaitable[None]], ...] = ()
        if shared is not None and neighbours is not None:
            self._turns = (
                shared.store.exchange,
                shared.limits.exchange,
                shared.prefixes.exchange,
                neighbours.exchange,
                neighbours.ask_silent,
                book.catch_up,
                keys.refresh,
            )
        self._broken: set[str] = set()

    def told(self) -> dict[str, Any]:
        """Tell, for `/v1/status`, where state is kept and how it is with that."""
        if self._shared is None:
            return {"kind": "memory", "state": "ok", "why": "", "gateways": 1}
        link = self._shared.link
        state = "degraded" if link.degraded else "ok"
        why = link.why if link.degraded else ""
        gateways = self._shared.limits.gateways
        return {"kind": "redis", "state": state, "why": why, "gateways": gateways}

    @property
    def why_degraded(self) -> str:
        """Say what is wrong with what is shared; empty where nothing is."""
        return "" if self._shared is None else self._shared.link.why

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._go_on(turn), name=f"sharing {turn.__qualname__}")
            for turn in self._turns
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._shared is not None:
            await self._safely(self._shared.store.exchange)
            await self._safely(self._shared.limits.leave)

    async def _go_on(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Take turns, for ever; each part by itself, so that a slow one holds up no other."""
        while True:
            await asyncio.sleep(TURN_S)
            await self._safely(turn)

    async def _safely(self, turn: Callable[[], Awaitable[None]]) -> None:
        name = turn.__qualname__
        try:
            await turn()
            self._broken.discard(name)
        except RecordsUnwritable:
            pass  # the link tells, and how it is with Redis stands in the state
        except Exception:
            if name not in self._broken:
                log.exception("sharing.broken part=%s", name)
            self._broken.add(name)
