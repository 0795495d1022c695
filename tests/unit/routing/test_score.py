"""The cost of a request at each worker, in seconds: queue, prefill, decode, memory and batch."""

from collections import Counter
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import NEVER_S, WorkerRegistry
from gateway.fleet.worker import Lease
from gateway.routing.load_cost import draft_loss_share, load_cost_s, throughput_of
from gateway.routing.select import Candidate, RoutingRequest, decide
from gateway.routing.view import CachedPrefixes, FleetView, WorkerView
from paceline.protocol import WorkerReport
from paceline.request.profile import Endpoint, RequestProfile, Sampling
from policies.document import PolicyDocument, default_policy
from tests.support.fake_clock import FakeClock
from tests.support.fleet_views import view_of
from tests.support.policies import make_policy
from tests.support.prefix_claims import cached_at
from tests.support.scheduler_harness import worker_report
from tests.support.scripted_worker import lane_report

POLICY = default_policy()
LONG = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=16_000)
SHORT = LONG._replace(text_chars=400)
GREEDY = SHORT._replace(sampling=Sampling(temperature=0))
NOW_S = 1_000_000.0


def report(name: str, *, lane: str = "vlm", memory: float = 0.0, **measured: Any) -> WorkerReport:
    """Return the report of a worker with one lane and `memory` as the share of memory in use."""
    return worker_report(
        name,
        memory_bytes=int(memory * 1000),
        memory_limit_bytes=1000,
        lanes=[lane_report(lane, **measured)],
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
    throughput = throughput_of(worker_report)
    return view_of(
        name,
        *worker_report.lanes,
        busy=busy,
        boot_id="1",
        throughput=throughput,
        prefill_until_s=NOW_S + prefill_left_s,
        answered_at_s=answered_at_s,
    )


class CachingFleet(NamedTuple):
    """A fleet, and what its workers have cached of a prompt."""

    view: FleetView
    cached: CachedPrefixes


def fleet_of(
    *workers: WorkerView, holders: str = "", tokens: int = 2000, is_system: bool = True
) -> CachingFleet:
    """Return a fleet; `holders` have so many tokens of the prompt cached."""
    cached = cached_at(*((name, "1") for name in holders), tokens=tokens, is_system=is_system)
    return CachingFleet(FleetView.of(workers, frozenset(("demo",))), cached)


def candidates_of(
    profile: RequestProfile, fleet: CachingFleet, seed: int = 0, policy: PolicyDocument = POLICY
) -> tuple[Candidate, ...]:
    view, cached = fleet
    inputs = RoutingRequest(policy, profile), view, NOW_S
    candidates = decide(*inputs, Random(seed), cached).candidates
    best, *_ = decide(*inputs, Random(seed), cached, first_only=True).candidates
    assert best.worker_id == candidates[0].worker_id, "a decision for the first is the same"
    return candidates


def worker_order(profile: RequestProfile, fleet: CachingFleet, seed: int = 0) -> str:
    return "".join(candidate.worker_id for candidate in candidates_of(profile, fleet, seed))


def test_the_cost_of_a_lane_is_the_sum_of_its_terms_in_seconds() -> None:
    """A worker needs 2 s for 100 tokens, and each row makes all answers 12% longer."""
    measured = report("a", memory=0.9, decode_tokens_per_s=50.0, prefill_tokens_per_s=500.0)
    throughput, lane = throughput_of(measured), measured.lanes[0]
    assert throughput.prefill_token_s == pytest.approx(1 / 500)
    assert throughput.memory_cost_s == pytest.approx(1.0), "half of what is left above 80%"
    paying = load_cost_s(throughput, lane, 3, 2)
    assert paying == pytest.approx(1.0 + 0.48 * (3 + 0.5 * 2))
    assert load_cost_s(throughput, lane, 3, 2, full=True) == pytest.approx(1.0 + 0.48 * 31)
    drafts = lane.model_copy(update={"draft_tokens_by_rows": (2, 0)})
    losing = load_cost_s(throughput, drafts, 3, 2)
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


def test_a_lane_without_measurements_costs_as_much_as_on_a_mid_range_mac() -> None:
    for slots, row_s in ((4, 0.6), (8, 0.3), (0, 2.4)):
        unmeasured = report("a", slots=slots)
        throughput = throughput_of(unmeasured)
        assert throughput.prefill_token_s == pytest.approx(1 / 1000)
        assert load_cost_s(throughput, unmeasured.lanes[0], 2, 0) == pytest.approx(2 * row_s)
    unlimited = report("a").model_copy(update={"memory_limit_bytes": 0})
    assert throughput_of(unlimited).memory_cost_s == 0


def reads(tokens_per_s: float, name: str, busy: int = 0, **measured: Any) -> WorkerView:
    return worker(name, busy, prefill_tokens_per_s=tokens_per_s, **measured)


def writes(tokens_per_s: float, name: str, busy: int = 0, **measured: Any) -> WorkerView:
    return worker(name, busy, decode_tokens_per_s=tokens_per_s, **measured)


@pytest.mark.parametrize(
    ("profile", "workers", "order"),
    [
        (LONG, [reads(500, "a"), reads(4000, "b")], "ba"),
        # Two requests ahead of it cost less than six more seconds of prefill.
        (LONG, [reads(500, "a"), reads(4000, "b", 2)], "ba"),
        (SHORT, [reads(500, "a"), reads(4000, "b", 2)], "ab"),
        # A row costs most on the worker with the slowest decode.
        (SHORT, [writes(8, "a", 1), writes(80, "b", 3)], "ba"),
        (SHORT, [worker("a", memory=0.99), worker("b", 1)], "ba"),
        (SHORT, [worker("a", memory=0.79), worker("b", 1)], "ab"),
        # Pending prompts count until their prefill is complete.
        (SHORT, [worker("a", 1, prefill_left_s=5), worker("b", 2)], "ba"),
        (SHORT, [worker("a", 1, prefill_left_s=-5), worker("b", 2)], "ab"),
        (SHORT, [worker("a", prefill_left_s=0.2), worker("b", 3)], "ab"),
    ],
)
def test_the_worker_that_costs_fewer_seconds_is_first(profile, workers, order) -> None:
    assert worker_order(profile, fleet_of(*workers)) == order


@pytest.mark.parametrize(
    ("larger", "tokens"),
    [(LONG, (16_000 - 400) / 4), (SHORT._replace(media=(("image", 3),)), 3 * 300)],
    ids=["a token for four characters", "300 tokens for a picture"],
)
def test_a_prompt_costs_the_prefill_of_its_tokens(larger: RequestProfile, tokens: float) -> None:
    more, less = (candidates_of(one, fleet_of(reads(500, "a")))[0] for one in (larger, SHORT))
    assert more.score_s - less.score_s == pytest.approx(tokens / 500)


@pytest.mark.parametrize("weights", [{}, {"big": 2.0}])
def test_a_pending_prefill_costs_its_remaining_seconds(weights: dict[str, float]) -> None:
    policy = make_policy("p", {"p": {"lanes": "vlm", "weights": weights}})

    def score_s(prefill_left_s: float) -> float:
        fleet = fleet_of(worker("a", prefill_left_s=prefill_left_s))
        return candidates_of(SHORT, fleet, policy=policy)[0].score_s

    assert score_s(2.5) - score_s(0.0) == pytest.approx(2.5)
    assert score_s(-2.5) == pytest.approx(score_s(0.0))


def test_the_mac_on_which_drafts_gain_more_in_a_batch_is_preferred() -> None:
    a = writes(40, "a", 1, lane="text-mtp", draft_tokens_by_rows=(2, 0, 0, 0))
    b = writes(40, "b", 1, lane="text-mtp", draft_tokens_by_rows=(2, 2, 2, 2))
    found = [(one.worker_id, one.reason) for one in candidates_of(GREEDY, fleet_of(a, b))]
    assert found == [("b", "eligible"), ("a", "mtp_not_paying")]
    a = writes(40, "a", 1, lane="text-mtp", draft_speedup_by_rows=(2.2, 1.1, 1.1, 1.1))
    b = writes(40, "b", 1, lane="text-mtp", draft_speedup_by_rows=(1.8, 1.7, 1.6, 1.5))
    assert worker_order(GREEDY, fleet_of(a, b)) == "ba"


def test_a_cached_prefix_saves_the_time_of_its_prefill_and_no_more() -> None:
    """At 500 tokens per second, 4,000 tokens take eight seconds and 100 tokens 0.2 seconds."""
    workers = reads(500, "a", 2, slots=8), reads(500, "b", slots=8)
    for profile, shared_tokens, first in ((LONG, 3900, "a"), (SHORT, 90, "b")):
        fleet = fleet_of(*workers, holders="a", tokens=shared_tokens)
        assert worker_order(profile, fleet)[0] == first


@pytest.mark.parametrize("first_only", [False, True])
def test_a_single_candidate_reports_whether_it_has_the_prompt_cached(first_only: bool) -> None:
    request = RoutingRequest(POLICY, SHORT)
    for holders, is_cached in (("a", True), ("b", False)):
        fleet, cached = fleet_of(worker("a"), holders=holders)
        decision = decide(request, fleet, NOW_S, Random(0), cached, first_only=first_only)
        (candidate,) = decision.candidates
        assert candidate.prefix_cached is is_cached


@pytest.mark.parametrize(
    ("chars", "tokens", "is_system", "turns"),
    [
        # A system prompt, however long, is worth waiting for at most five eighths of a lane.
        (4_000_000, 1_000_000, True, 6),
        (400, 2000, True, 6),
        # At 1,000 tokens per second, 1,700 tokens take as long as five rows of 0.3 seconds each.
        (16_000, 500, False, 2),
        (16_000, 1700, False, 6),
        (16_000, 40_000, False, 8),  # a full worker saves nothing
    ],
)
def test_a_holder_is_first_until_reading_elsewhere_takes_less_than_waiting(
    chars: int, tokens: int, is_system: bool, turns: int
) -> None:
    cached: Any = {"holders": "a", "tokens": tokens, "is_system": is_system}
    firsts = ""
    for busy in range(9):
        fleet = fleet_of(worker("a", busy, slots=8), worker("b", slots=8), **cached)
        firsts += worker_order(LONG._replace(text_chars=chars), fleet)[0]
    assert firsts == "a" * turns + "b" * (9 - turns)


def test_the_holder_of_more_turns_is_first_and_each_saves_its_own_tokens() -> None:
    prompt = cached_at(("a", "1"), tokens=500)
    turns = cached_at(("b", "1"), tokens=3500, is_system=False)
    fleet = fleet_of(*(reads(1000, name) for name in "abc"))._replace(cached={**prompt, **turns})
    candidates = candidates_of(LONG, fleet)
    found = [(one.worker_id, one.cached_tokens, round(one.prefill_s, 6)) for one in candidates]
    assert found == [("b", 3500, 0.5), ("a", 500, 3.5), ("c", 0, 4.0)]


@pytest.mark.parametrize(("is_system", "explored"), [(True, {"a", "b"}), (False, {"a"})])
def test_no_request_with_cached_turns_explores(is_system: bool, explored: set[str]) -> None:
    workers = worker("a"), worker("b", answered_at_s=NOW_S - 60)
    stale = fleet_of(*workers, holders="a", is_system=is_system)
    assert {worker_order(LONG, stale, seed)[0] for seed in range(600)} == explored


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
    assert [one.explored for one in candidates_of(SHORT, stale, explored)] == [True, False]
    full = fleet_of(worker("a"), worker("b", 4, answered_at_s=NOW_S - 60))
    queued = {worker_order(SHORT, full, seed)[0] for seed in range(1000)}
    assert queued == {"a"}, "no request queues to explore"


WORKERS = st.tuples(
    st.integers(0, 9), st.floats(0, 30), st.floats(0, 1), st.floats(1, 9000), st.floats(1, 200)
)


@given(
    st.lists(WORKERS, min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.integers(0, 100_000),
    st.integers(),
)
def test_candidates_are_sorted_by_their_score_in_seconds(workers, holders, chars, seed) -> None:
    views = [
        reads(read, str(n), busy, prefill_left_s=left_s, memory=memory, decode_tokens_per_s=write)
        for n, (busy, left_s, memory, read, write) in enumerate(workers)
    ]
    fleet = fleet_of(*views, holders="".join(map(str, holders)))
    candidates = candidates_of(LONG._replace(text_chars=chars), fleet, seed)
    scores_s = [candidate.score_s for candidate in candidates]
    assert scores_s == sorted(scores_s)
    assert all(one.score_s >= one.prefill_s - 1e-6 >= -1e-6 for one in candidates)
    cached = {one.worker_id for one in candidates if one.prefix_cached}
    assert cached == {str(n) for n in holders if n < len(workers)}
    assert len(candidates) == len(workers)


# Costs that the registry tracks between two heartbeats of a worker.


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fleet(clock: FakeClock) -> WorkerRegistry:
    registry = WorkerRegistry(clock, lambda: 0.0)
    registry.heartbeat(report("a"))
    return registry


def lease_of(fleet: WorkerRegistry, prefill_s: float = 0.0) -> Lease:
    lease = fleet.acquire(Candidate("vlm", "vlm", "a", "", 0, prefill_s=prefill_s))
    assert lease is not None
    return lease


def test_rows_of_other_gateways_count_and_rows_of_this_one_count_once(fleet) -> None:
    def rows_after(**counts: Any) -> int:
        if counts:
            fleet.heartbeat(report("a", **counts))
        return fleet.view().workers["a"].lanes[0].busy_rows

    leases = [lease_of(fleet) for _ in range(2)]
    assert rows_after(running=2, waiting=3) == 5
    for lease in leases:
        fleet.release(lease, AttemptResult.SUCCEEDED)
    assert rows_after() == 3
    # The worker sent this report while the two still ran, so no other gateway has rows.
    assert rows_after(running=2) == 0
    assert rows_after(running=2) == 2, "they still run, so another gateway sent them"


def test_dispatched_prompts_are_read_one_by_one(fleet: WorkerRegistry, clock: FakeClock) -> None:
    def prefill_left_s() -> Any:
        until_s = fleet.view().workers["a"].lanes[0].prefill_until_s
        return pytest.approx(max(0.0, until_s - clock.now_s))

    lease = lease_of(fleet, prefill_s=3.0)
    clock.advance(1)
    lease_of(fleet, prefill_s=4.0)
    assert prefill_left_s() == 6.0
    fleet.release(lease, AttemptResult.SUCCEEDED)
    assert prefill_left_s() == 4.0, "the answer shows that its prefill is complete"
    fleet.heartbeat(report("a", pending_prefill_tokens=1000, prefill_tokens_per_s=500.0))
    assert prefill_left_s() == 2.0, "the report of the worker replaces the estimate"


def test_an_updated_view_equals_a_new_one(fleet: WorkerRegistry, clock: FakeClock) -> None:
    rng = Random(5)
    leases: list[Lease] = []
    results = (AttemptResult.SUCCEEDED, AttemptResult.FAILED, AttemptResult.BUSY)
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
            fleet.release(leases.pop(), rng.choice(results), 0.5)
        elif lease := fleet.acquire(Candidate("vlm", "vlm", name, "", 0, prefill_s=0.1)):
            leases.append(lease)
        updated = deepcopy(fleet.view())
        fleet._view_until_s = NEVER_S
        assert updated == fleet.view(), step
