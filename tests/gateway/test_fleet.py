"""The live table under a clock of its own."""

from __future__ import annotations

import pytest

from gateway.errors import WorkerIdTaken, WorkerUnreachable
from gateway.fleet import BEAT_S, SILENT_AFTER_S, Fleet
from tests.gateway.fake_worker import lane_report
from workers.adapters.report import WorkerReport


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def report(boot_id: str = "1", url: str = "http://mac:9200", **changes: object) -> WorkerReport:
    values = {
        "worker_id": "mac",
        "boot_id": boot_id,
        "url": url,
        "model": "demo",
        "context_tokens": 100,
        "lanes": [lane_report("vlm").model_dump()],
    }
    return WorkerReport.model_validate({**values, **changes})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(clock)


def ids(fleet: Fleet) -> list[str]:
    return [one.worker_id for one in fleet.view().workers]


def test_a_worker_that_stops_beating_is_out_within_ten_seconds(fleet: Fleet, clock: Clock) -> None:
    assert SILENT_AFTER_S + BEAT_S < 10
    fleet.beat(report())
    clock.now_s = SILENT_AFTER_S
    assert ids(fleet) == ["mac"]
    clock.now_s += 0.001
    assert ids(fleet) == []
    assert fleet.view().known_models == {"demo"}, "its model is away, not unknown"


def test_a_beat_keeps_a_worker_in(fleet: Fleet, clock: Clock) -> None:
    for _ in range(10):
        fleet.beat(report())
        clock.now_s += 5
    assert ids(fleet) == ["mac"]


def test_an_id_belongs_to_one_live_worker(fleet: Fleet, clock: Clock) -> None:
    fleet.beat(report())
    with pytest.raises(WorkerIdTaken):
        fleet.beat(report("2", "http://other:9200"))
    clock.now_s = SILENT_AFTER_S + 1
    fleet.beat(report("2", "http://other:9200"))
    assert ids(fleet) == ["mac"]


def test_a_new_boot_on_the_same_address_takes_over_at_once_with_no_load(fleet: Fleet) -> None:
    fleet.beat(report())
    with fleet.dispatched("mac", "vlm"):
        assert fleet.view().workers[0].lanes[0].in_flight == 1
        fleet.beat(report("2"))
        assert fleet.view().workers[0].lanes[0].in_flight == 0
    assert fleet.view().workers[0].lanes[0].in_flight == 0, "released on the old boot, not the new"


def test_a_request_is_counted_while_it_runs_however_it_ends(fleet: Fleet) -> None:
    fleet.beat(report())
    with pytest.raises(RuntimeError), fleet.dispatched("mac", "vlm"):  # noqa: PT012
        assert fleet.view().workers[0].lanes[0].load == 0.25
        raise RuntimeError
    assert fleet.view().workers[0].lanes[0].load == 0


def test_a_request_of_a_worker_that_left_is_unreachable(fleet: Fleet) -> None:
    fleet.beat(report())
    fleet.leave("mac")
    with pytest.raises(WorkerUnreachable), fleet.dispatched("mac", "vlm"):
        pass


def test_a_worker_set_aside_waits_for_its_next_beat(fleet: Fleet) -> None:
    fleet.beat(report())
    fleet.set_aside("mac")
    fleet.refresh(report())
    assert ids(fleet) == []
    fleet.beat(report())
    assert ids(fleet) == ["mac"]


def test_an_answer_of_another_boot_changes_nothing(fleet: Fleet) -> None:
    fleet.beat(report())
    fleet.refresh(report("0", ready=False))
    assert ids(fleet) == ["mac"]


def test_a_snapshot_does_not_change_with_the_table(fleet: Fleet) -> None:
    fleet.beat(report())
    view = fleet.view()
    with fleet.dispatched("mac", "vlm"):
        fleet.leave("mac")
    assert view.workers[0].lanes[0].in_flight == 0
