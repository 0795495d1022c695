"""The registry of workers under a fake clock: heartbeats, slots, ejection and probation."""

import logging
from typing import Any

import pytest

from gateway.engines.paceline import PacelineWorker
from gateway.errors import TooManyWorkers, WorkerIdTaken
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S, MAX_KNOWN_MODELS, WorkerRegistry
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, Lease
from gateway.routing.select import Candidate
from gateway.routing.view import LaneView
from gateway.state.counters import MAX_WORKERS
from paceline.protocol import MAX_SOURCES, WorkerReport
from paceline.request.profile import Bypass
from policies.sections import Pool
from tests.support.fake_clock import START_S, FakeClock
from tests.support.scheduler_harness import worker_report
from tests.support.scripted_worker import lane_report
from tests.support.static_workers import watched_engine


def report(boot_id: str = "1", url: str = "http://mac:9200", **changes: Any) -> WorkerReport:
    values = {"boot_id": boot_id, "url": url, "lanes": [lane_report("vlm")]}
    return worker_report(**{**values, **changes})


def busy(**counts: int) -> WorkerReport:
    return report(lanes=[lane_report("vlm", **counts)])


class Fleet(WorkerRegistry):
    """A registry under the clock of a test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(self.clock, jitter=lambda: 0.0)

    @property
    def ids(self) -> list[str]:
        return [*self.view().workers]

    @property
    def lane(self) -> LaneView:
        (worker, *_) = self.view().workers.values()
        return worker.lanes[0]

    def hear(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            self.heartbeat(report(worker_id=worker_id))

    def try_lease(self, worker_id: str = "mac", lane: str = "vlm") -> Lease | None:
        return self.acquire(Candidate(lane, lane, worker_id, "policy", 0.0))

    def lease(self, worker_id: str = "mac") -> Lease:
        lease = self.try_lease(worker_id)
        assert lease is not None
        return lease

    def eject(self, worker_id: str, result: AttemptResult = AttemptResult.FAILED) -> None:
        """Fail requests to a worker, until its ejection is over and it is on probation."""
        self.fail(worker_id, 5 if result is AttemptResult.FAILED else 3, result)
        self.clock.advance(10.0)
        self.hear("a", "b")

    def fail(
        self, worker_id: str, times: int, result: AttemptResult = AttemptResult.FAILED
    ) -> None:
        for _ in range(times):
            self.release(self.lease(worker_id), result)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_worker_is_removed_within_ten_seconds_of_its_last_heartbeat(fleet: Fleet) -> None:
    assert HEARTBEAT_TIMEOUT_S + HEARTBEAT_INTERVAL_S < 10
    for _ in range(10):
        fleet.heartbeat(report())
        fleet.clock.advance(HEARTBEAT_TIMEOUT_S)
        assert fleet.ids == ["mac"]
    fleet.clock.advance(0.001)
    assert fleet.ids == []
    assert fleet.view().known_models == {"demo"}, "its model has no worker, but is known"


def test_f38_a_stall_of_the_gateway_is_neither_silence_nor_failure_of_a_worker(fleet) -> None:
    fleet.hear("a", "b")
    fleet.clock.now_s = START_S + 8.0
    fleet.compensate_stall(8.0)
    assert fleet.ids == ["a", "b"], "their heartbeats are still unread"
    fleet.fail("a", 5, AttemptResult.UNREACHABLE)
    assert fleet.ids == ["a", "b"], "the timeouts expired because this gateway stalled"
    fleet.clock.now_s = START_S + 9.0
    fleet.fail("a", 3, AttemptResult.UNREACHABLE)
    assert fleet.ids == ["b"]


def test_f38_no_worker_times_out_before_the_stall_of_the_gateway_is_measured(fleet: Fleet) -> None:
    fleet.hear("a", "b")
    fleet.compensate_stall(0.0)
    fleet.clock.advance(8.0)
    assert fleet.ids == ["a", "b"]
    fleet.compensate_stall(0.9)
    assert fleet.ids == [], "a short delay extends no timeout"


def test_a_live_worker_keeps_its_id_until_its_heartbeat_times_out(fleet: Fleet) -> None:
    """But a new boot on the same address replaces the old one, with no load."""
    fleet.heartbeat(report())
    lease = fleet.lease()
    with pytest.raises(WorkerIdTaken):
        fleet.heartbeat(report("2", "http://other:9200"))
    assert fleet.lane.in_flight == 1
    fleet.heartbeat(report("2"))
    assert fleet.lane.in_flight == 0
    fleet.release(lease, AttemptResult.FAILED)
    assert fleet.lane.in_flight == 0, "released on the old boot, not the new"
    assert fleet.workers()[0].breaker.failures == 0, "and not counted as a failure of the new boot"
    fleet.clock.advance(HEARTBEAT_TIMEOUT_S + 1)
    fleet.heartbeat(report("3", "http://other:9200"))
    assert fleet.ids == ["mac"]


def test_a_lane_leases_no_more_slots_than_it_has(fleet: Fleet) -> None:
    fleet.heartbeat(report())
    leases = [fleet.lease() for _ in range(4)]
    assert fleet.lane.load == 1
    assert fleet.try_lease() is None
    for lease in leases:
        fleet.release(lease, AttemptResult.ABANDONED)
    assert fleet.lane.load == 0
    assert fleet.try_lease() is not None
    assert fleet.try_lease(lane="other") is None
    fleet.remove("mac")
    assert fleet.try_lease() is None
    fleet.heartbeat(busy(slots=0))
    assert [fleet.try_lease() is None for _ in range(2)] == [False, True], "one at a time"


def test_a_live_worker_has_the_requests_that_it_reports_whoever_sent_them(fleet: Fleet) -> None:
    fleet.heartbeat(busy(running=2, waiting=1))
    (worker,) = fleet.workers()
    assert worker.reported_requests == 3
    fleet.compensate_stall(3.0)
    fleet.clock.advance(0.1)
    fleet.probe_succeeded(busy(running=1))
    assert worker.reported_requests == 1, "a stall moves no heartbeat into the future"
    fleet.clock.advance(HEARTBEAT_TIMEOUT_S + 1)
    assert worker.reported_requests == 0, "it has died"


@pytest.mark.parametrize(
    ("pool", "lane"), [("text-mtp", "text-mtp"), ("vlm", "vlm"), ("all", "vlm")]
)
def test_a_pool_has_the_lanes_that_its_policy_names(fleet: Fleet, pool: str, lane: str) -> None:
    fleet.heartbeat(worker_report())
    lanes = fleet.pool_lanes(pool, Pool.model_validate({"lanes": lane}))
    assert [found.name for _, found in lanes] == [lane]


def test_a_disconnected_client_neither_ends_nor_fails_a_probation(fleet: Fleet) -> None:
    fleet.hear("a", "b")
    fleet.eject("a")
    for _ in range(3):
        lease = fleet.lease("a")
        assert fleet.try_lease("a") is None
        fleet.release(lease, AttemptResult.ABANDONED)
    fleet.release(fleet.lease("a"), AttemptResult.FAILED)
    assert fleet.ids == ["b"]
    assert fleet.workers()[0].breaker.ejections == 2


def test_requests_sent_before_an_ejection_do_not_change_the_probation(fleet: Fleet) -> None:
    fleet.clock.advance(1.0)
    fleet.hear("a", "b")
    slow, broken = fleet.lease("a"), fleet.lease("a")
    fleet.eject("a")
    on_probation = fleet.lease("a")
    fleet.release(slow, AttemptResult.SUCCEEDED)
    fleet.release(broken, AttemptResult.FAILED)
    assert fleet.try_lease("a") is None, "still one request at a time"
    fleet.release(on_probation, AttemptResult.SUCCEEDED)
    assert fleet.workers()[0].breaker.probation_limit == 2


def test_the_last_worker_of_a_model_stays_available(fleet: Fleet) -> None:
    fleet.hear("a", "b")
    fleet.fail("a", 5)
    fleet.fail("b", 50)
    assert fleet.ids == ["b"], "the last worker stays"
    fleet.remove("b")
    assert fleet.ids == ["a"], "an ejected worker serves if it is the only one"
    assert len([fleet.lease("a") for _ in range(4)]) == 4, "it has all its slots"
    fleet.heartbeat(report(worker_id="c", model="other"))
    assert fleet.ids == ["a", "c"], "a worker of another model does not replace it"


def test_a_busy_worker_is_skipped_until_its_retry_after_and_not_ejected(fleet: Fleet) -> None:
    fleet.hear("a", "b")
    fleet.release(fleet.lease("a"), AttemptResult.BUSY, 3.0)
    assert fleet.ids == ["b"]
    assert fleet.available_in_s("demo") == 3.0
    fleet.release(fleet.lease("b"), AttemptResult.BUSY, 2.0)
    assert fleet.ids == []
    assert fleet.available_in_s("demo") == 2.0
    fleet.clock.now_s = START_S + 3.0
    assert fleet.ids == ["a", "b"]
    assert [worker.breaker.ejections for worker in fleet.workers()] == [0, 0]


def test_a_worker_is_called_back_once_it_is_ready_and_for_another_boot_or_url(fleet: Fleet) -> None:
    starting = report("2", ready=False)
    assert not fleet.needs_call_back(starting)
    fleet.heartbeat(starting)
    assert fleet.needs_call_back(report("2"))
    fleet.heartbeat(report("2"), reached=True)
    assert not fleet.needs_call_back(report("2"))
    for other in (report("1"), report("3"), report("2", url="http://a:1")):
        assert fleet.needs_call_back(other)
    fleet.heartbeat(report("2", url="http://a:1", ready=False))
    assert fleet.needs_call_back(report("2", url="http://a:1")), "nothing has answered there"


def test_a_worker_that_cannot_be_reached_gets_no_requests_until_it_is_reached(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while another gateway reaches it."""
    for _ in range(3):
        fleet.clock.advance(HEARTBEAT_INTERVAL_S)
        fleet.record_unreachable(report(), "no answer")
        assert fleet.ids == []
    (worker,) = fleet.workers()
    assert worker.problem == "no answer"
    assert worker.report.lanes == (), "nobody has confirmed its counts"
    (logged,) = caplog.messages
    assert logged == "worker.unreachable worker=mac: no answer"
    fleet.clock.advance(HEARTBEAT_INTERVAL_S)
    assert fleet.merge_remote(report(), 0.0)
    assert fleet.ids == []
    assert fleet.needs_call_back(report())
    fleet.heartbeat(report(), reached=True)
    assert fleet.ids == ["mac"]
    assert worker.problem == ""


