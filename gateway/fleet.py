"""The live worker table: who beats, who is busy, who is set aside."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gateway.domain import FleetView, LaneView, WorkerView
from gateway.errors import WorkerIdTaken, WorkerUnreachable
from workers.adapters.report import WorkerReport

BEAT_S = 2.0
"""How often a worker is asked to beat."""
SILENT_AFTER_S = 7.0
"""Three beats missed: out, and so within ten seconds in every case."""


@dataclass(slots=True)
class Member:
    """One boot of one worker; only `Fleet` changes it."""

    report: WorkerReport
    beaten_at_s: float
    set_aside: bool = False
    in_flight: Counter[str] = field(default_factory=Counter)

    @property
    def open(self) -> bool:
        """Say whether it takes new requests, as far as it and we know."""
        return self.report.ready and not self.report.draining and not self.set_aside


class Fleet:
    """Workers by id. `clock` is monotonic; one event loop owns the table, so nothing is locked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._known_models: set[str] = set()

    def beat(self, report: WorkerReport) -> None:
        """Take in a heartbeat; raise `WorkerIdTaken` when another live worker holds the id."""
        member = self._members.get(report.worker_id)
        if member is not None and member.report.boot_id == report.boot_id:
            member.report = report
            member.beaten_at_s = self._clock()
            member.set_aside = False
        elif member is None or member.report.url == report.url or not self._live(member):
            # A new boot starts with no requests; those of the old one still count on the old entry.
            self._members[report.worker_id] = Member(report, beaten_at_s=self._clock())
        else:
            raise WorkerIdTaken
        self._known_models.add(report.model)

    def refresh(self, report: WorkerReport) -> None:
        """Take in what a worker said when it was asked; that is no heartbeat."""
        member = self._members.get(report.worker_id)
        if member is not None and member.report.boot_id == report.boot_id:
            member.report = report

    def leave(self, worker_id: str) -> None:
        """Forget a worker that said goodbye."""
        self._members.pop(worker_id, None)

    def set_aside(self, worker_id: str) -> None:
        """Send nothing more to a worker that refused a connection, until its next beat."""
        if worker_id in self._members:
            self._members[worker_id].set_aside = True

    @contextlib.contextmanager
    def dispatched(self, worker_id: str, lane: str) -> Iterator[WorkerReport]:
        """Count one request while the context lasts; raise `WorkerUnreachable` if it is gone."""
        member = self._members.get(worker_id)
        if member is None:
            raise WorkerUnreachable
        member.in_flight[lane] += 1
        try:
            yield member.report
        finally:
            member.in_flight[lane] -= 1

    def members(self) -> tuple[Member, ...]:
        """List the live workers, also those that take nothing now."""
        self._expire()
        return tuple(self._members.values())

    def view(self) -> FleetView:
        """Take an immutable snapshot for decisions."""
        return FleetView(
            workers=tuple(_view(member) for member in self.members() if member.open),
            known_models=frozenset(self._known_models),
        )

    def age_s(self, member: Member) -> float:
        """Tell how long ago a worker beat last."""
        return self._clock() - member.beaten_at_s

    def _live(self, member: Member) -> bool:
        return self.age_s(member) <= SILENT_AFTER_S

    def _expire(self) -> None:
        silent = [name for name, member in self._members.items() if not self._live(member)]
        for name in silent:
            del self._members[name]


def _view(member: Member) -> WorkerView:
    return WorkerView(
        worker_id=member.report.worker_id,
        model=member.report.model,
        lanes=tuple(
            LaneView(report=lane, in_flight=member.in_flight[lane.name])
            for lane in member.report.lanes
        ),
    )
