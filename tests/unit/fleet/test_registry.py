"""The live table under a clock of its own: who is in, who has room, who is left alone."""

from __future__ import annotations

import pytest

from gateway.errors import WorkerIdTaken
from gateway.fleet.backend import OpenAIBackend
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S, WorkerRegistry
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, Lease
from gateway.routing.select import Candidate
from tests.support.fake_clock import START_S, FakeClock
from tests.support.scripted_worker import lane_report
from tests.support.static_workers import static_worker
from workers.protocol import WorkerReport


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


def ids(fleet: WorkerRegistry) -> list[str]:
    return [one.worker_id for one in fleet.view().workers]


def test_a_worker_that_stops_beating_is_out_within_ten_seconds(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    assert HEARTBEAT_TIMEOUT_S + HEARTBEAT_INTERVAL_S < 10
    fleet.heartbeat(report())
    clock.now_s = START_S + HEARTBEAT_TIMEOUT_S
    assert ids(fleet) == ["mac"]
    clock.now_s += 0.001
    assert ids(fleet) == []
    assert fleet.view().known_models == {"demo"}, "its model is away, not unknown"


def test_a_beat_keeps_a_worker_in(fleet: WorkerRegistry, clock: FakeClock) -> None:
    for _ in range(10):
        fleet.heartbeat(report())
        clock.now_s += 5
    assert ids(fleet) == ["mac"]


def test_f38_what_came_while_this_gateway_did_not_listen_is_held_against_nobody(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    two(fleet)
    clock.now_s = START_S + 8.0
    fleet.compensate_stall(8.0)
    assert ids(fleet) == ["a", "b"], "their heartbeats wait to be read"
    fail(fleet, "a", 5, AttemptResult.UNREACHABLE)
    assert ids(fleet) == ["a", "b"], "the limits on time ran out on us, not on them"
    clock.now_s = START_S + 9.0
    fail(fleet, "a", 3, AttemptResult.UNREACHABLE)
    assert ids(fleet) == ["b"]


def test_f38_nobody_is_found_silent_before_it_is_known_whether_we_listened(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    two(fleet)
    fleet.compensate_stall(0.0)
    clock.now_s = START_S + 8.0
    assert ids(fleet) == ["a", "b"]
    fleet.compensate_stall(0.0)
    assert ids(fleet) == []


def test_f38_a_short_delay_excuses_no_silence(fleet: WorkerRegistry, clock: FakeClock) -> None:
    two(fleet)
    clock.now_s = START_S + 7.5
    fleet.compensate_stall(0.9)
    assert ids(fleet) == []


def test_an_id_belongs_to_one_live_worker(fleet: WorkerRegistry, clock: FakeClock) -> None:
    fleet.heartbeat(report())
    with pytest.raises(WorkerIdTaken):
        fleet.heartbeat(report("2", "http://other:9200"))
    clock.now_s = START_S + HEARTBEAT_TIMEOUT_S + 1
    fleet.heartbeat(report("2", "http://other:9200"))
    assert ids(fleet) == ["mac"]


def take(fleet: WorkerRegistry, worker_id: str = "mac", lane: str = "vlm") -> Lease | None:
    return fleet.acquire(Candidate(lane, lane, worker_id, "policy", 0.0))


def taken(fleet: WorkerRegistry, worker_id: str = "mac") -> Lease:
    lease = take(fleet, worker_id)
    assert lease is not None
    return lease


def in_flight(fleet: WorkerRegistry) -> int:
    return fleet.view().workers[0].lanes[0].in_flight


def test_a_new_boot_on_the_same_address_takes_over_at_once_with_no_load(
    fleet: WorkerRegistry,
) -> None:
    fleet.heartbeat(report())
    lease = taken(fleet)
    assert in_flight(fleet) == 1
    fleet.heartbeat(report("2"))
    assert in_flight(fleet) == 0
    fleet.release(lease, AttemptResult.FAILED)
    assert in_flight(fleet) == 0, "released on the old boot, not the new"
    assert fleet.workers()[0].breaker.failures == 0, "and not held against the new one"


def test_a_slot_is_counted_while_it_is_held_and_no_more_are_given_than_there_are(
    fleet: WorkerRegistry,
) -> None:
    fleet.heartbeat(report())
    leases = [taken(fleet) for _ in range(4)]
    assert fleet.view().workers[0].lanes[0].load == 1
    assert take(fleet) is None
    for lease in leases:
        fleet.release(lease, AttemptResult.ABANDONED)
    assert fleet.view().workers[0].lanes[0].load == 0
    assert take(fleet) is not None


def test_nobody_and_unknown_lanes_have_no_slots(fleet: WorkerRegistry) -> None:
    assert take(fleet) is None
    fleet.heartbeat(report())
    assert take(fleet, lane="other") is None
    fleet.remove("mac")
    assert take(fleet) is None


def two(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report(worker_id="a"))
    fleet.heartbeat(report(worker_id="b"))


def fail(
    fleet: WorkerRegistry, worker_id: str, times: int, verdict: AttemptResult = AttemptResult.FAILED
) -> None:
    for _ in range(times):
        fleet.release(taken(fleet, worker_id), verdict)


def test_f20_a_worker_that_fails_five_times_is_out_for_ten_seconds(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    two(fleet)
    fail(fleet, "a", 5)
    assert ids(fleet) == ["b"]
    assert take(fleet, "a") is None
    clock.now_s = START_S + 5.0
    two(fleet)
    assert ids(fleet) == ["b"], "a heartbeat alone proves nothing"
    clock.now_s = START_S + 10.0
    two(fleet)
    assert ids(fleet) == ["a", "b"]


def test_f24_it_comes_back_with_one_request_then_two_then_all(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    two(fleet)
    fail(fleet, "a", 3, AttemptResult.UNREACHABLE)
    clock.now_s = START_S + 10.0
    two(fleet)
    for at_a_time in (1, 2, 4):
        leases = [taken(fleet, "a") for _ in range(at_a_time)]
        assert take(fleet, "a") is None
        for lease in leases:
            fleet.release(lease, AttemptResult.SUCCEEDED)
            break
        for lease in leases[1:]:
            fleet.release(lease, AttemptResult.ABANDONED)
    assert fleet.workers()[0].breaker.probation_limit is None


def test_a_client_that_leaves_a_worker_on_probation_proves_nothing(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    two(fleet)
    fail(fleet, "a", 5)
    clock.now_s = START_S + 10.0
    two(fleet)
    for _ in range(3):
        lease = taken(fleet, "a")
        assert take(fleet, "a") is None
        fleet.release(lease, AttemptResult.ABANDONED)
    fleet.release(taken(fleet, "a"), AttemptResult.FAILED)
    assert ids(fleet) == ["b"]
    assert fleet.workers()[0].breaker.ejections == 2


def test_what_was_sent_before_an_ejection_has_no_more_to_say(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    clock.now_s = START_S + 1.0
    two(fleet)
    slow, broken = taken(fleet, "a"), taken(fleet, "a")
    fail(fleet, "a", 5)
    clock.now_s = START_S + 11.0
    two(fleet)
    on_probation = taken(fleet, "a")
    fleet.release(slow, AttemptResult.SUCCEEDED)
    fleet.release(broken, AttemptResult.FAILED)
    assert take(fleet, "a") is None, "one at a time still"
    fleet.release(on_probation, AttemptResult.SUCCEEDED)
    assert fleet.workers()[0].breaker.probation_limit == 2


def test_the_last_worker_of_a_model_is_never_left_alone(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    two(fleet)
    fail(fleet, "a", 5)
    fail(fleet, "b", 50)
    assert ids(fleet) == ["b"], "the last one stays"
    fleet.remove("b")
    assert ids(fleet) == ["a"], "an ejected one is better than none"
    assert len([taken(fleet, "a") for _ in range(4)]) == 4, "with all its slots"
    fleet.heartbeat(report(worker_id="c", model="other"))
    assert ids(fleet) == ["a", "c"], "a worker of another model is no help"


def test_a_worker_that_asks_for_time_gets_it_and_is_not_broken(
    fleet: WorkerRegistry, clock: FakeClock
) -> None:
    two(fleet)
    fleet.release(taken(fleet, "a"), AttemptResult.BUSY, 3.0)
    assert ids(fleet) == ["b"]
    assert fleet.available_in_s("demo") == 3.0
    fleet.release(taken(fleet, "b"), AttemptResult.BUSY, 2.0)
    assert ids(fleet) == []
    assert fleet.available_in_s("demo") == 2.0
    clock.now_s = START_S + 3.0
    assert ids(fleet) == ["a", "b"]
    assert [member.breaker.ejections for member in fleet.workers()] == [0, 0]


def test_an_answer_of_another_boot_changes_nothing(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report())
    fleet.update_report(report("0", ready=False))
    assert ids(fleet) == ["mac"]


def test_a_snapshot_does_not_change_with_the_table(fleet: WorkerRegistry) -> None:
    fleet.heartbeat(report())
    view = fleet.view()
    taken(fleet)
    fleet.remove("mac")
    assert view.workers[0].lanes[0].in_flight == 0


def test_every_change_that_may_add_capacity_calls_back_and_a_stale_one_does_not(
    clock: FakeClock,
) -> None:
    calls: list[None] = []
    fleet = WorkerRegistry(clock, jitter=lambda: 0.0, on_capacity=lambda: calls.append(None))
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
    """What a gateway learns, step by step, of workers whose heartbeats others receive."""

    def test_a_remote_heartbeat_counts_from_the_time_at_which_it_was_received(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        assert fleet.merge_remote(report(), 5.0)
        (worker,) = fleet.workers()
        assert worker.heartbeat_at_s == START_S - 5.0
        assert not worker.local
        assert worker.local_heartbeat_at_s == float("-inf")
        assert fleet.view().known_models == {"demo"}
        clock.advance(HEARTBEAT_TIMEOUT_S - 5.0)
        assert ids(fleet) == ["mac"]
        clock.advance(0.001)
        assert ids(fleet) == []

    def test_a_remote_heartbeat_that_is_too_old_is_ignored(self, fleet: WorkerRegistry) -> None:
        assert not fleet.merge_remote(report(), HEARTBEAT_TIMEOUT_S + 0.001)
        assert ids(fleet) == []
        assert fleet.merge_remote(report(), HEARTBEAT_TIMEOUT_S)
        assert ids(fleet) == ["mac"]

    def test_an_older_heartbeat_than_the_last_one_changes_nothing(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.heartbeat(report())
        clock.advance(3.0)
        for age_s in (3.0, 4.0):
            assert not fleet.merge_remote(report(ready=False), age_s)
        assert ids(fleet) == ["mac"]
        assert fleet.merge_remote(report(ready=False), 2.0)
        assert ids(fleet) == []
        (worker,) = fleet.workers()
        assert worker.heartbeat_at_s == START_S + 1.0
        assert worker.local, "its own heartbeats are not forgotten"
        assert worker.local_heartbeat_at_s == START_S

    def test_a_remote_heartbeat_keeps_a_worker_and_its_requests(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.heartbeat(report())
        taken(fleet)
        clock.advance(6.0)
        assert fleet.merge_remote(report(), 0.0)
        clock.advance(6.0)
        assert in_flight(fleet) == 1

    def test_a_new_boot_at_another_gateway_replaces_the_old_one(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        fleet.heartbeat(report())
        taken(fleet)
        clock.advance(1.0)
        assert fleet.merge_remote(report("2"), 0.5)
        assert in_flight(fleet) == 0
        assert fleet.workers()[0].report.boot_id == "2"

    def test_of_two_live_workers_with_one_id_the_first_stays(
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

    def test_a_cordon_holds_for_a_worker_that_another_gateway_reports(
        self, fleet: WorkerRegistry
    ) -> None:
        fleet.set_cordoned(frozenset(("mac",)))
        fleet.merge_remote(report(), 1.0)
        assert ids(fleet) == []
        fleet.set_cordoned(frozenset())
        assert ids(fleet) == ["mac"]

    def test_a_static_worker_ignores_reports_under_its_id(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        backend = OpenAIBackend(static_worker(id="mac"))
        fleet.heartbeat(backend.report, backend)
        clock.advance(1.0)
        assert not fleet.merge_remote(report(), 0.0)
        assert fleet.workers()[0].report == backend.report