def test_an_answer_to_a_call_back_ends_an_ejection_for_failed_connections(fleet: Fleet) -> None:
    fleet.hear("a", "b")
    again = report(worker_id="a")
    fleet.fail("a", 3, AttemptResult.UNREACHABLE)
    assert fleet.needs_call_back(again)
    fleet.record_unreachable(again, "no answer")
    fleet.clock.now_s += HEARTBEAT_INTERVAL_S
    assert fleet.ids == ["b"]
    assert [lane.name for lane in fleet.workers()[0].report.lanes] == ["vlm"], "it was confirmed"
    fleet.heartbeat(again, reached=True)
    assert fleet.ids == ["a", "b"]
    assert not fleet.needs_call_back(again)
    assert fleet.workers()[0].breaker.probation_limit == 1, "real answers end the probation"
    fleet.fail("b", 5, AttemptResult.FAILED)
    other = report(worker_id="b")
    assert not fleet.needs_call_back(other)
    fleet.heartbeat(other, reached=True)
    assert fleet.ids == ["a"], "it ends no ejection for failed requests"


def test_an_id_that_another_worker_asks_for_is_told_once_and_for_ten_minutes(fleet, caplog) -> None:
    fleet.heartbeat(report())
    (worker,) = fleet.workers()
    for _ in range(3):
        fleet.record_rival("mac", "http://other:1")
        assert worker.trouble.startswith("Another worker has started with the same id")
    assert caplog.messages == ["fleet.id_taken worker=mac url=http://other:1"]
    assert worker.accepting, "the one that has it goes on"
    fleet.clock.advance(600)
    assert worker.trouble == ""


