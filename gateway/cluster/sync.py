"""The exchanges between gateways over Redis, twice a second and beside all requests.

Each part has a copy in memory, which requests read. After a failed exchange the copy stays as it
is until the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.cluster.counters import SharedCounters
from gateway.cluster.prefix_claims import SharedPrefixClaims
from gateway.cluster.rate_limits import SharedRateLimits
from gateway.cluster.redis import RedisClient
from gateway.cluster.worker_reports import SharedWorkerReports, boot_name
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S
from gateway.periodic import Work
from gateway.routing.prefix_affinity import PrefixIndex
from workers.protocol import WorkerReport

# After one missed heartbeat, the gateway that gets them may be gone, or Redis.
_PROBE_AFTER_S = 3.0


class SharedState(NamedTuple):
    """The parts that gateways share over one Redis."""

    redis: RedisClient
    counters: SharedCounters
    reports: SharedWorkerReports
    rate_limits: SharedRateLimits
    prefix_claims: SharedPrefixClaims


class PeerWorkers:
    """The workers of other gateways, merged into the registry of this one."""

    def __init__(
        self,
        reports: SharedWorkerReports,
        fleet: WorkerRegistry,
        report_client: ReportClient,
        prefixes: PrefixIndex,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._reports = reports
        self._fleet = fleet
        self._report_client = report_client
        self._prefixes = prefixes
        self._clock = clock
        self._sent: dict[str, tuple[WorkerReport, float]] = {}
        """Workers that sent heartbeats to this gateway, and the last heartbeat that Redis has."""

    async def exchange(self) -> None:
        """Send heartbeats and departures of this gateway, and merge those of other gateways."""
        local = {
            worker.report.worker_id: (worker.report, worker.local_heartbeat_at_s)
            for worker in self._fleet.workers()
            if worker.backend.sends_reports and worker.local_heartbeat_at_s > float("-inf")
        }
        now_s = self._clock()
        heartbeats = [
            (report, now_s - at_s)
            for worker_id, (report, at_s) in local.items()
            if worker_id not in self._sent or self._sent[worker_id][1] < at_s
        ]
        departures = [
            report
            for worker_id, (report, at_s) in self._sent.items()
            if worker_id not in local and now_s - at_s < HEARTBEAT_TIMEOUT_S
        ]
        updates = await self._reports.exchange(heartbeats, departures)
        self._sent = local
        for report, age_s in updates:
            if age_s is not None:
                if self._fleet.merge_remote(report, age_s):
                    self._prefixes.record_report(report)
            elif boot_name(report) in {boot_name(one.report) for one in self._fleet.workers()}:
                self._fleet.remove(report.worker_id)

    async def probe_silent(self) -> None:
        """Probe workers whose heartbeats to another gateway no longer arrive here."""
        silent = [
            worker
            for worker in self._fleet.workers()
            if not worker.local and self._fleet.heartbeat_age_s(worker) > _PROBE_AFTER_S
        ]
        await asyncio.gather(*(self._report_client.probe(worker.report) for worker in silent))


class ClusterSync:
    """The exchange with other gateways over Redis; without Redis it has no work."""

    def __init__(self, shared: SharedState | None, peers: PeerWorkers | None) -> None:
        self._shared = shared
        self.exchanges: tuple[Work, ...] = ()
        """Run periodically."""
        self.final_exchanges: tuple[Work, ...] = ()
        """Run once at the end."""
        if shared is not None and peers is not None:
            self.exchanges = (
                shared.counters.exchange,
                shared.rate_limits.exchange,
                shared.prefix_claims.exchange,
                peers.exchange,
                peers.probe_silent,
            )
            self.final_exchanges = (shared.counters.exchange, shared.rate_limits.leave)

    def status(self) -> dict[str, Any]:
        """Return the part `store` of `/v1/status`."""
        if self._shared is None:
            return {"kind": "memory", "state": "ok", "problem": "", "gateways": 1}
        redis, gateways = self._shared.redis, self._shared.rate_limits.gateways
        state = "degraded" if redis.problem else "ok"
        return {"kind": "redis", "state": state, "problem": redis.problem, "gateways": gateways}

    @property
    def problem(self) -> str:
        """Return the latest problem with Redis, or an empty string."""
        return "" if self._shared is None else self._shared.redis.problem
