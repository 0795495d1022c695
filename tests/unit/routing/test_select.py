"""Routing decisions over a snapshot of the fleet: lane, worker and reason."""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.select import Decision, RoutingRequest, _pool_lanes, decide
from gateway.routing.view import WorkerView
from paceline.request.profile import Bypass, Endpoint, RequestProfile, Sampling
from policies.document import PolicyDocument, default_policy
from tests.support.fleet_views import fleet_view, view_of, worker_view
from tests.support.policies import make_policy
from tests.support.request_profiles import GREEDY, SAMPLED
from tests.support.scripted_worker import lane_report

POLICY = default_policy()


def decided(
    profile: RequestProfile,
    *workers: WorkerView,
    policy: PolicyDocument = POLICY,
    rng: Random | None = None,
    first_only: bool = False,
) -> Decision:
    """Return the decision for a request on a fleet of these workers."""
    request = RoutingRequest(policy, profile)
    return decide(request, fleet_view(*workers), 0.0, rng or Random(0), first_only=first_only)


def first_choice(
    profile: RequestProfile, *workers: WorkerView, seed: int = 0
) -> tuple[str, str, str]:
    first = decided(profile, *workers, rng=Random(seed)).candidates[0]
    return first.pool, first.worker_id, first.reason


def pools_of(decision: Decision) -> list[str]:
    """Return the pools of the candidates, each once."""
    return list(dict.fromkeys(candidate.pool for candidate in decision.candidates))


def test_the_least_loaded_worker_is_first_relative_to_its_slots() -> None:
    small = view_of("small", lane_report("vlm", slots=2), busy=1)
    large = view_of("large", lane_report("vlm", slots=16), busy=4)
    assert first_choice(SAMPLED, small, large)[1] == "large"
    busy_elsewhere = first_choice(GREEDY, worker_view("a", vlm=3), worker_view("b"))
    assert busy_elsewhere[1] == "b", "between equal lanes the less busy worker"


def test_the_given_random_generator_breaks_ties() -> None:
    fleet = [worker_view(name) for name in "abcd"]
    firsts = Counter(first_choice(GREEDY, *fleet, seed=seed)[1] for seed in range(200))
    assert set(firsts) == set("abcd")
    assert min(firsts.values()) > 20
    assert first_choice(GREEDY, *fleet, seed=3) == first_choice(GREEDY, *fleet, seed=3)


def test_a_pool_without_a_selector_takes_the_lanes_of_the_fleet_without_a_copy() -> None:
    fleet, pool = fleet_view(worker_view("a")), POLICY.pools["vlm"]
    lanes = _pool_lanes(fleet, SAMPLED, "vlm", pool, speculation_barred=True)
    assert lanes is fleet.lanes[SAMPLED.model, "vlm"], "which knows the places of its workers"


def test_every_candidate_of_the_first_pool_ranks_before_the_second() -> None:
    decision = decided(GREEDY, worker_view("a", text_mtp=9), worker_view("b"))
    assert [(one.pool, one.worker_id, one.spill, one.reason) for one in decision.candidates] == [
        ("text-mtp", "b", False, "eligible"),
        ("text-mtp", "a", False, "eligible"),
        ("vlm", "b", True, "spilled"),
        ("vlm", "a", True, "spilled"),
    ]
    assert decision.spill_after_s == 0.25


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"mtp_enabled": False}, "no_mtp_worker"), ({"head_healthy": False}, "head_unhealthy")],
)
def test_the_reason_names_why_no_lane_speculates(changes: dict[str, Any], reason: str) -> None:
    text_lane = lane_report("text-mtp", **changes)
    both = view_of("mac", text_lane, lane_report("vlm"))
    assert first_choice(GREEDY, both) == ("vlm", "mac", reason)
    assert first_choice(SAMPLED, both) == ("vlm", "mac", "non_greedy_sampling")
    text_only = view_of("mac", text_lane)
    assert first_choice(GREEDY, text_only) == ("text-mtp", "mac", reason), "it serves all the same"
    assert first_choice(GREEDY, text_only, worker_view("b")) == ("text-mtp", "b", "eligible")
    brief, only = (decided(GREEDY, one, first_only=True) for one in (both, text_only))
    assert (pools_of(brief), brief.complete) == (["vlm"], False), "it is ranked if it is needed"
    assert (pools_of(only), only.complete) == (["text-mtp"], True)


def test_the_reason_is_mtp_not_paying_where_drafts_do_not_pay_at_the_batch_size() -> None:
    """Only this worker and batch size count: a request on an idle worker may still draft."""
    report = lane_report("text-mtp", draft_tokens_by_rows=(2, 1, 0, 0))

    def reason(in_flight: int) -> str:
        return first_choice(GREEDY, view_of("mac", report, busy=in_flight))[2]

    assert [reason(rows) for rows in (0, 1, 2, 3, 9)] == ["eligible"] * 2 + ["mtp_not_paying"] * 3


