"""Deletion of cached conversations at the workers, when the last key of their scope has ended.

The job compares the isolation scopes of ended keys with what each boot of a worker has confirmed,
so a worker that was away deletes them when it is back. A worker deletes files that nobody uses by
itself within a week; keys that ended earlier have left nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gateway.errors import CacheNotCleared, WorkerUnknown
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.types import Caller, WorkerBoot
from paceline.protocol import MAX_DELETED_SCOPES, PREFIX_FILES_TTL_S, WorkerReport
from policies.sections import PrefixPolicy

log = logging.getLogger(__name__)
_MARGIN_S = 86_400.0
_ISOLATIONS = (PrefixPolicy(isolation="key"), PrefixPolicy(isolation="team"))
"""A policy may have isolated by either while the key was in use."""


class PrefixDeletion:
    """Deletes what workers have cached of isolation scopes; `wall` returns seconds since 1970.

    `callers_since` returns the callers of valid keys, and of keys that have ended since a time;
    `cache_salt` the name by which workers know the scope of a caller.
    """

    def __init__(
        self,
        fleet: WorkerRegistry,
        control: ReportClient,
        callers_since: Callable[[float], tuple[list[Caller], list[Caller]]],
        cache_salt: Callable[[Caller, PrefixPolicy], str],
        wall: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._control = control
        self._callers_since = callers_since
        self._cache_salt = cache_salt
        self._wall = wall
        self._confirmed: dict[WorkerBoot, frozenset[str]] = {}

    async def delete_ended(self) -> None:
        """Let each worker delete the scopes of ended keys that it has not confirmed yet."""
        ended, confirmed = self._ended_scopes(), self._confirmed
        workers = {(one.worker_id, one.boot_id): one for one in self._workers()}
        self._confirmed = {boot: confirmed.get(boot, frozenset()) & ended for boot in workers}
        for boot, worker in workers.items():
            scopes = sorted(ended - self._confirmed[boot])[:MAX_DELETED_SCOPES]
            if scopes and await self._control.delete_prefixes(worker, scopes):
                self._confirmed[boot] |= frozenset(scopes)
                log.info("prefix_cache.deleted worker=%s scopes=%d", worker.worker_id, len(scopes))

    async def clear(self, worker_id: str) -> None:
        """Let a worker empty its prefix cache; raise `WorkerUnknown`, or `CacheNotCleared`."""
        worker = self._fleet.get(worker_id)
        if worker is None or not worker.backend.sends_reports:
            raise WorkerUnknown
        ready = worker.report in self._workers()
        if not ready or not await self._control.delete_prefixes(worker.report, ()):
            raise CacheNotCleared
        log.info("prefix_cache.cleared worker=%s", worker_id)

    def _workers(self) -> list[WorkerReport]:
        return [
            one.report
            for one in self._fleet.workers()
            if one.backend.sends_reports and one.confirmed and one.report.ready
        ]

    def _ended_scopes(self) -> frozenset[str]:
        """Return the scopes of keys that have ended lately, without those of a valid key."""
        valid, ended = self._callers_since(self._wall() - PREFIX_FILES_TTL_S - _MARGIN_S)
        scopes, shared = (
            {self._cache_salt(caller, rules) for caller in callers for rules in _ISOLATIONS}
            for callers in (ended, valid)
        )
        return frozenset(scopes - shared)
