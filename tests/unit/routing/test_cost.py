"""What a request would cost at each worker, in seconds: wait, strain, reading, memory, batch."""

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
from gateway.routing.cost import UNMEASURED, load_cost_s, throughput_of
from gateway.routing.select import Candidate, RoutingRequest, decide
from gateway.routing.view import FleetView, LaneView, WorkerView
from policies.document import default_policy, read_policy
from policies.request.profile import Endpoint, RequestProfile, Sampling
from tests.support.fake_clock import FakeClock
from tests.support.scripted_worker import lane_report
from workers.protocol import WorkerReport

POLICY = default_policy()
LONG = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=16_000)
SHORT = LONG._replace(text_chars=400)
GREEDY = SHORT._replace(sampling=Sampling(temperature=0))
NOW_S = 1_000_000.0
Told = dict[str, Any]


def report(name: str, *, lane: str = "vlm", memory: float = 0.0, **measured: Any) -> WorkerReport:
    """A worker of one lane, and the share of its memory that is in use."""
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


def mac(
    name: str, busy: int = 0, *, reads_for_s: float = 0.0, heard_s: float = NOW_S, **told: Any
) -> WorkerView:
    """A worker that has so many requests, and reads for so long what it has."""
    said = report(name, **told)
    lanes = tuple(LaneView.of(lane, busy) for lane in said.lanes)
    return WorkerView.of(name, ("demo",), lanes, (), "1", throughput=throughput_of(said),
                         answered_at_s=heard_s, prefill_until_s=NOW_S + reads_for_s)  # fmt: skip


def seen(*macs: WorkerView, holders: str = "", shared_tokens: int = 0) -> FleetView:
    return replace(
        FleetView.of(macs, frozenset(("demo",))),
        now_s=NOW_S,
        prefix_boots=frozenset((name, "1") for name in holders),
        prefix_tokens=shared_tokens,
    )


def order(profile: RequestProfile, fleet: FleetView, seed: int = 0) -> str:
    found = decide(RoutingRequest(POLICY, profile, prefix_key="p"), fleet, Random(seed)).candidates
    return "".join(one.worker_id for one in found)


def test_the_cost_of_a_lane_is_the_sum_of_its_terms_in_seconds() -> None:
    """An answer of 100 tokens takes 2 s here, and each row makes all answers 12% longer."""
    measured = report("a", memory=0.9, decode_tokens_per_s=50.0, prefill_tokens_per_s=500.0)
    throughput, lane = throughput_of(measured), measured.lanes[0]
    assert throughput.prefill_token_s == pytest.approx(1 / 500)
    assert throughput.memory_cost_s == pytest.approx(1.0), "half of what is left above 80%"
    paying = load_cost_s(throughput, lane, 3, 2, drafting_pays=True)
    assert paying == pytest.approx(1.0 + 0.48 * (3 + 0.5 * 2))
    not_paying = load_cost_s(throughput, lane, 3, 2, drafting_pays=False)
    assert not_paying - paying == pytest.approx(0.3 * 2.0)


def test_a_lane_without_measurements_costs_as_much_as_on_a_mid_range_mac() -> None:
    assert UNMEASURED.prefill_token_s == pytest.approx(1 / 1000)
    for slots, row_s in ((4, 0.6), (8, 0.3), (0, 2.4)):
        lane = lane_report("vlm", slots=slots)
        assert load_cost_s(UNMEASURED, lane, 2, 0, drafting_pays=True) == pytest.approx(2 * row_s)


def test_who_reads_faster_is_first_where_there_is_much_to_read() -> None:
    fast: Told = {"prefill_tokens_per_s": 4000.0}
    slow: Told = {"prefill_tokens_per_s": 500.0}
    assert order(LONG, seen(mac("a", **slow), mac("b", **fast))) == "ba"
    # Two requests in its way cost less than reading for six seconds more.
    assert order(LONG, seen(mac("a", **slow), mac("b", 2, **fast))) == "ba"
    assert order(SHORT, seen(mac("a", **slow), mac("b", 2, **fast))) == "ab"


def test_prompts_that_are_still_to_be_read_are_waited_for() -> None:
    assert order(SHORT, seen(mac("a", 1, reads_for_s=5), mac("b", 2))) == "ba"
    assert order(SHORT, seen(mac("a", 1, reads_for_s=-5), mac("b", 2))) == "ab", "it has read them"


