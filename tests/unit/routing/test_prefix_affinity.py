"""Who holds a system prompt: how long that is believed, what proves it untrue, whom it draws."""

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


def test_a_claim_ends_with_its_time(prefixes: PrefixIndex, clock: FakeClock) -> None:
    prefixes.record_dispatch("p", STUDIO, RULES)
    clock.now_s = START_S + RULES.ttl_s - 1
    assert prefix_holders(prefixes) == {STUDIO}
    clock.now_s = START_S + RULES.ttl_s
    assert prefix_holders(prefixes) == set()


def test_the_last_that_had_it_are_remembered(prefixes: PrefixIndex) -> None:
    two = PrefixPolicy(max_workers=2)
    for holding in (STUDIO, LAPTOP, STUDIO, ("mini", "1")):
        prefixes.record_dispatch("p", holding, two)
    assert prefix_holders(prefixes) == {STUDIO, ("mini", "1")}
    prefixes.record_dispatch("p", STUDIO, PrefixPolicy(max_workers=0))
    assert prefix_holders(prefixes) == set()


def test_a_flood_of_system_prompts_pushes_out_the_oldest(prefixes: PrefixIndex) -> None:
    for number in range(MAX_PREFIXES + 5):
        prefixes.record_dispatch(str(number), STUDIO, RULES)
    assert len(prefixes) == MAX_PREFIXES
    assert prefix_holders(prefixes, "4") == set()
    assert prefix_holders(prefixes, "5") == {STUDIO}


def test_what_a_worker_counted_confirms_or_drops_its_claim(prefixes: PrefixIndex) -> None:
    prefixes.record_dispatch("p", STUDIO, RULES)
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 0), expected=False)
    assert prefix_holders(prefixes) == {STUDIO}, "it has read it now"
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 90), expected=True)
    prefixes.record_usage("p", STUDIO, None, expected=True)
    assert prefix_holders(prefixes) == {STUDIO}, "what failed later says nothing of it"
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 0), expected=True)
    assert prefix_holders(prefixes) == set()
    assert prefixes.mispredicted == 1


def announced(fake: ScriptedWorker, *names: str, held: int | None = None) -> WorkerReport:
    return fake.report(prefixes=names, prefix_count=len(names) if held is None else held)


def test_what_a_worker_stored_and_evicted_is_learnt_from_its_reports(prefixes: PrefixIndex) -> None:
    fake = ScriptedWorker(worker_id="studio", boot_id="1")
    fake.socket.close()
    prefixes.record_report(announced(fake, "p", "q"))
    assert prefix_holders(prefixes) == prefix_holders(prefixes, "q") == {STUDIO}
    prefixes.record_dispatch("p", LAPTOP, RULES)
    prefixes.record_report(announced(fake, "q"))
    assert prefix_holders(prefixes) == {LAPTOP}, "evicted there, and nowhere else"
    # One that is only not among those that are told is not evicted.
    prefixes.record_report(announced(fake, "r", held=3))
    assert prefix_holders(prefixes, "q") == prefix_holders(prefixes, "r") == {STUDIO}


def test_a_report_restores_no_claim_that_a_response_has_disproved(prefixes: PrefixIndex) -> None:
    fake = ScriptedWorker(worker_id="studio", boot_id="1")
    fake.socket.close()
    prefixes.record_report(announced(fake, "p"))
    prefixes.record_usage("p", STUDIO, Usage(100, 5, 0), expected=True)
    prefixes.record_report(announced(fake, "p", "q"))
    assert prefix_holders(prefixes) == set()
    assert prefix_holders(prefixes, "q") == {STUDIO}


def test_what_is_being_read_is_not_forgotten_for_a_report_that_has_it_not_yet(
    prefixes: PrefixIndex,
) -> None:
    fake = ScriptedWorker(worker_id="studio", boot_id="1")
    fake.socket.close()
    prefixes.record_report(announced(fake, "q"))
    prefixes.record_dispatch("p", STUDIO, RULES)
    prefixes.record_report(announced(fake, "q"))
    assert prefix_holders(prefixes) == {STUDIO}