def test_an_unproven_report_replaces_no_live_worker_and_holds_no_id(fleet: Fleet) -> None:
    fleet.heartbeat(report(), reached=True)
    fleet.record_unreachable(report(url="http://other:1"), "no answer")
    assert fleet.ids == ["mac"]
    fleet.record_unreachable(report(), "no answer")
    fleet.heartbeat(report("2", "http://new:1"), reached=True)
    assert [worker.report.url for worker in fleet.workers()] == ["http://new:1"]


def test_a_report_of_another_boot_changes_nothing(fleet: Fleet) -> None:
    fleet.heartbeat(report())
    fleet.update_report(report("0", ready=False))
    assert fleet.ids == ["mac"]


def test_the_next_view_tells_why_no_worker_of_a_model_speculates_any_more(fleet: Fleet) -> None:
    for changes, bypass, capable in (
        ({}, (), True),
        ({"head_healthy": False}, (Bypass.HEAD_UNHEALTHY,), False),
        ({"mtp_enabled": False}, (Bypass.NO_MTP_WORKER,), False),
        ({}, (), True),
    ):
        fleet.heartbeat(report(lanes=[lane_report("text-mtp", **changes), lane_report("vlm")]))
        view = fleet.view()
        assert (view.bypass["demo"], view.lanes["demo", "text-mtp"].capable) == (bypass, capable)
        assert view.lanes["demo", "vlm"].capable


