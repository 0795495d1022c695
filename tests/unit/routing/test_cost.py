"""The cost of a request at each worker, in seconds: queue, prefill, decode, memory and batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.worker import Lease
from gateway.routing.cost import UNMEASURED, draft_loss_share, load_cost_s, throughput_of
from gateway.routing.select import Candidate, RoutingRequest, decide
from gateway.routing.view import FleetView, LaneView, WorkerView
from policies.document import default_policy, read_policy
from policies.request.profile import Endpoint, RequestProfile, Sampling
from tests.support.fake_clock import FakeClock
from tests.support.prefix_claims import cached_at
from tests.support.scripted_worker import lane_report
from workers.protocol import WorkerReport

POLICY = default_policy()
LONG = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=16_000)
SHORT = LONG._replace(text_chars=400)
GREEDY = SHORT._replace(sampling=Sampling(temperature=0))
NOW_S = 1_000_000.0
Measured = dict[str, Any]


def report(name: str, *, lane: str = "vlm", memory: float = 0.0, **measured: Any) -> WorkerReport:
    """Return the report of a worker with one lane and `memory` as the share of memory in use."""
    return WorkerReport(
        worker_id=name,
        boot_id="1",
        url=f"http://{name}:1",
        model="demo",
        context_tokens=4096,
        memory_bytes=int(memory * 1000),
        memory_limit_bytes=1000,
        lanes=(lane_report(lane, **measured),),
    )


def worker(
    name: str,
    busy: int = 0,
    *,
    prefill_left_s: float = 0.0,
    answered_at_s: float = NOW_S,
    **measured: Any,
) -> WorkerView:
    """Return the view of a worker with `busy` requests and `prefill_left_s` of pending prefill."""
    worker_report = report(name, **measured)
    lanes = tuple(LaneView.of(lane, busy) for lane in worker_report.lanes)
    throughput = throughput_of(worker_report)
    view = WorkerView.of(name, ("demo",), lanes, (), "1", throughput=throughput)
    return view.at_time(NOW_S + prefill_left_s, answered_at_s)


def fleet_of(
    *workers: WorkerView, holders: str = "", tokens: int = 2000, is_system: bool = True
) -> FleetView:
    """Return a fleet; `holders` have so many tokens of the prompt cached."""
    cached = cached_at(*((name, "1") for name in holders), tokens=tokens, is_system=is_system)
    return replace(FleetView.of(workers, frozenset(("demo",))), now_s=NOW_S, cached=cached)


def worker_order(profile: RequestProfile, fleet: FleetView, seed: int = 0) -> str:
    request = RoutingRequest(POLICY, profile)
    candidates = decide(request, fleet, Random(seed)).candidates
    best, *_ = decide(request, fleet, Random(seed), first_only=True).candidates
    assert best.worker_id == candidates[0].worker_id, "a decision for the first is the same"
    return "".join(candidate.worker_id for candidate in candidates)


def test_the_cost_of_a_lane_is_the_sum_of_its_terms_in_seconds() -> None:
    """A worker needs 2 s for 100 tokens, and each row makes all answers 12% longer."""
    measured = report("a", memory=0.9, decode_tokens_per_s=50.0, prefill_tokens_per_s=500.0)
    throughput, lane = throughput_of(measured), measured.lanes[0]
    assert throughput.prefill_token_s == pytest.approx(1 / 500)
    assert throughput.memory_cost_s == pytest.approx(1.0), "half of what is left above 80%"
    paying = load_cost_s(throughput, lane, 3, 2)
    assert paying == pytest.approx(1.0 + 0.48 * (3 + 0.5 * 2))
    losing = load_cost_s(throughput, lane, 3, 2, draft_loss_share=0.3)
    assert losing - paying == pytest.approx(0.3 * 2.0)


def test_a_batch_loses_what_this_mac_has_measured_that_drafts_gain_in_another() -> None:
    """Drafts make one row 2.2 times as fast on one Mac, and none faster on another."""
    good = lane_report("text-mtp", draft_speedup_by_rows=(2.2, 1.65, 1.1, 0.0))
    assert [draft_loss_share(good, rows) for rows in (1, 2, 3)] == pytest.approx([0, 0.25, 0.5])
    assert draft_loss_share(good, 4) == draft_loss_share(good, 9) == 0, "not measured"
    old = lane_report("text-mtp", draft_speedup_by_rows=(1.0,) * 4, draft_tokens_by_rows=(0,) * 4)
    assert draft_loss_share(old, 1) == draft_loss_share(old, 9) == 0
    silent = lane_report("text-mtp", draft_tokens_by_rows=(2, 0))
    assert [draft_loss_share(silent, rows) for rows in (1, 2, 3)] == [0, 0.3, 0.3]


def test_a_worker_without_a_limit_of_its_memory_has_no_pressure() -> None:
    unlimited = report("a").model_copy(update={"memory_limit_bytes": 0})
    assert throughput_of(unlimited).memory_cost_s == 0


def test_a_lane_without_measurements_costs_as_much_as_on_a_mid_range_mac() -> None:
    assert UNMEASURED.prefill_token_s == pytest.approx(1 / 1000)
    for slots, row_s in ((4, 0.6), (8, 0.3), (0, 2.4)):
        lane = lane_report("vlm", slots=slots)
        assert load_cost_s(UNMEASURED, lane, 2, 0) == pytest.approx(2 * row_s)


def test_the_worker_with_faster_prefill_is_first_for_a_long_prompt() -> None:
    fast: Measured = {"prefill_tokens_per_s": 4000.0}
    slow: Measured = {"prefill_tokens_per_s": 500.0}
    assert worker_order(LONG, fleet_of(worker("a", **slow), worker("b", **fast))) == "ba"
    # Two requests ahead of it cost less than six more seconds of prefill.
    assert worker_order(LONG, fleet_of(worker("a", **slow), worker("b", 2, **fast))) == "ba"
    assert worker_order(SHORT, fleet_of(worker("a", **slow), worker("b", 2, **fast))) == "ab"


def test_a_prompt_costs_the_prefill_of_a_token_for_every_four_characters() -> None:
    fleet = fleet_of(worker("a", prefill_tokens_per_s=500.0))
    long, short = (
        decide(RoutingRequest(POLICY, profile), fleet, Random(0)).candidates[0].score_s
        for profile in (LONG, SHORT)
    )
    assert long - short == pytest.approx((16_000 - 400) / 4 / 500)


def test_a_picture_costs_the_prefill_of_300_tokens() -> None:
    fleet = fleet_of(worker("a", prefill_tokens_per_s=500.0))
    pictures, text = (
        decide(RoutingRequest(POLICY, profile), fleet, Random(0)).candidates[0].score_s
        for profile in (SHORT._replace(media=(("image", 3),)), SHORT)
    )
    assert pictures - text == pytest.approx(3 * 300 / 500)


def test_pending_prompts_add_their_prefill_time_to_the_cost() -> None:
    assert worker_order(SHORT, fleet_of(worker("a", 1, prefill_left_s=5), worker("b", 2))) == "ba"
    assert (
        worker_order(SHORT, fleet_of(worker("a", 1, prefill_left_s=-5), worker("b", 2))) == "ab"
    ), "their prefill is complete"


@pytest.mark.parametrize("weights", [{}, {"big": 2.0}])
def test_a_pending_prefill_costs_its_remaining_seconds(weights: dict[str, float]) -> None:
    pool = {"lanes": "vlm", "weights": weights}
    policy = read_policy(
        {"version": 1, "routes": [{"name": "all", "to": "p"}], "pools": {"p": pool}}, "test"
    )

    def score_s(prefill_left_s: float) -> float:
        request = RoutingRequest(policy, SHORT)
        return (
            decide(request, fleet_of(worker("a", prefill_left_s=prefill_left_s)), Random(0))
            .candidates[0]
            .score_s
        )

    assert score_s(2.5) - score_s(0.0) == pytest.approx(2.5)
    assert score_s(-2.5) == pytest.approx(score_s(0.0))
    assert worker_order(SHORT, fleet_of(worker("a", prefill_left_s=0.2), worker("b", 3))) == "ab"


def test_a_row_costs_most_on_the_worker_with_the_slowest_decode() -> None:
    quick: Measured = {"decode_tokens_per_s": 80.0}
    slow: Measured = {"decode_tokens_per_s": 8.0}
    assert worker_order(SHORT, fleet_of(worker("a", 1, **slow), worker("b", 3, **quick))) == "ba"


def test_a_worker_with_nearly_full_memory_ranks_behind_a_busier_one() -> None:
    assert worker_order(SHORT, fleet_of(worker("a", memory=0.99), worker("b", 1))) == "ba"
    assert worker_order(SHORT, fleet_of(worker("a", memory=0.79), worker("b", 1))) == "ab"


def test_a_batch_size_at_which_drafting_pays_is_preferred() -> None:
    pays, does_not = (2, 2, 2, 2), (2, 0, 0, 0)
    measured: Measured = {"lane": "text-mtp", "decode_tokens_per_s": 40.0}
    a = worker("a", 1, draft_tokens_by_rows=does_not, **measured)
    b = worker("b", 1, draft_tokens_by_rows=pays, **measured)
    candidates = decide(RoutingRequest(POLICY, GREEDY), fleet_of(a, b), Random(0)).candidates
    assert [(candidate.worker_id, candidate.reason) for candidate in candidates] == [
        ("b", "eligible"),
        ("a", "mtp_not_paying"),
    ]


def test_the_mac_on_which_drafts_gain_more_in_a_batch_is_preferred() -> None:
    measured: Measured = {"lane": "text-mtp", "decode_tokens_per_s": 40.0}
    a = worker("a", 1, draft_speedup_by_rows=(2.2, 1.1, 1.1, 1.1), **measured)
    b = worker("b", 1, draft_speedup_by_rows=(1.8, 1.7, 1.6, 1.5), **measured)
    assert worker_order(GREEDY, fleet_of(a, b)) == "ba"


def test_a_cached_prefix_saves_the_time_of_its_prefill_and_no_more() -> None:
    """At 500 tokens per second, 4,000 tokens take eight seconds and 100 tokens 0.2 seconds."""
    slow: Measured = {"prefill_tokens_per_s": 500.0, "slots": 8}
    for profile, shared_tokens, first in ((LONG, 3900, "a"), (SHORT, 90, "b")):
        fleet = fleet_of(worker("a", 2, **slow), worker("b", **slow), holders="a",
                     tokens=shared_tokens)  # fmt: skip
        assert worker_order(profile, fleet)[0] == first


@pytest.mark.parametrize("first_only", [False, True])
def test_a_single_candidate_reports_whether_it_has_the_prompt_cached(first_only: bool) -> None:
    request = RoutingRequest(POLICY, SHORT)
    for holders, cached in (("a", True), ("b", False)):
        fleet = fleet_of(worker("a"), holders=holders)
        (candidate,) = decide(request, fleet, Random(0), first_only=first_only).candidates
        assert candidate.prefix_cached is cached


def test_a_holder_loses_its_advantage_when_it_is_far_busier_than_the_best() -> None:
    """A system prompt, however long, is worth waiting for at most five eighths of a lane."""
    huge = LONG._replace(text_chars=4_000_000)
    firsts = [
        worker_order(
            huge,
            fleet_of(worker("a", busy, slots=8), worker("b", slots=8), holders="a",
                     tokens=1_000_000),
        )[0]
        for busy in range(9)
    ]  # fmt: skip
    assert firsts == ["a"] * 6 + ["b"] * 3


def test_a_conversation_waits_for_its_worker_as_long_as_reading_it_elsewhere_takes() -> None:
    """At 1,000 tokens per second, 1,700 tokens take as long as five rows of 0.3 seconds each."""
    for tokens, turns in ((500, 2), (1700, 6), (40_000, 8)):
        found = [
            worker_order(
                LONG,
                fleet_of(worker("a", busy, slots=8), worker("b", slots=8), holders="a",
                         tokens=tokens, is_system=False),
            )[0]
            for busy in range(9)
        ]  # fmt: skip
        assert found.index("b") == turns, "a full worker saves nothing"


def test_the_holder_of_more_turns_is_first_and_each_saves_its_own_tokens() -> None:
    workers = [worker(name, prefill_tokens_per_s=1000.0) for name in "abc"]
    fleet = replace(
        fleet_of(*workers),
        cached={
            **cached_at(("a", "1"), tokens=500),
            **cached_at(("b", "1"), tokens=3500, is_system=False),
        },
    )
    candidates = decide(RoutingRequest(POLICY, LONG), fleet, Random(0)).candidates
    assert [one.worker_id for one in candidates] == ["b", "a", "c"]
    assert [one.cached_tokens for one in candidates] == [3500, 500, 0]
    assert [round(one.prefill_s, 6) for one in candidates] == [0.5, 3.5, 4.0]


def test_no_request_explores_while_a_worker_has_its_conversation() -> None:
    for is_system, explored in ((True, True), (False, False)):
        stale = fleet_of(worker("a"), worker("b", answered_at_s=NOW_S - 60), holders="a",
                         is_system=is_system)  # fmt: skip
        firsts = {worker_order(LONG, stale, seed)[0] for seed in range(600)}
        assert firsts == ({"a", "b"} if explored else {"a"})


def test_a_frequent_prompt_spreads_to_more_workers_and_a_rare_one_stays() -> None:
    for requests, expected in ((1, 1), (14, 3)):
        busy, holders = Counter[str](), {"a"}
        for number in range(requests):
            workers = [worker(name, busy[name], slots=8) for name in "abcd"]
            fleet = fleet_of(*workers, holders="".join(sorted(holders)), tokens=3900)
            first = worker_order(LONG, fleet, seed=number)[0]
            busy[first] += 1
            holders.add(first)
        assert len(holders) >= expected
        assert (len(holders) == 1) == (expected == 1)


def test_unequal_workers_receive_requests_in_proportion_to_their_capacity() -> None:
    big = {"slots": 16, "prefill_tokens_per_s": 2000.0, "decode_tokens_per_s": 80.0}
    small = {"slots": 4, "prefill_tokens_per_s": 500.0, "decode_tokens_per_s": 20.0}
    busy = Counter[str]()
    for number in range(12):
        workers = (worker("a", busy["a"], **big), worker("b", busy["b"], **small))
        busy[worker_order(SHORT, fleet_of(*workers), seed=number)[0]] += 1
    assert busy["a"] >= 3 * busy["b"] > 0


def test_one_request_in_a_hundred_explores_a_worker_without_recent_answers() -> None:
    stale = fleet_of(worker("a"), worker("b", 2, answered_at_s=NOW_S - 60))
    recent = fleet_of(worker("a"), worker("b", 2, answered_at_s=NOW_S - 20))
    firsts = Counter(worker_order(SHORT, stale, seed)[0] for seed in range(3000))
    assert 10 <= firsts["b"] <= 60
    assert {worker_order(SHORT, recent, seed)[0] for seed in range(1000)} == {"a"}
    explored = next(seed for seed in range(3000) if worker_order(SHORT, stale, seed)[0] == "b")
    candidates = decide(RoutingRequest(POLICY, SHORT), stale, Random(explored)).candidates
    assert [candidate.explored for candidate in candidates] == [True, False]
    full = fleet_of(worker("a"), worker("b", 4, answered_at_s=NOW_S - 60))
    assert {worker_order(SHORT, full, seed)[0] for seed in range(1000)} == {"a"}, (
        "no request queues to explore"
    )


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.floats(0, 30),
            st.floats(0, 1),
            st.floats(1, 9000),
            st.floats(1, 200),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sets(st.integers(0, 7)),
    st.integers(0, 100_000),
    st.integers(),
)
def test_candidates_are_sorted_by_their_score_in_seconds(
    workers: list[tuple[int, float, float, float, float]], holders: set[int], chars: int, seed: int
) -> None:
    fleet = fleet_of(
        *(
            worker(str(n), busy, prefill_left_s=prefill_left_s, memory=memory,
                prefill_tokens_per_s=read,                decode_tokens_per_s=write)
            for n, (busy, prefill_left_s, memory, read, write) in enumerate(workers)
        ),
        holders="".join(map(str, holders)),
    )  # fmt: skip
    request = RoutingRequest(POLICY, LONG._replace(text_chars=chars))
    candidates = decide(request, fleet, Random(seed)).candidates
    assert [candidate.score_s for candidate in candidates] == sorted(
        candidate.score_s for candidate in candidates
    )
    assert all(candidate.score_s >= candidate.prefill_s - 1e-6 >= -1e-6 for candidate in candidates)
    assert {candidate.worker_id for candidate in candidates if candidate.prefix_cached} == {
        str(n) for n in holders if n < len(workers)
    }
    assert len(candidates) == len(workers)


class TestFleet:
    """Costs that the registry tracks between two heartbeats of a worker."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def fleet(self, clock: FakeClock) -> WorkerRegistry:
        registry = WorkerRegistry(clock, lambda: 0.0)
        registry.heartbeat(report("a"))
        return registry

    def rows(self, fleet: WorkerRegistry) -> int:
        return fleet.view().workers[0].lane_costs[0].ref.lane.busy_rows

    def prefill_left_s(self, fleet: WorkerRegistry) -> float:
        view = fleet.view()
        return max(0.0, view.workers[0].lane_costs[0].prefill_until_s - view.now_s)

    def test_rows_of_other_gateways_count_and_rows_of_this_gateway_count_once(
        self, fleet: WorkerRegistry
    ) -> None:
        leases = [fleet.acquire(Candidate("vlm", "vlm", "a", "", 0)) for _ in range(2)]
        fleet.heartbeat(report("a", running=2, waiting=3))
        assert self.rows(fleet) == 5
        for lease in leases:
            assert lease is not None
            fleet.release(lease, AttemptResult.SUCCEEDED)
        assert self.rows(fleet) == 3
        # The worker sent this report while the two still ran, so no other gateway has rows.
        fleet.heartbeat(report("a", running=2))
        assert self.rows(fleet) == 0

    def test_dispatched_prompts_are_read_one_after_the_other(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        lease = fleet.acquire(Candidate("vlm", "vlm", "a", "", 0, prefill_s=3.0))
        assert lease is not None
        clock.advance(1)
        fleet.acquire(Candidate("vlm", "vlm", "a", "", 0, prefill_s=4.0))
        assert self.prefill_left_s(fleet) == pytest.approx(6.0)
        fleet.release(lease, AttemptResult.SUCCEEDED)
        assert self.prefill_left_s(fleet) == pytest.approx(4.0), (
            "the answer shows that its prefill is complete"
        )
        fleet.heartbeat(report("a", pending_prefill_tokens=1000, prefill_tokens_per_s=500.0))
        assert self.prefill_left_s(fleet) == pytest.approx(2.0), (
            "the report of the worker replaces the estimate"
        )

    def test_a_cached_view_equals_a_new_one(self, fleet: WorkerRegistry, clock: FakeClock) -> None:
        rng = Random(5)
        leases: list[Lease] = []
        for name in "bcd":
            fleet.heartbeat(report(name))
        for step in range(400):
            clock.advance(rng.random() / 10)
            name = rng.choice("abcd")
            event = rng.randrange(6)
            if event == 0:
                fleet.heartbeat(report(name, running=rng.randrange(4)))
            elif event == 1:
                fleet.set_cordoned(frozenset(rng.sample("abcd", rng.randrange(3))))
            elif event == 2 and leases:
                result = rng.choice(
                    (AttemptResult.SUCCEEDED, AttemptResult.FAILED, AttemptResult.BUSY)
                )
                fleet.release(leases.pop(), result, 0.5)
            elif (
                lease := fleet.acquire(Candidate("vlm", "vlm", name, "", 0, prefill_s=0.1))
            ) is not None:
                leases.append(lease)
            cached = fleet.view()
            fleet._views.invalidate()
            assert cached == fleet.view(), step
