"""The workers of a gateway without Redis, kept over its restart, so that it serves at once."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import TypeAdapter, ValidationError

from gateway.errors import RecordsUnwritable
from gateway.fleet.engine_watch import BOOT_ID
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.state.records import FileRecords
from paceline.protocol import WorkerReport

_KIND = "workers"
_KEEP_EVERY_S = 60.0
_KNOWN = TypeAdapter(list[tuple[float, WorkerReport]])
"""When each worker gave its last sign, in seconds since 1970, and its last report."""


class KnownWorkers:
    """The workers of one gateway, stored under a name that no other gateway of the folder has.

    `clock` is monotonic, `wall` returns seconds since 1970.
    """

    def __init__(
        self,
        records: FileRecords,
        name: str,
        fleet: WorkerRegistry,
        report_client: ReportClient,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._records, self._name = records, name
        self._fleet, self._report_client = fleet, report_client
        self._clock, self._wall = clock, wall
        self._kept: object = []
        self._kept_at_s = float("-inf")

    async def recall(self) -> None:
        """Ask the workers of the last process whether they still live."""
        try:
            text = (await self._records.all(_KIND)).get(self._name, "[]")
            known = _KNOWN.validate_json(text)
        except (RecordsUnwritable, ValidationError):  # of another version
            return
        now = self._wall()
        await self._report_client.recall((report, max(0.0, now - at)) for at, report in known)

    async def keep(self) -> None:
        """Store the workers if others are here, or missing, than before, else once a minute."""
        now, now_s = self._wall(), self._clock()
        missing = [one for one in self._fleet.absences().values() if one.kind == "silent"]
        known = [(now, worker.report) for worker in self._fleet.workers()]
        known += [(now - now_s + one.since_s, one.report) for one in missing]
        known = [one for one in known if one[1].boot_id != BOOT_ID]  # the settings list engines
        names = [(report.worker_id, report.boot_id, report.url) for _, report in known]
        if names != self._kept or (known and now_s - self._kept_at_s >= _KEEP_EVERY_S):
            text = _KNOWN.dump_json([(at, report.bare()) for at, report in known]).decode()
            await self._records.replace(_KIND, self._name, text)
            self._kept, self._kept_at_s = names, now_s