@pytest.mark.parametrize("weights", [{}, {"big": 2.0}])
def test_a_pending_prefill_costs_the_seconds_that_remain_of_it(weights: dict[str, float]) -> None:
    pool = {"lanes": "vlm", "weights": weights}
    policy = read_policy(
        {"version": 1, "routes": [{"name": "all", "to": "p"}], "pools": {"p": pool}}, "test"
    )

    def score_s(reads_for_s: float) -> float:
        request = RoutingRequest(policy, SHORT)
        return (
            decide(request, seen(mac("a", reads_for_s=reads_for_s)), Random(0))
            .candidates[0]
            .score_s
        )

    assert score_s(2.5) - score_s(0.0) == pytest.approx(2.5)
    assert score_s(-2.5) == pytest.approx(score_s(0.0))
    assert order(SHORT, seen(mac("a", reads_for_s=0.2), mac("b", 3))) == "ab"


def test_a_row_costs_most_where_answers_are_written_slowly() -> None:
    quick: Told = {"decode_tokens_per_s": 80.0}
    slow: Told = {"decode_tokens_per_s": 8.0}
    assert order(SHORT, seen(mac("a", 1, **slow), mac("b", 3, **quick))) == "ba"


def test_a_worker_whose_memory_is_nearly_full_comes_behind_others() -> None:
    assert order(SHORT, seen(mac("a", memory=0.99), mac("b", 1))) == "ba"
    assert order(SHORT, seen(mac("a", memory=0.79), mac("b", 1))) == "ab"


def test_a_batch_for_which_drafting_pays_is_preferred_to_one_for_which_it_does_not() -> None:
    pays, does_not = (2, 2, 2, 2), (2, 0, 0, 0)
    told: Told = {"lane": "text-mtp", "decode_tokens_per_s": 40.0}
    a = mac("a", 1, draft_tokens_by_rows=does_not, **told)
    b = mac("b", 1, draft_tokens_by_rows=pays, **told)
    found = decide(RoutingRequest(POLICY, GREEDY), seen(a, b), Random(0)).candidates
    assert [(one.worker_id, one.reason) for one in found] == [
        ("b", "eligible"),
        ("a", "mtp_not_paying"),
    ]


def test_a_holder_is_worth_the_time_that_reading_would_take_and_no_more() -> None:
    """At 500 tokens a second 4,000 tokens are eight seconds; 100 are a fifth of one."""
    slow: Told = {"prefill_tokens_per_s": 500.0, "slots": 8}
    for profile, shared_tokens, first in ((LONG, 3900, "a"), (SHORT, 90, "b")):
        fleet = seen(mac("a", 2, **slow), mac("b", **slow), holders="a",
                     shared_tokens=shared_tokens)  # fmt: skip
        assert order(profile, fleet)[0] == first


@pytest.mark.parametrize("first_only", [False, True])
def test_the_only_worker_is_marked_where_it_has_the_prompt_cached(first_only: bool) -> None:
    request = RoutingRequest(POLICY, SHORT, prefix_key="p")
    for holders, cached in (("a", True), ("b", False)):
        fleet = seen(mac("a"), holders=holders)
        (found,) = decide(request, fleet, Random(0), first_only=first_only).candidates
        assert found.prefix_cached is cached


def test_a_holder_that_is_far_busier_than_the_best_is_as_any_other() -> None:
    """However long the prompt: five eighths of a lane is what one may wait behind others."""
    huge = LONG._replace(text_chars=4_000_000)
    firsts = [
        order(huge, seen(mac("a", busy, slots=8), mac("b", slots=8), holders="a"))[0]
        for busy in range(9)
    ]
    assert firsts == ["a"] * 6 + ["b"] * 3


def test_a_hot_prompt_gets_more_holders_and_a_cold_one_keeps_its_own() -> None:
    for at_once, wanted in ((1, 1), (14, 3)):
        busy, holders = Counter[str](), {"a"}
        for number in range(at_once):
            macs = [mac(name, busy[name], slots=8) for name in "abcd"]
            fleet = seen(*macs, holders="".join(sorted(holders)), shared_tokens=3900)
            first = order(LONG, fleet, seed=number)[0]
            busy[first] += 1
            holders.add(first)
        assert len(holders) >= wanted
        assert (len(holders) == 1) == (wanted == 1)


def test_unequal_macs_fill_in_the_measure_of_their_capacity() -> None:
    big = {"slots": 16, "prefill_tokens_per_s": 2000.0, "decode_tokens_per_s": 80.0}
    small = {"slots": 4, "prefill_tokens_per_s": 500.0, "decode_tokens_per_s": 20.0}
    busy = Counter[str]()
    for number in range(12):
        macs = (mac("a", busy["a"], **big), mac("b", busy["b"], **small))
        busy[order(SHORT, seen(*macs), seed=number)[0]] += 1
    assert busy["a"] >= 3 * busy["b"] > 0


