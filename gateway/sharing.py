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

from gateway.control import Control
from gateway.dispatch import Dispatch
from gateway.errors import RecordsUnwritable
from gateway.fleet import SILENT_AFTER_S, Fleet, Member
from gateway.keys.book import KeyBook
from gateway.policy_book import PolicyBook
from gateway.redis_boots import RedisBoots
from gateway.redis_limits import RedisLimits
from gateway.redis_link import RedisLink
from gateway.redis_prefixes import RedisPrefixes
from gateway.redis_store import RedisStore
from workers.adapters.report import WorkerReport

log = logging.getLogger(__name__)

TURN_S = 0.5
# One beat missed: its gateway may be gone, or Redis.
_ASK_AFTER_S = 3.0


class Shared(NamedTuple):
    """All that is shared over one Redis."""

    link: RedisLink
    store: RedisStore
    boots: RedisBoots
    limits: RedisLimits
    prefixes: RedisPrefixes


class Neighbours:
    """Keeps the workers of all gateways in the fleet of this one."""

    def __init__(
        self,
        boots: RedisBoots,
        fleet: Fleet,
        dispatch: Dispatch,
        control: Control,
        clock: Callable[[], float],
    ) -> None:
        self._boots = boots
        self._fleet = fleet
        self._dispatch = dispatch
        self._control = control
        self._clock = clock
        self._told: dict[str, tuple[WorkerReport, float]] = {}
        """Workers heard here, and when they were heard last, as Redis knows."""

    async def exchange(self) -> None:
        """Tell of the workers that were heard here, and hear of the others'."""
        here = {
            member.report.worker_id: (member.report, member.asked_at_s)
            for member in self._fleet.members()
            if member.listed is None and member.asked_at_s > float("-inf")
        }
        now_s = self._clock()
        news = [
            (report, now_s - at_s)
            for name, (report, at_s) in here.items()
            if name not in self._told or self._told[name][1] < at_s
        ]
        left = [
            report
            for name, (report, at_s) in self._told.items()
            if name not in here and now_s - at_s < SILENT_AFTER_S
        ]
        heard = await self._boots.exchange(news, left)
        self._told = here
        for report, age_s in heard:
            if age_s is not None:
                self._fleet.hear(report, age_s)
            elif self._is_member(report):
                self._fleet.leave(report.worker_id)
        self._dispatch.serve_waiting()

    async def ask_silent(self) -> None:
        """Ask workers that beat elsewhere whether they are there, where nobody tells of them."""
        silent = [
            member
            for member in self._fleet.members()
            if not member.joined_here and self._fleet.age_s(member) > _ASK_AFTER_S
        ]
        await asyncio.gather(*(self._ask(member) for member in silent))

    async def _ask(self, member: Member) -> None:
        if await self._control.knock(member.report):
            self._dispatch.serve_waiting()

    def _is_member(self, report: WorkerReport) -> bool:
        return any(
            member.report.worker_id == report.worker_id and member.report.boot_id == report.boot_id
            for member in self._fleet.members()
        )


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
            return {"kind": "memory", "state": "ok"}
        link = self._shared.link
        told = {"kind": "redis", "gateways": self._shared.limits.gateways}
        return told | ({"state": "degraded", "why": link.why} if link.degraded else {"state": "ok"})

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