def test_a_view_is_taken_anew_if_other_workers_are_available_and_else_updated(fleet) -> None:
    fleet.heartbeat(report())
    first = fleet.view()
    fleet.clock.advance(0.001)
    fleet.lease()
    assert fleet.view() is first
    assert fleet.lane.in_flight == 1
    fleet.remove("mac")
    assert fleet.view() is not first
    assert [*first.workers] == ["mac"]


def test_a_change_that_may_add_capacity_calls_back_and_a_stale_report_does_not(fleet) -> None:
    calls: list[None] = []
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


# Heartbeats that other gateways received and this one merges.


def test_a_remote_heartbeat_counts_from_its_time_of_receipt(fleet: Fleet) -> None:
    assert not fleet.merge_remote(report(), HEARTBEAT_TIMEOUT_S + 0.001)
    assert fleet.ids == [], "it came too late"
    assert fleet.merge_remote(report(), 5.0)
    (worker,) = fleet.workers()
    assert worker.heartbeat_at_s == START_S - 5.0
    assert (worker.local, worker.local_heartbeat_at_s) == (False, float("-inf"))
    assert fleet.view().known_models == {"demo"}
    fleet.clock.advance(HEARTBEAT_TIMEOUT_S - 5.0)
    assert fleet.ids == ["mac"]
    fleet.clock.advance(0.001)
    assert fleet.ids == []


def test_a_remote_heartbeat_older_than_the_last_one_changes_nothing(fleet: Fleet) -> None:
    fleet.heartbeat(report())
    fleet.clock.advance(3.0)
    for age_s in (3.0, 4.0):
        assert not fleet.merge_remote(report(ready=False), age_s)
    assert fleet.ids == ["mac"]
    assert fleet.merge_remote(report(ready=False), 2.0)
    assert fleet.ids == []
    (worker,) = fleet.workers()
    assert worker.heartbeat_at_s == START_S + 1.0
    assert worker.local, "it still counts as a worker with heartbeats here"
    assert worker.local_heartbeat_at_s == START_S


def test_a_remote_heartbeat_preserves_requests_unless_the_boot_is_new(fleet: Fleet) -> None:
    fleet.heartbeat(report())
    fleet.lease()
    for _ in range(2):
        fleet.clock.advance(HEARTBEAT_TIMEOUT_S - 1)
        assert fleet.merge_remote(report(), 0.0)
        assert fleet.lane.in_flight == 1
    fleet.clock.advance(1.0)
    assert fleet.merge_remote(report("2"), 0.5)
    assert fleet.lane.in_flight == 0
    assert fleet.workers()[0].report.boot_id == "2"


def test_a_remote_report_replaces_another_address_only_after_its_timeout(fleet: Fleet) -> None:
    fleet.heartbeat(report())
    fleet.clock.advance(1.0)
    assert not fleet.merge_remote(report("2", "http://other:9200"), 0.0)
    assert fleet.workers()[0].report.url == "http://mac:9200"
    fleet.clock.now_s = START_S + HEARTBEAT_TIMEOUT_S + 0.001
    assert fleet.merge_remote(report("2", "http://other:9200"), 0.0)
    assert fleet.workers()[0].report.url == "http://other:9200"


def test_a_cordon_applies_to_a_worker_that_another_gateway_reports(fleet: Fleet) -> None:
    fleet.set_cordoned(frozenset(("mac",)))
    fleet.merge_remote(report(), 5.0)
    assert fleet.ids == []
    fleet.set_cordoned(frozenset())
    assert fleet.ids == ["mac"]
    fleet.clock.advance(1.0)
    fleet.probe_succeeded(report())
    (worker,) = fleet.workers()
    assert worker.heartbeat_at_s == worker.local_heartbeat_at_s == START_S + 1.0
    assert worker.heartbeat_age_s == 0.0, "a probe counts as a heartbeat here"


def test_a_static_worker_ignores_reports_under_its_id(fleet: Fleet) -> None:
    watched = watched_engine(id="mac")
    fleet.heartbeat(watched.report, watched.engine)
    fleet.clock.advance(1.0)
    assert not fleet.merge_remote(report(), 0.0)
    assert fleet.workers()[0].report == watched.report