def test_one_of_a_hundred_goes_to_a_worker_that_was_not_heard_of_for_a_while() -> None:
    quiet = seen(mac("a"), mac("b", 2, heard_s=NOW_S - 60))
    news = seen(mac("a"), mac("b", 2, heard_s=NOW_S - 20))
    firsts = Counter(order(SHORT, quiet, seed)[0] for seed in range(3000))
    assert 10 <= firsts["b"] <= 60
    assert {order(SHORT, news, seed)[0] for seed in range(1000)} == {"a"}
    explored = next(seed for seed in range(3000) if order(SHORT, quiet, seed)[0] == "b")
    found = decide(RoutingRequest(POLICY, SHORT), quiet, Random(explored)).candidates
    assert [one.explored for one in found] == [True, False]
    full = seen(mac("a"), mac("b", 4, heard_s=NOW_S - 60))
    assert {order(SHORT, full, seed)[0] for seed in range(1000)} == {"a"}, "nobody waits for that"


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
def test_every_score_is_in_seconds_and_the_least_that_may_be_had_is_first(
    macs: list[tuple[int, float, float, float, float]], held: set[int], chars: int, seed: int
) -> None:
    fleet = seen(
        *(
            mac(str(n), busy, reads_for_s=reads_for_s, memory=memory, prefill_tokens_per_s=read,
                decode_tokens_per_s=write)
            for n, (busy, reads_for_s, memory, read, write) in enumerate(macs)
        ),
        holders="".join(map(str, held)),
    )  # fmt: skip
    case = RoutingRequest(POLICY, LONG._replace(text_chars=chars), prefix_key="p")
    found = decide(case, fleet, Random(seed)).candidates
    assert [one.score_s for one in found] == sorted(one.score_s for one in found)
    assert all(one.score_s >= one.prefill_s - 1e-6 >= -1e-6 for one in found)
    assert {one.worker_id for one in found if one.prefix_cached} == {
        str(n) for n in held if n < len(macs)
    }
    assert len(found) == len(macs)


class TestFleet:
    """What the live table knows of a worker beside its heartbeats."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def fleet(self, clock: FakeClock) -> WorkerRegistry:
        made = WorkerRegistry(clock, lambda: 0.0)
        made.heartbeat(report("a"))
        return made

    def rows(self, fleet: WorkerRegistry) -> int:
        return fleet.view().workers[0].lanes[0].busy_rows

    def reads_for_s(self, fleet: WorkerRegistry) -> float:
        view = fleet.view()
        return max(0.0, view.workers[0].lane_costs[0].prefill_until_s - view.now_s)

    def test_rows_of_other_gateways_count_and_its_own_never_twice(
        self, fleet: WorkerRegistry
    ) -> None:
        leases = [fleet.acquire(Candidate("vlm", "vlm", "a", "", 0)) for _ in range(2)]
        fleet.heartbeat(report("a", running=2, waiting=3))
        assert self.rows(fleet) == 5
        for lease in leases:
            assert lease is not None
            fleet.release(lease, AttemptResult.SUCCEEDED)
        assert self.rows(fleet) == 3
        # Sent off while the two still ran: nobody else's.
        fleet.heartbeat(report("a", running=2))
        assert self.rows(fleet) == 0

    def test_what_is_sent_is_read_one_after_the_other(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        lease = fleet.acquire(Candidate("vlm", "vlm", "a", "", 0, prefill_s=3.0))
        assert lease is not None
        clock.advance(1)
        fleet.acquire(Candidate("vlm", "vlm", "a", "", 0, prefill_s=4.0))
        assert self.reads_for_s(fleet) == pytest.approx(6.0)
        fleet.release(lease, AttemptResult.SUCCEEDED)
        assert self.reads_for_s(fleet) == pytest.approx(4.0), "it has read that, then"
        fleet.heartbeat(report("a", pending_prefill_tokens=1000, prefill_tokens_per_s=500.0))
        assert self.reads_for_s(fleet) == pytest.approx(2.0), "it knows better"

    def test_a_look_that_is_kept_is_the_one_that_would_be_made(
        self, fleet: WorkerRegistry, clock: FakeClock
    ) -> None:
        rng = Random(5)
        leases: list[Lease] = []
        for name in "bcd":
            fleet.heartbeat(report(name))
        for step in range(400):
            clock.advance(rng.random() / 10)
            name = rng.choice("abcd")
            what = rng.randrange(6)
            if what == 0:
                fleet.heartbeat(report(name, running=rng.randrange(4)))
            elif what == 1:
                fleet.set_cordoned(frozenset(rng.sample("abcd", rng.randrange(3))))
            elif what == 2 and leases:
                verdict = rng.choice(
                    (AttemptResult.SUCCEEDED, AttemptResult.FAILED, AttemptResult.BUSY)
                )
                fleet.release(leases.pop(), verdict, 0.5)
            elif (
                lease := fleet.acquire(Candidate("vlm", "vlm", name, "", 0, prefill_s=0.1))
            ) is not None:
                leases.append(lease)
            kept = fleet.view()
            fleet._views.invalidate()
            assert kept == fleet.view(), step
