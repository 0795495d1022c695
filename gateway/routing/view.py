"""The fleet as routing decisions read it: workers, their lanes, and what a request costs there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from gateway.routing.cost import FULL, UNMEASURED, Throughput, load_cost_s
from gateway.types import WorkerBoot
from workers.protocol import LaneReport


class LaneView(NamedTuple):
    """One lane of one worker as routing sees it."""

    name: str
    in_flight: int
    """Sent by this gateway and not yet answered; counted at dispatch, not from reports."""
    slots: int
    load: float
    """Busy rows over all rows; above 1 something waits."""
    can_draft: bool
    """It has an MTP head that is on and healthy."""
    drafting_pays: bool
    """Drafting is worth it in the batch that one more request would be part of."""
    busy_rows: int
    """Busy ones, those of other gateways too."""
    report: LaneReport

    @classmethod
    def of(cls, report: LaneReport, in_flight: int, of_others: int = 0) -> Self:
        """Look at a lane that has so many requests now, beside those of other gateways."""
        rows = in_flight + of_others
        return cls(
            report.name,
            in_flight,
            report.slots,
            rows / max(1, report.slots),
            report.mtp_enabled and report.head_healthy,
            report.drafting_pays(rows + 1),
            rows,
            report,
        )


class LaneRef(NamedTuple):
    """One lane of one worker, with what decisions ask of the worker."""

    worker_id: str
    boot_id: str
    labels: tuple[str, ...]
    models: tuple[str, ...]
    lane: LaneView


LaneCost = tuple[float, float, float, float, LaneRef]
"""What a decision looks at of all lanes there are, and therefore a plain tuple: what one more
request costs there beside its own reading, until when the worker reads what it has, how long it
reads a token, when it answered last (all in seconds), and the seat."""
LaneCosts = Mapping[tuple[str, str], tuple[LaneCost, ...]]
"""By model and lane."""
Places = Mapping[tuple[str, str], Mapping[str, int]]
"""The same by worker: which of the rows is its own."""


class WorkerView(NamedTuple):
    """One worker that takes requests now."""

    worker_id: str
    models: tuple[str, ...]
    lanes: tuple[LaneView, ...]
    lane_costs: tuple[LaneCost, ...]
    """One for each lane."""
    labels: tuple[str, ...] = ()
    boot_id: str = ""

    @classmethod
    def of(
        cls,
        worker_id: str,
        models: tuple[str, ...],
        lanes: tuple[LaneView, ...],
        labels: tuple[str, ...] = (),
        boot_id: str = "",
        *,
        throughput: Throughput = UNMEASURED,
        reads_until_s: float = 0.0,
        heard_s: float = 0.0,
    ) -> Self:
        """Look at a worker of these lanes: they share one machine."""
        busy = 0
        for lane in lanes:
            busy += lane.busy_rows
        rows = [
            (
                load_cost_s(
                    throughput,
                    lane.report,
                    lane.busy_rows if lane.in_flight < lane.slots else lane.busy_rows * FULL,
                    busy - lane.busy_rows,
                    pays=lane.drafting_pays,
                )
                if busy or not lane.drafting_pays
                else throughput.memory_cost_s,
                reads_until_s,
                throughput.prefill_token_s,
                heard_s,
                LaneRef(worker_id, boot_id, labels, models, lane),
            )
            for lane in lanes
        ]
        return cls(worker_id, models, lanes, tuple(rows), labels, boot_id)

    def at_time(self, reads_until_s: float, heard_s: float) -> WorkerView:
        """Give the same worker with as many requests, at another moment."""
        worker_id, models, lanes, before, labels, boot_id = self
        rows = [
            (cost_s, reads_until_s, read_s, heard_s, seat) for cost_s, _, read_s, _, seat in before
        ]
        return WorkerView(worker_id, models, lanes, tuple(rows), labels, boot_id)


class FleetView(NamedTuple):
    """The fleet at one moment, for decisions. Make it with `of`."""

    workers: tuple[WorkerView, ...]
    """Those that take requests now."""
    known_models: frozenset[str]
    """All that were ever served here: a model whose only worker restarts is not unknown."""
    lane_costs: LaneCosts
    positions: Places
    now_s: float = 0.0
    """The moment, on the clock by which workers read and are heard."""
    prefix_boots: frozenset[WorkerBoot] = frozenset()
    """Those that hold the system prompt of the request that is to be decided."""
    prefix_tokens: int = 0
    """What they need not read of it; 0 where no worker has counted it yet."""

    @classmethod
    def of(
        cls, workers: tuple[WorkerView, ...], known_models: frozenset[str], now_s: float = 0.0
    ) -> Self:
        """Look at these workers."""
        rows = rows_of(workers)
        return cls(workers, known_models, rows, places_of(rows), now_s)

    @property
    def served_models(self) -> frozenset[str]:
        """Name the models that can answer now."""
        return frozenset([model for model, _ in self.lane_costs])


def rows_of(workers: Iterable[WorkerView]) -> LaneCosts:
    """Sort the lanes of workers by what they are asked for."""
    rows: dict[tuple[str, str], list[LaneCost]] = {}
    for worker in workers:
        for model in worker.models:
            for row in worker.lane_costs:
                rows.setdefault((model, row[4].lane.name), []).append(row)
    return {asked: tuple(found) for asked, found in rows.items()}


def places_of(rows: LaneCosts) -> Places:
    """Tell where among the rows each worker stands; that changes only with who is there."""
    return {
        asked: {row[4].worker_id: place for place, row in enumerate(found)}
        for asked, found in rows.items()
    }