def test_c5_further_workers_are_rejected_until_one_is_gone(fleet, caplog) -> None:
    fleet.heartbeat(report(worker_id="first"))
    fleet.clock.now_s += 1
    for number in range(1, MAX_WORKERS):
        fleet.heartbeat(report(worker_id=f"mac-{number}"))
    for _ in range(3):
        with pytest.raises(TooManyWorkers):
            fleet.needs_call_back(report(worker_id="late"))
        with pytest.raises(TooManyWorkers):
            fleet.heartbeat(report(worker_id="late"))
        assert not fleet.merge_remote(report(worker_id="late"), 0.0)
    assert caplog.messages == [f"fleet.full workers={MAX_WORKERS} rejected=late"]
    fleet.heartbeat(report(worker_id="mac-1"))
    static = watched_engine()
    fleet.heartbeat(static.report, static.engine)
    fleet.clock.now_s += HEARTBEAT_TIMEOUT_S
    fleet.heartbeat(report(worker_id="late"))
    assert "late" in fleet.ids


def test_c5_the_models_that_a_fleet_knows_are_bounded() -> None:
    fleet = WorkerRegistry(FakeClock(), lambda: 0.0, frozenset(["static"]))
    for number in range(MAX_KNOWN_MODELS + 5):
        fleet.heartbeat(report(model=f"model-{number}"))
    known = fleet.view().known_models
    assert len(known) == MAX_KNOWN_MODELS + 1
    assert {"static", f"model-{MAX_KNOWN_MODELS + 4}"} <= known
    assert "model-4" not in known


def test_an_absence_names_its_kind_and_begins_with_the_last_sign_of_life(fleet: Fleet) -> None:
    for heard in (lambda: fleet.heartbeat(report()), lambda: fleet.remove("mac")):
        fleet.heartbeat(report())
        assert (fleet.absence("mac"), fleet.silent_urls()) == (None, ())
        fleet.clock.advance(HEARTBEAT_TIMEOUT_S + 3)
        assert fleet.workers() == ()
        assert fleet.absence("mac") == ("silent", HEARTBEAT_TIMEOUT_S + 3)
        assert fleet.silent_urls() == ("http://mac:9200",)
        heard()
        assert fleet.silent_urls() == ()
    fleet.clock.advance(2)
    assert fleet.absence("mac") == ("left", 2)
    fleet.heartbeat(report(boot_id="2", ready=False))
    assert fleet.absence("mac") is None
    fleet.remove("never-joined", restarting=True)
    assert fleet.absence("never-joined") is None


def test_a_worker_whose_process_is_started_again_is_absent_until_it_is_ready(fleet: Fleet) -> None:
    fleet.heartbeat(report())
    fleet.remove("mac", restarting=True)
    fleet.clock.now_s += 5
    fleet.remove("mac", restarting=True)
    assert fleet.absence("mac") == ("restarting", 0), "its process has ended again"
    fleet.heartbeat(report(boot_id="2", ready=False))
    assert fleet.absence("mac") == ("restarting", 0)
    fleet.heartbeat(report(boot_id="2"))
    assert fleet.absence("mac") is None


def test_the_log_tells_who_joins_who_is_gone_and_why_and_who_is_back(fleet: Fleet, caplog) -> None:
    """Once each: not with every heartbeat, and not while a worker still starts."""
    caplog.set_level(logging.INFO)
    place = "worker=mac model=demo url=http://mac:9200"

    def hear(**changes: Any) -> None:
        for _ in range(3):
            fleet.heartbeat(report(**changes), reached=True)

    hear(ready=False)
    assert caplog.messages == []
    hear()
    fleet.clock.advance(HEARTBEAT_TIMEOUT_S + 3)
    fleet.workers()
    fleet.workers()
    hear(ready=False)
    hear()
    fleet.remove("mac", restarting=True)
    fleet.clock.advance(2)
    hear(boot_id="2", ready=False)
    hear(boot_id="2")
    fleet.record_unreachable(report(boot_id="2"), "no answer")
    hear(boot_id="2")
    fleet.remove("mac")
    assert caplog.messages == [
        f"fleet.joined {place}",
        "fleet.lost worker=mac kind=silent: it has sent nothing for 10 s",
        f"fleet.returned {place} away_s=10",
        "fleet.lost worker=mac kind=restarting: its process ended and is being restarted",
        f"fleet.returned {place} away_s=2",
        "worker.unreachable worker=mac: no answer",
        "worker.reached worker=mac",
        "fleet.lost worker=mac kind=left: it signed off",
    ]


