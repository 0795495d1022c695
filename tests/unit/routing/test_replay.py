"""What is remembered of the last requests: enough to decide again, bounded, and no text."""

from __future__ import annotations

import asyncio
import functools
from random import Random

from gateway.routing.replay import MAX_RECENT_REQUESTS, PoolMoves, RecentRequests
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument, default_policy, read_policy
from policies.request.profile import bypass_reasons
from tests.support.fleet_views import fleet_view, worker_view
from tests.support.policies import single_pool_policy
from tests.support.request_profiles import GREEDY, SAMPLED

OLD = default_policy()
NEW = read_policy(single_pool_policy("all", lanes=("text-mtp", "vlm")), "test")
FLEET = fleet_view(worker_view("a"))
NOBODY = FleetView.of((), frozenset())


async def moves(
    recent: RecentRequests, old: PolicyDocument, new: PolicyDocument, fleet_view: FleetView
) -> PoolMoves:
    return await recent.count_moves(
        old, new, fleet_view, rng=Random(0), pause=functools.partial(asyncio.sleep, 0)
    )


async def test_the_last_ten_thousand_are_replayed() -> None:
    recent = RecentRequests()
    for number in range(MAX_RECENT_REQUESTS + 500):
        recent.add(RoutingRequest(OLD, GREEDY if number < MAX_RECENT_REQUESTS else SAMPLED))
    counted = await moves(recent, OLD, NEW, FLEET)
    assert counted == {("text-mtp", "all"): MAX_RECENT_REQUESTS - 500, ("vlm", "all"): 500}


async def test_the_same_policy_moves_nothing_whatever_the_fleet_is() -> None:
    recent = RecentRequests()
    for profile in (GREEDY, SAMPLED):
        recent.add(RoutingRequest(OLD, profile))
    for view in (FLEET, fleet_view(worker_view("a", text_mtp=9)), NOBODY):
        counted = await moves(recent, OLD, OLD, view)
        assert all(before == after for before, after in counted)
    assert await moves(recent, OLD, NEW, NOBODY) == {("none", "none"): 2}


async def test_who_asked_and_which_pools_their_key_may_use_are_replayed_too() -> None:
    recent = RecentRequests()
    routes = [
        {"name": "blue", "when": {"team": "blue"}, "to": "vlm"},
        {"name": "rest", "to": ["text-mtp", "all"]},
    ]
    pools = {name: {"lanes": "vlm"} for name in ("vlm", "text-mtp", "all")}
    by_team = read_policy({"version": 1, "routes": routes, "pools": pools}, "test")
    recent.add(RoutingRequest(OLD, SAMPLED, CallerAttributes(team="blue")))
    recent.add(
        RoutingRequest(OLD, SAMPLED, CallerAttributes(team="red"), frozenset({"vlm", "all"}))
    )
    recent.add(RoutingRequest(OLD, SAMPLED, CallerAttributes(team="red"), frozenset({"elsewhere"})))
    assert await moves(recent, OLD, by_team, FLEET) == {
        ("vlm", "vlm"): 1,
        ("vlm", "all"): 1,
        ("none", "none"): 1,
    }


def test_no_text_and_nothing_long_is_kept_and_the_case_is_decided_alike() -> None:
    recent = RecentRequests()
    bias = tuple((token, 1.0) for token in range(1024))
    profile = GREEDY._replace(
        stop=("canary words",) * 16, sampling=GREEDY.sampling._replace(logit_bias=bias)
    )
    attributes = CallerAttributes(key="k1", headers={"x-app": "batch"})
    recent.add(RoutingRequest(OLD, profile, attributes))
    (kept,) = recent._requests
    assert "canary" not in repr(kept)
    assert len(kept.profile.sampling.logit_bias) == 1
    assert bypass_reasons(kept.profile) == bypass_reasons(profile)
    assert (kept.policy, kept.attributes) == (OLD, attributes)
