"""Views of a fleet for decisions: its workers, and the number of requests at each."""

from collections.abc import Mapping
from typing import Any

from gateway.routing.load_cost import throughput_of
from gateway.routing.view import NO_MODELS, FleetView, ModelView, WorkerView
from paceline.protocol import LaneReport
from tests.support.scheduler_harness import worker_report
from tests.support.scripted_worker import lane_report


def view_of(
    name: str,
    *reports: LaneReport,
    busy: int | Mapping[str, int] = 0,
    models: tuple[str, ...] = ("demo",),
    labels: tuple[str, ...] = (),
    boot_id: str = "",
    by_model: Mapping[str, ModelView] = NO_MODELS,
    **load: Any,
) -> WorkerView:
    """Return a worker with these lanes, each with `busy` requests, or so many by its name."""
    view = WorkerView.of(name, models, reports, labels, boot_id, by_model=by_model)
    view.update(
        reports,
        lambda lane: busy if isinstance(busy, int) else busy[lane],
        **{
            "remote_requests": {},
            "throughput": throughput_of(worker_report(name, lanes=reports)),
            "prefill_until_s": 0.0,
            "answered_at_s": 0.0,
            **load,
        },
    )
    return view


def worker_view(name: str, model: str = "demo", **in_flight: int) -> WorkerView:
    """Return a worker with four rows per lane; `text_mtp=2` means two requests run there."""
    busy = {"text-mtp": in_flight.get("text_mtp", 0), "vlm": in_flight.get("vlm", 0)}
    return view_of(name, *map(lane_report, busy), busy=busy, models=(model,))


def fleet_view(*workers: WorkerView) -> FleetView:
    """Return a fleet of these workers, which knows only their models."""
    return FleetView.of(workers, frozenset(model for worker in workers for model in worker.models))