def test_a_claim_of_another_gateway_ends_when_it_ends_there(
    prefixes: PrefixIndex, clock: FakeClock
) -> None:
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=300.0)
    clock.advance(599.0)
    assert prefix_holders(prefixes) == {STUDIO}
    clock.advance(1.0)
    assert prefix_holders(prefixes) == set()


def test_a_claim_that_ended_before_it_arrived_is_ignored(prefixes: PrefixIndex) -> None:
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=900.0)
    assert len(prefixes) == 0
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=899.0)
    assert prefix_holders(prefixes) == {STUDIO}
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=901.0)
    assert prefix_holders(prefixes) == {STUDIO}, "it ends no newer claim of the same worker"


def test_a_withdrawn_claim_of_another_gateway_drops_that_boot_alone(
    prefixes: PrefixIndex,
) -> None:
    for boot in (STUDIO, LAPTOP):
        prefixes.merge(PrefixClaim("p", *boot, 900.0), age_s=1.0)
    prefixes.merge(PrefixClaim("p", *STUDIO, 0.0), age_s=1.0)
    assert prefix_holders(prefixes) == {LAPTOP}


def test_a_merged_claim_is_not_sent_on(prefixes: PrefixIndex) -> None:
    prefixes.merge(PrefixClaim("p", *STUDIO, 900.0), age_s=1.0)
    assert prefixes.take_pending() == ()
    prefixes.record_dispatch("p", LAPTOP, RULES)
    assert prefixes.take_pending() == (PrefixClaim("p", *LAPTOP, RULES.ttl_s),)
    assert prefixes.take_pending() == ()


def worker_of(holding: tuple[str, str], in_flight: int = 0) -> WorkerView:
    lane = LaneView.of(lane_report("vlm"), in_flight)
    return WorkerView.of(holding[0], ("demo",), (lane,), boot_id=holding[1])


def first_of(*workers: WorkerView, seed: int = 0) -> str:
    fleet = replace(FleetView.of(workers, frozenset(("demo",))), prefix_boots=frozenset((STUDIO,)))
    return decide(CASE, fleet, Random(seed)).candidates[0].worker_id


CASE = RoutingRequest(default_policy(), SAMPLED)


def test_a_holder_is_first_until_it_is_much_busier() -> None:
    """Of four rows: at two it is still asked, at three the other one reads the prompt too."""
    found = [first_of(worker_of(STUDIO, busy), worker_of(LAPTOP)) for busy in range(5)]
    assert found == ["studio"] * 3 + ["laptop"] * 2


def test_a_full_holder_is_not_waited_for() -> None:
    assert first_of(worker_of(STUDIO, 4), worker_of(LAPTOP, 3)) == "laptop"


def test_what_a_worker_held_ends_with_its_life() -> None:
    restarted = worker_of(("studio", "2"))
    firsts = {first_of(restarted, worker_of(LAPTOP), seed=seed) for seed in range(50)}
    assert firsts == {"studio", "laptop"}


@given(
    busy=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    held=st.sets(st.integers(0, 5)),
    seed=st.integers(0, 99),
)
def test_holders_change_the_order_and_never_who_may_answer(
    busy: list[int], held: set[int], seed: int
) -> None:
    workers = tuple(worker_of((f"mac-{n}", "1"), count) for n, count in enumerate(busy))
    plain = FleetView.of(workers, frozenset(("demo",)))
    marked = replace(plain, prefix_boots=frozenset((f"mac-{n}", "1") for n in held))
    without, found = (decide(CASE, fleet, Random(seed)).candidates for fleet in (plain, marked))
    assert {one.worker_id for one in without} == {one.worker_id for one in found}
    assert {one.worker_id for one in found if one.prefix_cached} <= {f"mac-{n}" for n in held}
    least = min(one.load for one in found)
    assert found[0].load <= least + 0.625
    assert not found[0].prefix_cached or found[0].load < 1 or found[0].load == least