def test_the_log_tells_when_a_worker_is_ejected_or_busy(fleet: Fleet, caplog) -> None:
    caplog.set_level(logging.INFO)
    fleet.hear("a", "b")
    caplog.clear()
    fleet.fail("a", 5)
    for _ in range(3):
        fleet.release(fleet.lease("b"), AttemptResult.BUSY, 3.0)
        fleet.clock.advance(20.0)
        fleet.hear("a", "b")
    assert [one for one in caplog.messages if one.startswith("worker.")] == [
        "worker.ejected worker=a reason=5 requests failed in a row",
        "worker.busy worker=b pause_s=3.0",
    ]


def test_a_lost_worker_is_known_for_a_day_without_its_load(fleet: Fleet) -> None:
    fleet.heartbeat(busy(running=2))
    fleet.clock.advance(HEARTBEAT_TIMEOUT_S + 1)
    (absence,) = fleet.absences().values()
    assert (absence.report.url, absence.report.lanes) == ("http://mac:9200", ())
    fleet.clock.advance(86_400 - HEARTBEAT_TIMEOUT_S - 1)
    assert [*fleet.absences()] == ["mac"]
    fleet.clock.advance(1)
    assert fleet.absences() == {}


def test_absences_of_endless_workers_are_bounded(fleet: Fleet) -> None:
    for number in range(MAX_WORKERS + 5):
        fleet.heartbeat(report(worker_id=f"mac-{number}", url=f"http://mac-{number}:9200"))
        fleet.remove(f"mac-{number}")
    assert fleet.absence("mac-4") is None
    assert fleet.absence("mac-5") is not None


def test_nodes_come_from_live_workers_that_the_taker_can_reach(fleet: Fleet) -> None:
    names = ("taker", "full", "cordoned", "silent", "restarted")
    urls = {name: f"http://10.0.0.{number}:9200" for number, name in enumerate(names, 1)}
    urls["local"] = "http://127.0.0.1:9200"
    for name, url in urls.items():
        fleet.heartbeat(report(worker_id=name, url=url))
    fleet.heartbeat(report("2", worker_id="restarted", url=urls["restarted"]))
    fleet.set_cordoned(frozenset({"cordoned"}))
    fleet.clock.now_s += HEARTBEAT_TIMEOUT_S
    for name in ("taker", "full", "cordoned", "local"):
        fleet.heartbeat(report(worker_id=name, url=urls[name]))
    fleet.clock.now_s += 1
    states = {state.report.worker_id: state for state in fleet.workers()}
    holders = [((name, "1"), 100) for name in urls if name != "taker"]
    sources = fleet.node_sources(states["taker"], [*holders, (("gone", "1"), 100)])
    assert [source.url for source in sources] == [urls["full"], urls["cordoned"]]
    beside = fleet.node_sources(states["local"], [(("taker", "1"), 100)])
    assert [source.url for source in beside] == [urls["taker"]]
    assert len(fleet.node_sources(states["taker"], holders[:2] * 4)) == MAX_SOURCES


def test_no_nodes_travel_between_a_worker_with_a_certificate_and_one_without(fleet: Fleet) -> None:
    """A proxy may speak TLS for a worker that has not paired, which has no certificate either."""
    urls = {"a": "https://a:1", "b": "https://b:1", "plain": "http://c:1", "proxied": "https://d:1"}
    for name, url in urls.items():
        fleet.heartbeat(report(worker_id=name, url=url))
    states = {state.report.worker_id: state for state in fleet.workers()}
    backend = states["a"].backend
    assert isinstance(backend, PacelineWorker)
    backend.server_names = {"a": "a.worker", "b": "b.worker"}
    holders = [((name, "1"), 100) for name in ("b", "plain", "proxied")]
    sources = {name: fleet.node_sources(state, holders) for name, state in states.items()}
    assert [(one.url, one.server_name) for one in sources["a"]] == [("https://b:1", "b.worker")]
    assert [one.url for one in sources["plain"]] == ["http://c:1", "https://d:1"]


def test_no_nodes_come_from_or_to_a_server_of_another_kind(fleet: Fleet) -> None:
    static = watched_engine()
    fleet.heartbeat(report())
    fleet.heartbeat(static.report, static.engine)
    ours, theirs = fleet.workers()
    boots = [(state.report.worker_id, state.report.boot_id) for state in (ours, theirs)]
    assert fleet.node_sources(ours, [(boots[1], 100)]) == ()
    assert fleet.node_sources(theirs, [(boots[0], 100)]) == ()
