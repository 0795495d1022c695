"""The workers of a gateway without Redis, kept over its restart, so that it serves at once.

A worker that does not answer then is missing, and shown as such.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import RecordsUnwritable
from gateway.fleet.engine_watch import BOOT_ID
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import AbsenceKind, WorkerRegistry
from gateway.state.counters import MAX_WORKERS
from gateway.state.records import FileRecords
from paceline.protocol import WorkerReport

_KIND = "workers"
_KEEP_EVERY_S = 60.0


class _Known(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    report: WorkerReport
    kind: AbsenceKind | None = None
    """None: it lived when this was written."""
    unix_s: float


class _AllKnown(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: tuple[_Known, ...] = Field(max_length=2 * MAX_WORKERS)


class KnownWorkers:
    """What one gateway keeps of its workers, under a name that no other gateway of the folder has.

    `clock` is monotonic, `wall` returns seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        fleet: WorkerRegistry,
        report_client: ReportClient,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._records, self._name = FileRecords(folder / "workers.json"), name
        self._fleet = fleet
        self._report_client = report_client
        self._clock = clock
        self._wall = wall
        self._kept: list[tuple[str, str, str, AbsenceKind | None]] = []
        self._kept_at_s = float("-inf")

    async def recall(self) -> None:
        """Ask the workers of the last process whether they still live."""
        try:
            text = (await self._records.all(_KIND)).get(self._name, "")
            known = _AllKnown.model_validate_json(text).workers
        except (RecordsUnwritable, ValidationError):  # none yet, or of another version
            return
        now = self._wall()
        await self._report_client.recall(
            [(one.report, one.kind, max(0.0, now - one.unix_s)) for one in known]
        )

    async def keep(self) -> None:
        """Store the workers if others are here than before; those that live, once a minute."""
        now, now_s = self._wall(), self._clock()
        reports = [one.report for one in self._fleet.workers()]
        gone = self._fleet.absences().values()
        here: list[tuple[WorkerReport, AbsenceKind | None, float]] = [
            *((report, None, now) for report in reports),
            *((one.report, one.kind, now - now_s + one.since_s) for one in gone),
        ]
        here = [one for one in here if one[0].boot_id != BOOT_ID]  # the settings list engines
        names = [(one.worker_id, one.boot_id, one.url, kind) for one, kind, _ in here]
        due = any(kind is None for *_, kind in names) and now_s - self._kept_at_s >= _KEEP_EVERY_S
        if names != self._kept or due:
            known = [_Known(report=one.bare(), kind=kind, unix_s=at) for one, kind, at in here]
            text = _AllKnown(workers=tuple(known)).model_dump_json()
            await self._records.replace(_KIND, self._name, text)
            self._kept, self._kept_at_s = names, now_s
