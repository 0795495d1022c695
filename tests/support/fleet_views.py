"""A fleet as a decision sees it: its workers, and how many requests each has."""

from __future__ import annotations

from gateway.routing.view import FleetView, LaneView, WorkerView
from tests.support.scripted_worker import lane_report


def worker_view(name: str, model: str = "demo", **in_flight: int) -> WorkerView:
    """A worker of four rows a lane; `text_mtp=2` means two requests run there."""
    busy = {"text_mtp": 0, "vlm": 0, **in_flight}
    lanes = tuple(
        LaneView.of(lane_report(lane.replace("_", "-")), count) for lane, count in busy.items()
    )
    return WorkerView.of(name, (model,), lanes)


def fleet_view(*workers: WorkerView) -> FleetView:
    """These workers, and no model that none of them has."""
    return FleetView.of(workers, frozenset(model for one in workers for model in one.models))
