"""Views of a fleet for decisions: its workers, and the number of requests at each."""

from gateway.routing.view import FleetView, LaneView, WorkerView
from tests.support.scripted_worker import lane_report


def worker_view(name: str, model: str = "demo", **in_flight: int) -> WorkerView:
    """Return a worker with four rows per lane; `text_mtp=2` means two requests run there."""
    busy = {"text_mtp": 0, "vlm": 0, **in_flight}
    lanes = tuple(
        LaneView.of(lane_report(lane.replace("_", "-")), count) for lane, count in busy.items()
    )
    return WorkerView.of(name, (model,), lanes)


def fleet_view(*workers: WorkerView) -> FleetView:
    """Return a fleet of these workers, which knows only their models."""
    return FleetView.of(workers, frozenset(model for worker in workers for model in worker.models))