def test_under_any_policy_the_speculative_lane_gets_only_eligible_requests() -> None:
    routes = [{"name": "all", "to": ["fast", "slow"]}]
    to_fast = make_policy(routes, {"fast": {"lanes": "text-mtp"}, "slow": VLM})
    assert pools_of(decided(SAMPLED, worker_view("mac"), policy=to_fast)) == ["slow"]
    assert pools_of(decided(GREEDY, worker_view("mac"), policy=to_fast)) == ["fast", "slow"]
    plain = decided(GREEDY, worker_view("mac"), policy=make_policy("vlm", {"vlm": VLM}))
    assert plain.candidates[0].reason == "policy", "the route excludes the lane"


VLM = {"lanes": "vlm"}


def policy_of(pool: dict[str, Any]) -> PolicyDocument:
    return make_policy("p", {"p": {**VLM, **pool}})


def labelled_worker(name: str, *labels: str, busy: int = 0, model: str = "demo") -> WorkerView:
    return view_of(name, lane_report("vlm"), busy=busy, models=(model,), labels=labels)


@pytest.mark.parametrize(("after_wait_ms", "pools"), [(0, ["p", "vlm"]), (1, ["p"])])
def test_a_brief_decision_covers_the_pools_that_may_serve_the_request_at_once(
    after_wait_ms: int, pools: list[str]
) -> None:
    route = {"name": "all", "to": ["p", "vlm"], "spill": {"after_wait_ms": after_wait_ms}}
    policy = make_policy([route], {"p": {"workers": {"labels": "big"}, **VLM}, "vlm": VLM})
    workers = labelled_worker("a", "big"), labelled_worker("b")
    assert pools_of(decided(SAMPLED, *workers, policy=policy, first_only=True)) == pools


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ({"labels": "big"}, "a"),
        ({"labels": ["big", "new"]}, "ab"),
        ({"models": "demo"}, "abc"),
        ({"models": ["other"]}, ""),
        ({"labels": "new", "models": ["demo", "other"]}, "b"),
        ({"labels": "big", "models": "other"}, ""),
    ],
)
def test_a_pool_has_the_workers_of_its_selector(workers: dict[str, Any], expected: str) -> None:
    fleet = labelled_worker("a", "big"), labelled_worker("b", "new"), labelled_worker("c")
    found = decided(SAMPLED, *fleet, policy=policy_of({"workers": workers})).candidates
    assert sorted(candidate.worker_id for candidate in found) == [*expected]


def test_a_worker_of_weight_two_gets_twice_the_requests_and_carries_twice_the_load() -> None:
    policy = policy_of({"weights": {"big": 2, "slow": 0.5}})
    labels = {"a": ("big",), "b": (), "c": ("slow",), "d": ("slow", "big")}

    def fleet(busy: Mapping[str, int]) -> list[WorkerView]:
        return [labelled_worker(name, *labels[name], busy=busy[name]) for name in busy]

    idle = [*fleet({"a": 0, "b": 0}), labelled_worker("c")]
    firsts = Counter(
        decided(SAMPLED, *idle, policy=policy, rng=Random(seed)).candidates[0].worker_id
        for seed in range(4000)
    )
    assert 0.47 < firsts["a"] / 4000 < 0.53
    assert 0.22 < firsts["b"] / 4000 < 0.28
    busy, rng = dict.fromkeys(labels, 0), Random(0)
    for _ in range(1100):
        busy[decided(SAMPLED, *fleet(busy), policy=policy, rng=rng).candidates[0].worker_id] += 1
    assert busy == {"a": 400, "b": 200, "c": 100, "d": 400}, "the larger of two weights applies"


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
    unique_by=lambda candidate: candidate.worker_id,
)


@given(PROFILES, WORKERS, st.integers())
def test_every_decision_is_possible_ranked_and_reasoned(profile, workers, seed) -> None:
    decision = decided(profile, *workers, rng=Random(seed))
    assert decision == decided(profile, *workers, rng=Random(seed))
    models = {worker.worker_id: worker.models for worker in workers}
    scores_s: dict[str, list[float]] = {}
    for candidate in decision.candidates:
        assert profile.model in models[candidate.worker_id]
        scores_s.setdefault(candidate.pool, []).append(candidate.score_s)
        if candidate.lane == "text-mtp":
            assert (candidate.reason, decision.bypass) == ("eligible", ())
        else:
            assert candidate.reason in [*Bypass, "policy", "spilled"]
        spills = candidate.pool != decision.candidates[0].pool
        assert candidate.spill == (candidate.reason == "spilled") == spills
    assert all(ranked == sorted(ranked) for ranked in scores_s.values())
    brief = decided(profile, *workers, rng=Random(seed), first_only=True)
    assert (brief.route, brief.bypass, brief.forbidden) == (*decision[:2], decision.forbidden)
    found, all_found = ([one[:3] for one in given.candidates] for given in (brief, decision))
    assert found[:1] == all_found[:1]
    assert set(all_found) <= set(found) or not brief.complete
