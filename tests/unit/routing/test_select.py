"""Decisions over a snapshot: which lane, which worker, and the reason given."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.select import RoutingRequest, decide
from gateway.routing.view import LaneView, WorkerView
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument, default_policy, read_policy
from policies.request.profile import Bypass, Endpoint, RequestProfile, Sampling
from tests.support.fleet_views import fleet_view, worker_view
from tests.support.request_profiles import GREEDY, SAMPLED
from tests.support.scripted_worker import lane_report

POLICY = default_policy()
PICTURE = GREEDY._replace(media=(("image", 1),))


def chosen(profile: RequestProfile, *workers: WorkerView, seed: int = 0) -> tuple[str, str, str]:
    first = decide(RoutingRequest(POLICY, profile), fleet_view(*workers), Random(seed)).candidates[
        0
    ]
    return first.pool, first.worker_id, first.reason


def test_each_kind_of_request_gets_its_lane_and_its_reason() -> None:
    mac = worker_view("mac")
    assert chosen(GREEDY, mac) == ("text-mtp", "mac", "eligible")
    assert chosen(SAMPLED, mac) == ("vlm", "mac", "non_greedy_sampling")
    assert chosen(PICTURE, mac) == ("vlm", "mac", "media")


def test_the_least_loaded_worker_is_first_relative_to_its_slots() -> None:
    small = WorkerView.of("small", ("demo",), (LaneView.of(lane_report("vlm", slots=2), 1),))
    large = WorkerView.of("large", ("demo",), (LaneView.of(lane_report("vlm", slots=16), 4),))
    assert chosen(SAMPLED, small, large)[1] == "large"


def test_between_equal_lanes_the_less_busy_machine_is_first() -> None:
    assert chosen(GREEDY, worker_view("a", vlm=3), worker_view("b"))[1] == "b"


def test_ties_are_broken_by_the_dice_that_are_passed_in() -> None:
    macs = [worker_view(name) for name in "abcd"]
    firsts = Counter(chosen(GREEDY, *macs, seed=seed)[1] for seed in range(200))
    assert set(firsts) == set("abcd")
    assert min(firsts.values()) > 20
    assert chosen(GREEDY, *macs, seed=3) == chosen(GREEDY, *macs, seed=3)


def test_the_second_pool_comes_behind_all_of_the_first() -> None:
    decision = decide(
        RoutingRequest(POLICY, GREEDY),
        fleet_view(worker_view("a", text_mtp=9), worker_view("b")),
        Random(0),
    )
    assert [(one.pool, one.worker_id) for one in decision.candidates] == [
        ("text-mtp", "b"),
        ("text-mtp", "a"),
        ("vlm", "b"),
        ("vlm", "a"),
    ]
    assert [one.spill for one in decision.candidates] == [False, False, True, True]
    assert [one.reason for one in decision.candidates] == ["eligible"] * 2 + ["spilled"] * 2
    assert decision.spill_after_s == 0.25


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"mtp_enabled": False}, "no_mtp_worker"), ({"head_healthy": False}, "head_unhealthy")],
)
def test_without_a_speculating_lane_the_reason_says_why(
    changes: dict[str, Any], reason: str
) -> None:
    idle = LaneView.of(lane_report("text-mtp", **changes), 0)
    sees = LaneView.of(lane_report("vlm"), 0)
    both = WorkerView.of("mac", ("demo",), (idle, sees))
    assert chosen(GREEDY, both) == ("vlm", "mac", reason)
    assert chosen(SAMPLED, both) == ("vlm", "mac", "non_greedy_sampling")
    alone = WorkerView.of("mac", ("demo",), (idle,))
    assert chosen(GREEDY, alone) == ("text-mtp", "mac", reason), "the last resort still answers"
    assert chosen(GREEDY, alone, worker_view("b")) == ("text-mtp", "b", "eligible")


def test_drafting_that_does_not_pay_for_the_batch_it_would_join_is_the_reason() -> None:
    """Of this worker and batch size alone: a request that finds it idle may still draft."""
    report = lane_report("text-mtp", draft_tokens_by_rows=(2, 1, 0, 0))

    def reason(in_flight: int) -> str:
        lane = LaneView.of(report, in_flight)
        return chosen(GREEDY, WorkerView.of("mac", ("demo",), (lane,)))[2]

    assert [reason(rows) for rows in (0, 1, 2, 3, 9)] == ["eligible"] * 2 + ["mtp_not_paying"] * 3


def test_only_workers_of_the_model_are_asked() -> None:
    assert chosen(GREEDY, worker_view("a", model="other"), worker_view("b"))[1] == "b"
    nobody = decide(
        RoutingRequest(POLICY, GREEDY), fleet_view(worker_view("a", model="other")), Random(0)
    )
    assert nobody.candidates == ()


def test_whatever_the_policy_says_the_speculative_lane_only_takes_what_it_can() -> None:
    everything = read_policy(
        {
            "version": 1,
            "routes": [{"name": "all", "to": ["fast", "slow"]}],
            "pools": {"fast": {"lanes": ["text-mtp"]}, "slow": {"lanes": ["vlm"]}},
        },
        "test",
    )
    pools = [one.pool for one in candidates(everything, SAMPLED)]
    assert pools == ["slow"]
    assert [one.pool for one in candidates(everything, GREEDY)] == ["fast", "slow"]


def test_a_policy_that_sends_eligible_text_elsewhere_says_so() -> None:
    plain = read_policy(
        {
            "version": 1,
            "routes": [{"name": "all", "to": ["vlm"]}],
            "pools": {"vlm": {"lanes": ["vlm"]}},
        },
        "test",
    )
    assert candidates(plain, GREEDY)[0].reason == "policy"


def pools_of(pool: dict[str, Any]) -> PolicyDocument:
    """A policy with one pool."""
    return read_policy(
        {"version": 1, "routes": [{"name": "all", "to": "p"}], "pools": {"p": {**VLM, **pool}}},
        "test",
    )


VLM = {"lanes": "vlm"}


def labelled(name: str, *labels: str, busy: int = 0, model: str = "demo") -> WorkerView:
    return WorkerView.of(name, (model,), (LaneView.of(lane_report("vlm"), busy),), labels)


@pytest.mark.parametrize(("after_wait_ms", "pools"), [(0, ["p", "vlm"]), (1, ["p"])])
def test_a_brief_decision_has_the_pools_that_may_take_the_request_at_once(
    after_wait_ms: int, pools: list[str]
) -> None:
    route = {"name": "all", "to": ["p", "vlm"], "spill": {"after_wait_ms": after_wait_ms}}
    policy = read_policy(
        {
            "version": 1,
            "routes": [route],
            "pools": {"p": {"workers": {"labels": "big"}, **VLM}, "vlm": VLM},
        },
        "test",
    )
    macs = fleet_view(labelled("a", "big"), labelled("b"))
    found = decide(RoutingRequest(policy, SAMPLED), macs, Random(0), first_only=True)
    assert list(dict.fromkeys(one.pool for one in found.candidates)) == pools


@pytest.mark.parametrize(
    ("workers", "taken"),
    [
        ({"labels": "big"}, "a"),
        ({"labels": ["big", "new"]}, "ab"),
        ({"models": "demo"}, "abc"),
        ({"models": ["other"]}, ""),
        ({"labels": "new", "models": ["demo", "other"]}, "b"),
        ({"labels": "big", "models": "other"}, ""),
    ],
)
def test_a_pool_takes_the_workers_that_it_names(workers: dict[str, Any], taken: str) -> None:
    macs = fleet_view(labelled("a", "big"), labelled("b", "new"), labelled("c"))
    found = decide(
        RoutingRequest(pools_of({"workers": workers}), SAMPLED), macs, Random(0)
    ).candidates
    assert sorted(one.worker_id for one in found) == [*taken]


def test_an_idle_worker_of_weight_two_gets_twice_the_requests() -> None:
    policy = pools_of({"weights": {"big": 2}})
    macs = fleet_view(labelled("a", "big"), labelled("b"), labelled("c"))
    firsts = Counter(
        decide(RoutingRequest(policy, SAMPLED), macs, Random(seed)).candidates[0].worker_id
        for seed in range(4000)
    )
    assert 0.47 < firsts["a"] / 4000 < 0.53
    assert 0.22 < firsts["b"] / 4000 < 0.28


def test_a_busy_worker_of_weight_two_carries_twice_the_requests() -> None:
    policy = pools_of({"weights": {"big": 2, "slow": 0.5}})
    labels = {"a": ("big",), "b": (), "c": ("slow",), "d": ("slow", "big")}
    busy = dict.fromkeys(labels, 0)
    rng = Random(0)
    for _ in range(1100):
        macs = fleet_view(*(labelled(name, *labels[name], busy=busy[name]) for name in labels))
        busy[decide(RoutingRequest(policy, SAMPLED), macs, rng).candidates[0].worker_id] += 1
    assert busy == {"a": 400, "b": 200, "c": 100, "d": 400}, "of two weights the larger counts"


def test_a_route_may_depend_on_who_asks_and_when() -> None:
    policy = read_policy(
        {
            "version": 1,
            "routes": [
                {"name": "night", "when": {"team": "a", "hours": "22:00-06:00"}, "to": "slow"},
                {"name": "rest", "to": "vlm"},
            ],
            "pools": {"slow": {**VLM, "workers": {"labels": "old"}}, "vlm": VLM},
        },
        "test",
    )
    macs = fleet_view(labelled("a", "old", busy=1), labelled("b"))
    decisions = [
        decide(RoutingRequest(policy, SAMPLED, attributes), macs, Random(0))
        for attributes in (
            CallerAttributes(team="a", minute_of_week=1),
            CallerAttributes(team="a", minute_of_week=720),
        )
    ]
    assert [(one.route, one.candidates[0].worker_id) for one in decisions] == [
        *(("night", "a"), ("rest", "b"))
    ]


def candidates(policy: PolicyDocument, profile: RequestProfile) -> tuple[Any, ...]:
    return decide(
        RoutingRequest(policy, profile), fleet_view(worker_view("mac")), Random(0)
    ).candidates


PROFILES = st.builds(
    RequestProfile,
    endpoint=st.sampled_from(Endpoint),
    model=st.sampled_from(["demo", "other", "unknown"]),
    stream=st.booleans(),
    media=st.sampled_from([(), (("image", 2),)]),
    sampling=st.builds(Sampling, temperature=st.sampled_from([0.0, 1.0]), top_k=st.integers(0, 2)),
    choices=st.integers(1, 3),
    top_logprobs=st.none() | st.integers(0, 3),
    structured_output=st.booleans(),
    thinking_budget=st.none() | st.just(5),
)
WORKERS = st.lists(
    st.builds(
        worker_view,
        st.sampled_from("abcdef"),
        st.sampled_from(["demo", "other"]),
        text_mtp=st.integers(0, 9),
        vlm=st.integers(0, 9),
    ),
    max_size=6,
    unique_by=lambda one: one.worker_id,
)


@given(PROFILES, WORKERS, st.integers())
def test_every_decision_is_possible_ranked_and_reasoned(
    profile: RequestProfile, workers: list[WorkerView], seed: int
) -> None:
    view = fleet_view(*workers)
    decision = decide(RoutingRequest(POLICY, profile), view, Random(seed))
    assert decision == decide(RoutingRequest(POLICY, profile), view, Random(seed))
    by_id = {one.worker_id: one for one in workers}
    scores_s: dict[str, list[float]] = {}
    for one in decision.candidates:
        assert profile.model in by_id[one.worker_id].models
        scores_s.setdefault(one.pool, []).append(one.score_s)
        if one.lane == "text-mtp":
            assert one.reason == "eligible"
            assert decision.bypass == ()
        else:
            assert one.reason in [*Bypass, "policy", "spilled"]
        assert one.spill == (one.reason == "spilled") == (one.pool != decision.candidates[0].pool)
    for ranked in scores_s.values():
        assert ranked == sorted(ranked)
    brief = decide(RoutingRequest(POLICY, profile), view, Random(seed), first_only=True)
    assert (brief.route, brief.bypass, brief.forbidden) == (*decision[:2], decision.forbidden)
    assert [one[:3] for one in brief.candidates[:1]] == [one[:3] for one in decision.candidates[:1]]
    left_out = {one[:3] for one in decision.candidates} - {one[:3] for one in brief.candidates}
    assert not left_out or not brief.complete
