"""Which workers hold a system prompt: when claims expire or are disproved, and how they affect
routing.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefix_affinity import MAX_PREFIXES, PrefixClaim, PrefixIndex
from gateway.routing.select import RoutingRequest, decide
from gateway.routing.view import FleetView, LaneView, WorkerView
from gateway.types import Usage
from policies.document import default_policy
from policies.sections import PrefixPolicy
from tests.support.fake_clock import START_S, FakeClock
from tests.support.prefix_claims import LAPTOP, RULES, STUDIO, prefix_holders
from tests.support.request_profiles import SAMPLED
from tests.support.scripted_worker import ScriptedWorker, lane_report
from workers.protocol import WorkerReport


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def prefixes(clock: FakeClock) -> PrefixIndex:
    return PrefixIndex(clock)


def test_a_claim_expires_after_its_ttl(prefixes: PrefixIndex, clock: FakeClock) -> None:
    prefixes.record_dispatch("p", STUDIO, RULES)
    clock.now_s = START_S + RULES.ttl_s - 1
    assert prefix_holders(prefixes) == {STUDIO}
    clock.now_s = START_S + RULES.ttl_s
    assert prefix_holders(prefixes) == set()


def test_only_the_most_recent_holders_are_remembered(prefixes: PrefixIndex) -> None:
    two_holders = PrefixPolicy(max_workers=2)
    for holding in (STUDIO, LAPTOP, STUDIO, ("mini", "1")):
        prefixes.record_dispatch("p", holding, two_holders)
    assert prefix_holders(prefixes) == {STUDIO, ("mini", "1")}
    prefixes.record_dispatch("p", STUDIO, PrefixPolicy(max_workers=0))
    assert prefix_holders(prefixes) == set()


def test_the_oldest_prefixes_are_evicted_beyond_the_limit(prefixes: PrefixIndex) -> None:
    for number in range(MAX_PREFIXES + 5):
        prefixes.record_dispatch(str(number), STUDIO, RULES)
    assert len(prefixes) == MAX_PREFIXES
    assert prefix_holders(prefixes, "4") == set()
    assert prefix_holders(prefixes, "5") == {STUDIO}


def test_the_usage_of_a_response_confirms_or_drops_a_claim(prefixes: PrefixIndex) -> None:
    prefixes.record_dispatch("p", STUDIO, RULES)
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 0), expected=False)
    assert prefix_holders(prefixes) == {STUDIO}, "the worker has cached it by now"
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 90), expected=True)
    prefixes.record_usage("p", STUDIO, None, expected=True)
    assert prefix_holders(prefixes) == {STUDIO}, "a response without usage disproves nothing"
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 0), expected=True)
    assert prefix_holders(prefixes) == set()
    assert prefixes.mispredicted == 1


def test_only_a_response_that_reports_cached_tokens_sets_the_length_of_a_prefix(
    prefixes: PrefixIndex,
) -> None:
    prefixes.record_dispatch("p", STUDIO, RULES)
    for key, cached_tokens in (("p", 90), ("p", 0), ("unclaimed", 40)):
        prefixes.record_usage(key, STUDIO, Usage(100, 5, cached_tokens), expected=False)
    views = [prefixes.annotate(FleetView.of((), frozenset()), key) for key in ("p", "unclaimed")]
    assert [view.prefix_tokens for view in views] == [90, 0]


def report_of(worker: ScriptedWorker, *names: str, prefix_count: int | None = None) -> WorkerReport:
    return worker.report(
        prefixes=names, prefix_count=len(names) if prefix_count is None else prefix_count
    )


def test_reports_add_and_evict_claims_of_their_worker(prefixes: PrefixIndex) -> None:
    worker = ScriptedWorker(worker_id="studio", boot_id="1")
    worker.socket.close()
    prefixes.record_report(report_of(worker, "p", "q"))
    assert prefix_holders(prefixes) == prefix_holders(prefixes, "q") == {STUDIO}
    prefixes.record_dispatch("p", LAPTOP, RULES)
    prefixes.record_report(report_of(worker, "q"))
    assert prefix_holders(prefixes) == {LAPTOP}, "evicted at that worker only"
    # A report that lists only some of the prefixes evicts none.
    prefixes.record_report(report_of(worker, "r", prefix_count=3))
    assert prefix_holders(prefixes, "q") == prefix_holders(prefixes, "r") == {STUDIO}


def test_a_report_restores_no_claim_that_a_response_has_disproved(prefixes: PrefixIndex) -> None:
    worker = ScriptedWorker(worker_id="studio", boot_id="1")
    worker.socket.close()
    prefixes.record_report(report_of(worker, "p"))
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 0), expected=True)
    prefixes.record_report(report_of(worker, "p", "q"))
    assert prefix_holders(prefixes) == set()
    assert prefix_holders(prefixes, "q") == {STUDIO}


def test_a_report_without_a_pending_prefix_does_not_evict_its_claim(
    prefixes: PrefixIndex,
) -> None:
    worker = ScriptedWorker(worker_id="studio", boot_id="1")
    worker.socket.close()
    prefixes.record_report(report_of(worker, "q"))
    prefixes.record_dispatch("p", STUDIO, RULES)
    prefixes.record_report(report_of(worker, "q"))
    assert prefix_holders(prefixes) == {STUDIO}


def test_a_claim_of_another_gateway_expires_at_the_same_time_here(
    prefixes: PrefixIndex, clock: FakeClock
) -> None:
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=300.0)
    clock.advance(599.0)
    assert prefix_holders(prefixes) == {STUDIO}
    clock.advance(1.0)
    assert prefix_holders(prefixes) == set()


def test_a_claim_that_expired_before_its_arrival_is_ignored(prefixes: PrefixIndex) -> None:
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=900.0)
    assert len(prefixes) == 0
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=899.0)
    assert prefix_holders(prefixes) == {STUDIO}
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=901.0)
    assert prefix_holders(prefixes) == {STUDIO}, "it does not end a newer claim of the same worker"


def test_a_withdrawn_claim_of_another_gateway_drops_only_that_boot(
    prefixes: PrefixIndex,
) -> None:
    for boot in (STUDIO, LAPTOP):
        prefixes.merge(PrefixClaim("p", *boot, 900.0), age_s=1.0)
    prefixes.merge(PrefixClaim("p", *STUDIO, 0.0), age_s=1.0)
    assert prefix_holders(prefixes) == {LAPTOP}


def test_a_merged_claim_is_not_published_again(prefixes: PrefixIndex) -> None:
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=1.0)
    assert prefixes.take_pending() == ()
    prefixes.record_dispatch("p", LAPTOP, RULES)
    assert prefixes.take_pending() == (PrefixClaim("p", *LAPTOP, RULES.ttl_s),)
    assert prefixes.take_pending() == ()


def worker_of(worker_boot: tuple[str, str], in_flight: int = 0) -> WorkerView:
    lane = LaneView.of(lane_report("vlm"), in_flight)
    return WorkerView.of(worker_boot[0], ("demo",), (lane,), boot_id=worker_boot[1])


def first_of(*workers: WorkerView, seed: int = 0) -> str:
    fleet = replace(FleetView.of(workers, frozenset(("demo",))), prefix_boots=frozenset((STUDIO,)))
    return decide(REQUEST, fleet, Random(seed)).candidates[0].worker_id


REQUEST = RoutingRequest(default_policy(), SAMPLED)


def test_a_holder_is_first_until_it_is_much_busier() -> None:
    """With four slots, the holder is first up to two requests, then the other worker."""
    found = [first_of(worker_of(STUDIO, busy), worker_of(LAPTOP)) for busy in range(5)]
    assert found == ["studio"] * 3 + ["laptop"] * 2


def test_a_full_holder_ranks_behind_a_worker_with_a_free_slot() -> None:
    assert first_of(worker_of(STUDIO, 4), worker_of(LAPTOP, 3)) == "laptop"


def test_a_full_holder_costs_as_much_as_another_full_worker() -> None:
    workers = (worker_of(STUDIO, 4), worker_of(LAPTOP, 4))
    fleet = replace(FleetView.of(workers, frozenset(("demo",))), prefix_boots=frozenset((STUDIO,)))
    holder, other = decide(REQUEST, fleet, Random(0)).candidates
    assert holder.score_s == other.score_s


def test_a_restarted_worker_holds_no_prefix() -> None:
    restarted = worker_of(("studio", "2"))
    firsts = {first_of(restarted, worker_of(LAPTOP), seed=seed) for seed in range(50)}
    assert firsts == {"studio", "laptop"}


@given(
    busy=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    holders=st.sets(st.integers(0, 5)),
    seed=st.integers(0, 99),
)
def test_holders_change_the_order_of_candidates_and_never_the_set(
    busy: list[int], holders: set[int], seed: int
) -> None:
    workers = tuple(worker_of((f"mac-{n}", "1"), count) for n, count in enumerate(busy))
    plain = FleetView.of(workers, frozenset(("demo",)))
    marked = replace(plain, prefix_boots=frozenset((f"mac-{n}", "1") for n in holders))
    without, found = (decide(REQUEST, fleet, Random(seed)).candidates for fleet in (plain, marked))
    assert {candidate.worker_id for candidate in without} == {
        candidate.worker_id for candidate in found
    }
    assert {candidate.worker_id for candidate in found if candidate.prefix_cached} <= {
        f"mac-{n}" for n in holders
    }
    least = min(candidate.load for candidate in found)
    assert found[0].load <= least + 0.625
    assert not found[0].prefix_cached or found[0].load < 1 or found[0].load == least
