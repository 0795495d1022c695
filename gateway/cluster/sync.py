"""The exchanges between gateways over Redis, twice a second and beside all requests.

Each part has a copy in memory, which requests read. After a failed exchange the copy stays as it
is until the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.cluster.rate_limits import SharedRateLimits
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S
from gateway.periodic import Work
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.state.join_token import SharedJoinToken
from gateway.state.records import Records
from gateway.state.redis import RedisClient
from gateway.state.worker_reports import SharedWorkerReports
from paceline.protocol import WorkerReport

# After one missed heartbeat, the gateway that gets them may be gone, or Redis.
_PROBE_AFTER_S = 3.0
_NAMED = 3
"""Of the records that cannot be used."""


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
        last = {report.worker_id: (report, age_s) for report, age_s in updates}.values()
        silent = ((one, age_s) for one, age_s in last if age_s and age_s > HEARTBEAT_TIMEOUT_S)
        await self._report_client.recall(silent)
        for report, age_s in updates:
            if age_s is not None:
                if self._fleet.merge_remote(report, age_s):
                    self._prefixes.record_report(report)
            elif (worker := self._fleet.get(report.worker_id)) is not None and (
                worker.report.boot_id == report.boot_id
            ):
                self._fleet.remove(report.worker_id)

    async def probe_silent(self) -> None:
        """Probe workers whose heartbeats to another gateway no longer arrive here."""
        silent = [
            worker
            for worker in self._fleet.workers()
            if not worker.local and worker.heartbeat_age_s > _PROBE_AFTER_S
        ]
        await asyncio.gather(*(self._report_client.probe(worker.report) for worker in silent))


@dataclass(frozen=True, slots=True)
class ClusterSync:
    """The exchange with other gateways over Redis, or with the next process of this one."""

    records: Records
    read_workers: Work
    """Finds out the workers before this gateway serves."""
    redis: RedisClient | None = None
    join_token: SharedJoinToken | None = None
    rate_limits: SharedRateLimits | None = None
    exchanges: tuple[Work, ...] = ()
    """Run periodically."""
    final_exchanges: tuple[Work, ...] = ()
    """Run once at the end."""

    async def check(self) -> None:
        """Raise `StartupError` if this gateway cannot share the Redis with the others."""
        if self.join_token is not None:
            await self.join_token.check()

    def status(self) -> dict[str, Any]:
        """Return the part `store` of `/v1/status`."""
        kind = "memory" if self.redis is None else "redis"
        gateways = 1 if self.rate_limits is None else self.rate_limits.gateways
        return {
            "kind": kind,
            "state": "degraded" if self.problems else "ok",
            "problem": self.problem,
            "file_problem": self.records.problem,
            "record_problem": self.record_problem,
            "gateways": gateways,
        }

    @property
    def problems(self) -> str:
        """Return the problems with Redis, the state folder and its records, or an empty string."""
        problems = (self.problem, self.records.problem, self.record_problem)
        return " ".join(filter(None, problems))

    @property
    def record_problem(self) -> str:
        """Return which stored records are not active here; the log has the reasons."""
        readers = reversed(self.records.readers)  # the policy is first
        found = [f"{one.kind} {name}" for one in readers for name in one.skipped]
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        named = ", ".join(found[:_NAMED]) + more
        return named and f"This gateway cannot use what is stored as {named}. Its log says why."

    @property
    def problem(self) -> str:
        """Return the latest problem with Redis, or an empty string."""
        return "" if self.redis is None else self.redis.problem
