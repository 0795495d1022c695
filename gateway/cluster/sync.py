"""What gateways tell each other over Redis, twice a second and beside all requests.

Every part has its own copy in memory, which is what requests read. A part that cannot be shared now
stays as it was last known, and is tried again with the next turn.

The workers of other gateways: heard of over Redis, and asked where nobody tells of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.cluster.counters import SharedCounters
from gateway.cluster.prefix_claims import SharedPrefixClaims
from gateway.cluster.rate_limits import SharedRateLimits
from gateway.cluster.redis import RedisClient
from gateway.cluster.worker_reports import SharedWorkerReports
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.scheduler import Scheduler
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, WorkerState
from gateway.periodic import Work
from gateway.routing.prefix_affinity import PrefixIndex
from workers.protocol import WorkerReport

# One beat missed: its gateway may be gone, or Redis.
_ASK_AFTER_S = 3.0


class PeerWorkers:
    """Keeps the workers of all gateways in the fleet of this one."""

    def __init__(
        self,
        boots: SharedWorkerReports,
        fleet: WorkerRegistry,
        dispatch: Scheduler,
        control: ReportClient,
        prefixes: PrefixIndex,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._boots = boots
        self._fleet = fleet
        self._dispatch = dispatch
        self._control = control
        self._prefixes = prefixes
        self._clock = clock
        self._told: dict[str, tuple[WorkerReport, float]] = {}
        """Workers heard here, and when they were heard last, as Redis knows."""

    async def exchange(self) -> None:
        """Tell of the workers that were heard here, and hear of the others'."""
        here = {
            member.report.worker_id: (member.report, member.local_heartbeat_at_s)
            for member in self._fleet.workers()
            if member.listed is None and member.local_heartbeat_at_s > float("-inf")
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
            if name not in here and now_s - at_s < HEARTBEAT_TIMEOUT_S
        ]
        heard = await self._boots.exchange(news, left)
        self._told = here
        for report, age_s in heard:
            if age_s is not None:
                if self._fleet.merge_remote(report, age_s):
                    self._prefixes.record_report(report)
            elif self._is_member(report):
                self._fleet.remove(report.worker_id)
        self._dispatch.wake()

    async def ask_silent(self) -> None:
        """Ask workers that beat elsewhere whether they are there, where nobody tells of them."""
        silent = [
            member
            for member in self._fleet.workers()
            if not member.local and self._fleet.heartbeat_age_s(member) > _ASK_AFTER_S
        ]
        await asyncio.gather(*(self._ask(member) for member in silent))

    async def _ask(self, member: WorkerState) -> None:
        if await self._control.probe(member.report):
            self._dispatch.wake()

    def _is_member(self, report: WorkerReport) -> bool:
        return any(
            member.report.worker_id == report.worker_id and member.report.boot_id == report.boot_id
            for member in self._fleet.workers()
        )


class SharedState(NamedTuple):
    """All that is shared over one Redis."""

    link: RedisClient
    store: SharedCounters
    boots: SharedWorkerReports
    limits: SharedRateLimits
    prefixes: SharedPrefixClaims


class ClusterSync:
    """The exchange with other gateways over Redis; without Redis it has no work."""

    def __init__(self, shared: SharedState | None, neighbours: PeerWorkers | None) -> None:
        self._shared = shared
        self.exchanges: tuple[Work, ...] = ()
        """Run periodically."""
        self.final_exchanges: tuple[Work, ...] = ()
        """Run once at the end."""
        if shared is not None and neighbours is not None:
            self.exchanges = (
                shared.store.exchange,
                shared.limits.exchange,
                shared.prefixes.exchange,
                neighbours.exchange,
                neighbours.ask_silent,
            )
            self.final_exchanges = (shared.store.exchange, shared.limits.leave)

    def status(self) -> dict[str, Any]:
        """Tell, for `/v1/status`, where state is kept and how it is with that."""
        if self._shared is None:
            return {"kind": "memory", "state": "ok", "problem": "", "gateways": 1}
        link = self._shared.link
        state = "degraded" if link.degraded else "ok"
        gateways = self._shared.limits.gateways
        return {"kind": "redis", "state": state, "problem": link.problem, "gateways": gateways}

    @property
    def problem(self) -> str:
        """Say what is wrong with what is shared; empty where nothing is."""
        return "" if self._shared is None else self._shared.link.problem
