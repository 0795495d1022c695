"""The registry of workers under a fake clock: heartbeats, slots, ejection and probation."""

from __future__ import annotations

import pytest

from gateway.errors import TooManyWorkers, WorkerIdTaken
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S, MAX_KNOWN_MODELS, WorkerRegistry
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, Lease, same_routing
from gateway.routing.select import Candidate
from gateway.storage.counters import MAX_WORKERS
from policies.sections import Pool
from tests.support.fake_clock import START_S, FakeClock
from tests.support.scripted_worker import lane_report
from tests.support.static_workers import watched_engine
from workers.protocol import MAX_SOURCES, WorkerReport


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
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fleet(clock: FakeClock) -> WorkerRegistry:
    return WorkerRegistry(clock, jitter=lambda: 0.0)


def worker_ids(fleet: WorkerRegistry) -> list[str]:
    return [worker.worker_id for worker in fleet.view().workers]


def test_a_worker_without_heartbeats_is_removed_within_ten_seconds(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    assert HEARTBEAT_TIMEOUT_S + HEARTBEAT_INTERVAL_S < 10
    fleet.heartbeat(report())
    clock.now_s = START_S + HEARTBEAT_TIMEOUT_S
    assert worker_ids(fleet) == ["mac"]
    clock.now_s += 0.001
    assert worker_ids(fleet) == []
    assert fleet.view().known_models == {"demo"}, "its model has no worker, but is known"


def test_heartbeats_keep_a_worker_registered(fleet: WorkerRegistry, clock: FakeClock) -> None:
    for _ in range(10):
        fleet.heartbeat(report())
        clock.now_s += 5
    assert worker_ids(fleet) == ["mac"]


def test_f38_a_stall_of_the_gateway_counts_neither_as_silence_nor_as_failure_of_a_worker(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    clock.now_s = START_S + 8.0
    fleet.compensate_stall(8.0)
    assert worker_ids(fleet) == ["a", "b"], "their heartbeats are still unread"
    fail_requests(fleet, "a", 5, AttemptResult.UNREACHABLE)
    assert worker_ids(fleet) == ["a", "b"], "the timeouts expired because this gateway stalled"
    clock.now_s = START_S + 9.0
    fail_requests(fleet, "a", 3, AttemptResult.UNREACHABLE)
    assert worker_ids(fleet) == ["b"]


def test_f38_no_worker_times_out_before_the_stall_of_the_gateway_is_measured(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    fleet.compensate_stall(0.0)
    clock.now_s = START_S + 8.0
    assert worker_ids(fleet) == ["a", "b"]
    fleet.compensate_stall(0.0)
    assert worker_ids(fleet) == []


def test_f38_a_short_delay_of_the_gateway_extends_no_timeout(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    clock.now_s = START_S + 7.5
    fleet.compensate_stall(0.9)
    assert worker_ids(fleet) == []


def test_a_live_worker_keeps_its_id_until_its_heartbeat_times_out(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    fleet.heartbeat(report())
    with pytest.raises(WorkerIdTaken):
        fleet.heartbeat(report("2", "http://other:9200"))
    clock.now_s = START_S + HEARTBEAT_TIMEOUT_S + 1
    fleet.heartbeat(report("2", "http://other:9200"))
    assert worker_ids(fleet) == ["mac"]


def acquire(fleet: WorkerRegistry, worker_id: str = "mac", lane: str = "vlm") -> Lease | None:
    return fleet.acquire(Candidate(lane, lane, worker_id, "policy", 0.0))


def acquired(fleet: WorkerRegistry, worker_id: str = "mac") -> Lease:
    lease = acquire(fleet, worker_id)
    assert lease is not None
    return lease


def in_flight(fleet: WorkerRegistry) -> int:
    return fleet.view().workers[0].lane_costs[0].ref.lane.in_flight


def test_a_new_boot_on_the_same_address_replaces_the_old_one_with_no_load(
    fleet: WorkerRegistry,
) -> None:
    fleet.heartbeat(report())
    lease = acquired(fleet)
    assert in_flight(fleet) == 1
    fleet.heartbeat(report("2"))
    assert in_flight(fleet) == 0
    fleet.release(lease, AttemptResult.FAILED)
    assert in_flight(fleet) == 0, "released on the old boot, not the new"
    assert fleet.workers()[0].breaker.failures == 0, "and not counted as a failure of the new boot"


def test_a_lane_leases_no_more_slots_than_it_has(
    fleet: WorkerRegistry,
) -> None:
    fleet.heartbeat(report())
    leases = [acquired(fleet) for _ in range(4)]
    assert fleet.view().workers[0].lane_costs[0].ref.lane.load == 1
    assert acquire(fleet) is None
    for lease in leases:
        fleet.release(lease, AttemptResult.ABANDONED)
    assert fleet.view().workers[0].lane_costs[0].ref.lane.load == 0
    assert acquire(fleet) is not None


def test_rows_of_this_gateway_that_ended_since_the_last_report_are_not_anothers(
    fleet: WorkerRegistry,
) -> None:
    def costs(load: int) -> int:
        fleet.heartbeat(report(lanes=[lane_report("vlm", running=load).model_dump()]))
        return fleet.view().workers[0].lane_costs[0].ref.lane.busy_rows

    fleet.heartbeat(report())
    for lease in [acquired(fleet) for _ in range(3)]:
        fleet.release(lease, AttemptResult.SUCCEEDED)
    assert costs(3) == 0
    assert costs(3) == 3, "they still run, so another gateway sent them"


def test_a_live_worker_has_the_requests_that_it_reports_whoever_sent_them(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    busy = lane_report("vlm", running=2, waiting=1).model_dump()
    fleet.heartbeat(report(lanes=[busy]))
    assert fleet.reported_requests("mac") == 3
    assert fleet.reported_requests("unknown") == 0
    clock.now_s += HEARTBEAT_TIMEOUT_S + 1
    assert fleet.reported_requests("mac") == 0, "it has died"


def test_a_stall_of_the_gateway_moves_no_heartbeat_into_the_future(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    fleet.heartbeat(report())
    fleet.compensate_stall(3.0)
    clock.now_s += 0.1
    busy = report(lanes=[lane_report("vlm", running=1).model_dump()])
    fleet.probe_succeeded(busy)
    assert fleet.reported_requests("mac") == 1, "what it answers now is news"


def test_a_lane_that_reports_no_slots_takes_one_request_at_a_time(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report(lanes=[lane_report("vlm", slots=0).model_dump()]))
    assert acquire(fleet) is not None
    assert acquire(fleet) is None


def test_a_pool_has_the_lanes_of_its_name_and_those_that_its_policy_names(
    fleet: WorkerRegistry,
) -> None:
    lanes = [lane_report(name).model_dump() for name in ("text-mtp", "vlm")]
    fleet.heartbeat(report(lanes=lanes))

    def lanes_of(name: str, lane: str) -> list[str]:
        pool = Pool.model_validate({"lanes": lane})
        return [lane.name for _, lane in fleet.pool_lanes(name, pool)]

    assert lanes_of("text-mtp", "text-mtp") == ["text-mtp"]
    assert lanes_of("vlm", "vlm") == ["vlm"]
    assert lanes_of("all", "vlm") == ["vlm"]


def test_unknown_workers_and_lanes_have_no_slots(fleet: WorkerRegistry) -> None:
    assert acquire(fleet) is None
    fleet.heartbeat(report())
    assert acquire(fleet, lane="other") is None
    fleet.remove("mac")
    assert acquire(fleet) is None


def add_two_workers(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report(worker_id="a"))
    fleet.heartbeat(report(worker_id="b"))


def fail_requests(
    fleet: WorkerRegistry, worker_id: str, times: int, result: AttemptResult = AttemptResult.FAILED
) -> None:
    for _ in range(times):
        fleet.release(acquired(fleet, worker_id), result)


def test_f20_a_worker_that_fails_five_times_is_ejected_for_ten_seconds(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    fail_requests(fleet, "a", 5)
    assert worker_ids(fleet) == ["b"]
    assert acquire(fleet, "a") is None
    clock.now_s = START_S + 5.0
    add_two_workers(fleet)
    assert worker_ids(fleet) == ["b"], "a heartbeat ends no ejection"
    assert [fleet.ejected_for_s(worker) for worker in fleet.workers()] == [5.0, 0.0]
    clock.now_s = START_S + 10.0
    add_two_workers(fleet)
    assert worker_ids(fleet) == ["a", "b"]


def test_f24_probation_allows_one_request_then_two_then_all(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    fail_requests(fleet, "a", 3, AttemptResult.UNREACHABLE)
    clock.now_s = START_S + 10.0
    add_two_workers(fleet)
    for at_a_time in (1, 2, 4):
        leases = [acquired(fleet, "a") for _ in range(at_a_time)]
        assert acquire(fleet, "a") is None
        for lease in leases:
            fleet.release(lease, AttemptResult.SUCCEEDED)
            break
        for lease in leases[1:]:
            fleet.release(lease, AttemptResult.ABANDONED)
    assert fleet.workers()[0].breaker.probation_limit is None


def test_a_disconnected_client_neither_ends_nor_fails_a_probation(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    fail_requests(fleet, "a", 5)
    clock.now_s = START_S + 10.0
    add_two_workers(fleet)
    for _ in range(3):
        lease = acquired(fleet, "a")
        assert acquire(fleet, "a") is None
        fleet.release(lease, AttemptResult.ABANDONED)
    fleet.release(acquired(fleet, "a"), AttemptResult.FAILED)
    assert worker_ids(fleet) == ["b"]
    assert fleet.workers()[0].breaker.ejections == 2


def test_requests_sent_before_an_ejection_do_not_change_the_probation(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    clock.now_s = START_S + 1.0
    add_two_workers(fleet)
    slow, broken = acquired(fleet, "a"), acquired(fleet, "a")
    fail_requests(fleet, "a", 5)
    clock.now_s = START_S + 11.0
    add_two_workers(fleet)
    on_probation = acquired(fleet, "a")
    fleet.release(slow, AttemptResult.SUCCEEDED)
    fleet.release(broken, AttemptResult.FAILED)
    assert acquire(fleet, "a") is None, "still one request at a time"
    fleet.release(on_probation, AttemptResult.SUCCEEDED)
    assert fleet.workers()[0].breaker.probation_limit == 2


def test_the_last_worker_of_a_model_stays_available(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    fail_requests(fleet, "a", 5)
    fail_requests(fleet, "b", 50)
    assert worker_ids(fleet) == ["b"], "the last worker stays"
    fleet.remove("b")
    assert worker_ids(fleet) == ["a"], "an ejected worker serves if it is the only one"
    assert len([acquired(fleet, "a") for _ in range(4)]) == 4, "it has all its slots"
    fleet.heartbeat(report(worker_id="c", model="other"))
    assert worker_ids(fleet) == ["a", "c"], "a worker of another model does not replace it"


def test_a_busy_worker_is_skipped_until_its_retry_after_and_not_ejected(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    fleet.release(acquired(fleet, "a"), AttemptResult.BUSY, 3.0)
    assert worker_ids(fleet) == ["b"]
    assert fleet.available_in_s("demo") == 3.0
    fleet.release(acquired(fleet, "b"), AttemptResult.BUSY, 2.0)
    assert worker_ids(fleet) == []
    assert fleet.available_in_s("demo") == 2.0
    clock.now_s = START_S + 3.0
    assert worker_ids(fleet) == ["a", "b"]
    assert [worker.breaker.ejections for worker in fleet.workers()] == [0, 0]


@pytest.mark.parametrize("boot_id", ["1", "3"])
def test_a_worker_is_called_back_for_another_boot_or_url(
    fleet: WorkerRegistry, boot_id: str
) -> None:
    fleet.heartbeat(report("2"))
    assert not fleet.needs_call_back(report("2"))
    assert fleet.needs_call_back(report(boot_id))
    assert fleet.needs_call_back(report("2", url="http://a:1"))


def test_a_starting_worker_is_called_back_once_it_is_ready(fleet: WorkerRegistry) -> None:
    starting = report(ready=False)
    assert not fleet.needs_call_back(starting)
    fleet.heartbeat(starting)
    assert fleet.needs_call_back(report())
    fleet.heartbeat(report(), reached=True)
    assert not fleet.needs_call_back(report())
    fleet.heartbeat(report(url="http://a:1", ready=False))
    assert fleet.needs_call_back(report(url="http://a:1")), "nothing has answered there"


def test_a_worker_that_cannot_be_reached_gets_no_requests_until_it_is_reached(
    fleet: WorkerRegistry, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        clock.now_s += HEARTBEAT_INTERVAL_S
        fleet.record_unreachable(report(), "no answer")
        assert worker_ids(fleet) == []
    (worker,) = fleet.workers()
    assert worker.problem == "no answer"
    assert worker.report.lanes == (), "nobody has confirmed its counts"
    assert [record.getMessage() for record in caplog.records] == [
        "worker.unreachable worker=mac: no answer"
    ]
    assert fleet.needs_call_back(report())
    fleet.heartbeat(report(), reached=True)
    assert worker_ids(fleet) == ["mac"]
    assert worker.problem == ""


def test_a_worker_that_only_another_gateway_reaches_is_called_back_here_all_the_same(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    fleet.record_unreachable(report(), "no answer")
    clock.now_s += HEARTBEAT_INTERVAL_S
    assert fleet.merge_remote(report(), 0.0)
    assert worker_ids(fleet) == []
    assert fleet.needs_call_back(report())
    fleet.heartbeat(report(), reached=True)
    assert worker_ids(fleet) == ["mac"]


def test_a_failed_connection_has_the_worker_called_back_and_an_answer_ends_its_ejection(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    add_two_workers(fleet)
    again = report(worker_id="a")
    fail_requests(fleet, "a", 3, AttemptResult.UNREACHABLE)
    assert fleet.needs_call_back(again)
    fleet.record_unreachable(again, "no answer")
    clock.now_s += HEARTBEAT_INTERVAL_S
    assert worker_ids(fleet) == ["b"]
    assert [lane.name for lane in fleet.workers()[0].report.lanes] == ["vlm"], "it was confirmed"
    fleet.heartbeat(again, reached=True)
    assert worker_ids(fleet) == ["a", "b"]
    assert not fleet.needs_call_back(again)
    assert fleet.workers()[0].breaker.probation_limit == 1, "real answers end the probation"


def test_an_answer_to_a_call_back_ends_no_ejection_for_failed_requests(
    fleet: WorkerRegistry,
) -> None:
    add_two_workers(fleet)
    again = report(worker_id="a")
    fail_requests(fleet, "a", 5, AttemptResult.FAILED)
    assert not fleet.needs_call_back(again)
    fleet.heartbeat(again, reached=True)
    assert worker_ids(fleet) == ["b"]


def test_an_unproven_report_replaces_no_live_worker_and_holds_no_id(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report(), reached=True)
    fleet.record_unreachable(report(url="http://other:1"), "no answer")
    assert worker_ids(fleet) == ["mac"]
    fleet.record_unreachable(report(), "no answer")
    fleet.heartbeat(report("2", "http://new:1"), reached=True)
    assert [worker.report.url for worker in fleet.workers()] == ["http://new:1"]


def test_routing_depends_on_the_values_of_a_report_and_not_on_its_identity() -> None:
    assert same_routing(report(), report())
    assert not same_routing(report(), report(draining=True))


def test_a_report_of_another_boot_changes_nothing(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report())
    fleet.update_report(report("0", ready=False))
    assert worker_ids(fleet) == ["mac"]


def test_a_view_is_taken_anew_only_after_a_change(fleet: WorkerRegistry, clock: FakeClock) -> None:
    fleet.heartbeat(report())
    first = fleet.view()
    clock.now_s += 0.001
    assert fleet.view().workers is first.workers
    acquired(fleet)
    assert fleet.view().workers is not first.workers


def test_a_snapshot_does_not_change_with_the_registry(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report())
    view = fleet.view()
    acquired(fleet)
    fleet.remove("mac")
    assert view.workers[0].lane_costs[0].ref.lane.in_flight == 0


def test_every_change_that_may_add_capacity_calls_back_and_a_stale_report_does_not(
    clock: FakeClock,
) -> None:
    calls: list[None] = []
    fleet = WorkerRegistry(clock, jitter=lambda: 0.0)
    fleet.on_capacity = lambda: calls.append(None)
    changes = [
        lambda: fleet.heartbeat(report()),
        lambda: fleet.heartbeat(report()),
        lambda: fleet.merge_remote(report(worker_id="b"), 1.0),
        lambda: fleet.probe_succeeded(report(worker_id="b")),
        lambda: fleet.set_cordoned(frozenset("b")),
        lambda: fleet.remove("b"),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        assert len(calls) == number
    assert not fleet.merge_remote(report(), 1.0)
    assert len(calls) == len(changes)


class TestHeartbeatsOfOtherGateways:
    """Heartbeats that other gateways received and this one merges."""

    def test_a_remote_heartbeat_counts_from_its_time_of_receipt(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        assert fleet.merge_remote(report(), 5.0)
        (worker,) = fleet.workers()
        assert worker.heartbeat_at_s == START_S - 5.0
        assert not worker.local
        assert worker.local_heartbeat_at_s == float("-inf")
        assert fleet.view().known_models == {"demo"}
        clock.advance(HEARTBEAT_TIMEOUT_S - 5.0)
        assert worker_ids(fleet) == ["mac"]
        clock.advance(0.001)
        assert worker_ids(fleet) == []

    def test_a_remote_heartbeat_that_is_too_old_is_ignored(self, fleet: WorkerRegistry) -> None:
        assert not fleet.merge_remote(report(), HEARTBEAT_TIMEOUT_S + 0.001)
        assert worker_ids(fleet) == []
        assert fleet.merge_remote(report(), HEARTBEAT_TIMEOUT_S)
        assert worker_ids(fleet) == ["mac"]

    def test_a_heartbeat_older_than_the_last_one_changes_nothing(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.heartbeat(report())
        clock.advance(3.0)
        for age_s in (3.0, 4.0):
            assert not fleet.merge_remote(report(ready=False), age_s)
        assert worker_ids(fleet) == ["mac"]
        assert fleet.merge_remote(report(ready=False), 2.0)
        assert worker_ids(fleet) == []
        (worker,) = fleet.workers()
        assert worker.heartbeat_at_s == START_S + 1.0
        assert worker.local, "it still counts as a worker with heartbeats here"
        assert worker.local_heartbeat_at_s == START_S

    def test_a_remote_heartbeat_preserves_a_worker_and_its_requests(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.heartbeat(report())
        acquired(fleet)
        clock.advance(6.0)
        assert fleet.merge_remote(report(), 0.0)
        clock.advance(6.0)
        assert in_flight(fleet) == 1

    def test_a_new_boot_at_another_gateway_replaces_the_old_one(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.heartbeat(report())
        acquired(fleet)
        clock.advance(1.0)
        assert fleet.merge_remote(report("2"), 0.5)
        assert in_flight(fleet) == 0
        assert fleet.workers()[0].report.boot_id == "2"

    def test_a_remote_report_replaces_a_worker_of_another_address_only_after_its_timeout(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.heartbeat(report())
        clock.advance(1.0)
        assert not fleet.merge_remote(report("2", "http://other:9200"), 0.0)
        assert fleet.workers()[0].report.url == "http://mac:9200"
        clock.now_s = START_S + HEARTBEAT_TIMEOUT_S + 0.001
        assert fleet.merge_remote(report("2", "http://other:9200"), 0.0)
        assert fleet.workers()[0].report.url == "http://other:9200"

    def test_a_probe_counts_as_a_heartbeat_at_this_gateway(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.merge_remote(report(), 5.0)
        clock.advance(1.0)
        fleet.probe_succeeded(report())
        (worker,) = fleet.workers()
        assert worker.heartbeat_at_s == worker.local_heartbeat_at_s == START_S + 1.0
        assert fleet.heartbeat_age_s(worker) == 0.0

    def test_a_cordon_applies_to_a_worker_that_another_gateway_reports(
        self, fleet: WorkerRegistry
    ) -> None:
        fleet.set_cordoned(frozenset(("mac",)))
        fleet.merge_remote(report(), 1.0)
        assert worker_ids(fleet) == []
        fleet.set_cordoned(frozenset())
        assert worker_ids(fleet) == ["mac"]

    def test_a_static_worker_ignores_reports_under_its_id(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        watched = watched_engine(id="mac")
        fleet.heartbeat(watched.report, watched.engine)
        clock.advance(1.0)
        assert not fleet.merge_remote(report(), 0.0)
        assert fleet.workers()[0].report == watched.report


def test_c5_further_workers_are_rejected_until_one_is_gone(
    fleet: WorkerRegistry, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.heartbeat(report(worker_id="first"))
    clock.now_s += 1
    for number in range(1, MAX_WORKERS):
        fleet.heartbeat(report(worker_id=f"mac-{number}"))
    for _ in range(3):
        with pytest.raises(TooManyWorkers):
            fleet.needs_call_back(report(worker_id="late"))
        with pytest.raises(TooManyWorkers):
            fleet.heartbeat(report(worker_id="late"))
        assert not fleet.merge_remote(report(worker_id="late"), 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"fleet.full workers={MAX_WORKERS} rejected=late"
    ]
    fleet.heartbeat(report(worker_id="mac-1"))
    static = watched_engine()
    fleet.heartbeat(static.report, static.engine)
    clock.now_s += HEARTBEAT_TIMEOUT_S
    fleet.heartbeat(report(worker_id="late"))
    assert "late" in worker_ids(fleet)


def test_c5_the_models_that_a_fleet_knows_are_bounded(clock: FakeClock) -> None:
    fleet = WorkerRegistry(clock, lambda: 0.0, frozenset(["static"]))
    for number in range(MAX_KNOWN_MODELS + 5):
        fleet.heartbeat(report(model=f"model-{number}"))
    known = fleet.view().known_models
    assert len(known) == MAX_KNOWN_MODELS + 1
    assert {"static", f"model-{MAX_KNOWN_MODELS + 4}"} <= known
    assert "model-4" not in known


def test_a_worker_whose_heartbeats_cease_is_silent_until_it_is_heard_or_leaves(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    for heard in (lambda: fleet.heartbeat(report()), lambda: fleet.remove("mac")):
        fleet.heartbeat(report())
        assert fleet.silent_urls() == ()
        clock.now_s += HEARTBEAT_TIMEOUT_S + 1
        assert fleet.silent_urls() == ("http://mac:9200",)
        heard()
        assert fleet.silent_urls() == ()


def test_an_absence_names_its_kind_and_begins_with_the_last_sign_of_the_worker(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    fleet.heartbeat(report())
    assert fleet.absence("mac") is None
    clock.now_s += HEARTBEAT_TIMEOUT_S + 3
    assert fleet.workers() == ()
    assert fleet.absence("mac") == ("silent", HEARTBEAT_TIMEOUT_S + 3)
    fleet.heartbeat(report())
    assert fleet.absence("mac") is None
    fleet.remove("mac")
    clock.now_s += 2
    assert fleet.absence("mac") == ("left", 2)
    fleet.heartbeat(report(boot_id="2", ready=False))
    assert fleet.absence("mac") is None
    fleet.remove("never-joined", restarting=True)
    assert fleet.absence("never-joined") is None


def test_a_worker_whose_process_is_started_again_is_absent_until_it_is_ready(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    fleet.heartbeat(report())
    fleet.remove("mac", restarting=True)
    clock.now_s += 5
    fleet.remove("mac", restarting=True)
    assert fleet.absence("mac") == ("restarting", 0), "its process has ended again"
    fleet.heartbeat(report(boot_id="2", ready=False))
    assert fleet.absence("mac") == ("restarting", 0)
    fleet.heartbeat(report(boot_id="2"))
    assert fleet.absence("mac") is None


def test_absences_of_endless_workers_are_bounded(fleet: WorkerRegistry) -> None:
    for number in range(MAX_WORKERS + 5):
        fleet.heartbeat(report(worker_id=f"mac-{number}", url=f"http://mac-{number}:9200"))
        fleet.remove(f"mac-{number}")
    assert fleet.absence("mac-4") is None
    assert fleet.absence("mac-5") is not None


def test_nodes_come_from_live_workers_that_the_taker_can_reach(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    urls = {
        "taker": "http://10.0.0.1:9200",
        "full": "http://10.0.0.2:9200",
        "cordoned": "http://10.0.0.3:9200",
        "local": "http://127.0.0.1:9200",
        "silent": "http://10.0.0.4:9200",
        "restarted": "http://10.0.0.5:9200",
    }
    for name, url in urls.items():
        fleet.heartbeat(report(worker_id=name, url=url))
    fleet.heartbeat(report("2", worker_id="restarted", url=urls["restarted"]))
    fleet.set_cordoned(frozenset({"cordoned"}))
    clock.now_s += HEARTBEAT_TIMEOUT_S
    for name in ("taker", "full", "cordoned", "local"):
        fleet.heartbeat(report(worker_id=name, url=urls[name]))
    clock.now_s += 1
    states = {state.report.worker_id: state for state in fleet.workers()}
    holders = [((name, "1"), 100) for name in urls if name != "taker"]
    sources = fleet.node_sources(states["taker"], [*holders, (("gone", "1"), 100)])
    assert [source.url for source in sources] == [urls["full"], urls["cordoned"]]
    beside = fleet.node_sources(states["local"], [(("taker", "1"), 100)])
    assert [source.url for source in beside] == [urls["taker"]]
    assert len(fleet.node_sources(states["taker"], holders[:2] * 4)) == MAX_SOURCES


def test_no_nodes_come_from_or_to_a_server_of_another_kind(fleet: WorkerRegistry) -> None:
    static = watched_engine()
    fleet.heartbeat(report())
    fleet.heartbeat(static.report, static.engine)
    ours, theirs = fleet.workers()
    boots = [(state.report.worker_id, state.report.boot_id) for state in (ours, theirs)]
    assert fleet.node_sources(ours, [(boots[1], 100)]) == ()
    assert fleet.node_sources(theirs, [(boots[0], 100)]) == ()
