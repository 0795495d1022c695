"""Cordons: workers that get no new requests until an admin removes the cordon.

A cordon outlives the worker and this gateway, because most cordoned workers are stopped, changed
and started again. Gateways that share their records share the cordons.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict

from gateway.errors import WorkerUnknown
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.state.records import RecordReader, Records, RecordTable, as_model

log = logging.getLogger(__name__)

_DRAIN_CHECK_S = 0.1


class Cordon(BaseModel):
    """The cordon of one worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    since: AwareDatetime
    author: str = "unknown"


class Cordons:
    """All cordons; `wall` returns seconds since 1970.

    Within `propagation_s`, all gateways have read a change.
    """

    def __init__(
        self,
        records: Records,
        fleet: WorkerRegistry,
        report_client: ReportClient,
        wall: Callable[[], float],
        propagation_s: float,
    ) -> None:
        self._table = RecordTable(records, "cordons", self._apply)
        self._reader = RecordReader(records, "cordons", as_model(Cordon))
        self._shared = records.remote
        self._fleet = fleet
        self._report_client = report_client
        self._wall = wall
        self._propagation_s = propagation_s
        self.by_worker: Mapping[str, Cordon] = {}

    async def refresh(self) -> None:
        """Read the stored cordons, and apply the changes of other gateways."""
        await self._table.refresh()

    async def add(self, worker_id: str, author: str) -> None:
        """Cordon a worker, whose running requests continue; raise `WorkerUnknown`."""
        self._check_known(worker_id)
        cordon = Cordon(since=datetime.fromtimestamp(int(self._wall()), UTC), author=author)
        text = cordon.model_dump_json()
        added = await self._table.add(worker_id, text)
        if not added and worker_id not in self.by_worker:  # its record is unreadable
            await self._table.replace(worker_id, text)
            added = True
        if added:
            log.info("worker.cordoned worker=%s author=%r", worker_id, author)

    async def remove(self, worker_id: str, author: str) -> None:
        """Remove the cordon of a worker; raise `WorkerUnknown`."""
        await self.refresh()  # another gateway may have added it just now
        self._check_known(worker_id)
        cordoned = worker_id in self.by_worker
        await self._table.remove(worker_id)
        if cordoned:
            log.info("worker.uncordoned worker=%s author=%r", worker_id, author)

    async def drained(self, worker_id: str, timeout_s: float) -> bool:
        """Wait until a cordoned worker has no requests; return False after the timeout.

        The wait ends when the cordon is removed at any gateway. The worker itself reports the
        requests of other gateways, once all of them have read the cordon. A report of before the
        last request of this gateway ended may be about that one, so the worker is asked anew.
        """
        first_check = round(self._propagation_s / _DRAIN_CHECK_S) if self._shared else 0
        for check in range(int(timeout_s / _DRAIN_CHECK_S) + 1):
            if worker_id not in self.by_worker:
                break
            worker = self._fleet.get(worker_id)
            if check >= first_check and not (worker and worker.in_flight.total()):
                if worker is not None and worker.backend.sends_reports:
                    await self._report_client.probe(worker.report)
                worker = self._fleet.get(worker_id)
                if worker is None or not worker.reported_requests:
                    return True
            await asyncio.sleep(_DRAIN_CHECK_S)
        return False

    async def _apply(self, texts: Mapping[str, str]) -> None:
        self.by_worker = self._reader.read(texts)
        self._fleet.set_cordoned(frozenset(self.by_worker))

    def _check_known(self, worker_id: str) -> None:
        """Raise `WorkerUnknown` unless the worker is in the fleet, lost or cordoned."""
        known = {*self.by_worker, *self._reader.skipped, *self._fleet.absences()}
        if worker_id not in known and self._fleet.get(worker_id) is None:
            raise WorkerUnknown
