"""Recent requests for replay: enough to route them again, bounded, and without text."""

import asyncio
import functools
from random import Random

from gateway.routing.replay import MAX_RECENT_REQUESTS, PoolMoves, RecentRequests
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from paceline.request.profile import bypass_reasons
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument, default_policy
from tests.support.fleet_views import fleet_view, worker_view
from tests.support.policies import make_policy
from tests.support.request_profiles import GREEDY, SAMPLED

OLD = default_policy()
NEW = make_policy("all", {"all": {"lanes": ["text-mtp", "vlm"]}})
FLEET = fleet_view(worker_view("a"))
NO_WORKERS = FleetView.of((), frozenset())


async def count_moves(
    recent: RecentRequests, old: PolicyDocument, new: PolicyDocument, fleet: FleetView
) -> PoolMoves:
    pause = functools.partial(asyncio.sleep, 0)
    return await recent.count_moves(old, new, fleet, now_s=0.0, rng=Random(0), pause=pause)


async def test_the_last_ten_thousand_are_replayed() -> None:
    recent = RecentRequests()
    for number in range(MAX_RECENT_REQUESTS + 500):
        recent.add(RoutingRequest(OLD, GREEDY if number < MAX_RECENT_REQUESTS else SAMPLED))
    moves = await count_moves(recent, OLD, NEW, FLEET)
    assert moves == {("text-mtp", "all"): MAX_RECENT_REQUESTS - 500, ("vlm", "all"): 500}


async def test_the_same_policy_moves_no_request_on_any_fleet() -> None:
    recent = RecentRequests()
    for profile in (GREEDY, SAMPLED):
        recent.add(RoutingRequest(OLD, profile))
    for view in (FLEET, fleet_view(worker_view("a", text_mtp=9)), NO_WORKERS):
        moves = await count_moves(recent, OLD, OLD, view)
        assert all(before == after for before, after in moves)
    assert await count_moves(recent, OLD, NEW, NO_WORKERS) == {("none", "none"): 2}


async def test_replay_includes_the_caller_and_the_pools_that_its_key_allows() -> None:
    recent = RecentRequests()
    routes = [
        {"name": "blue", "when": {"team": "blue"}, "to": "vlm"},
        {"name": "rest", "to": ["text-mtp", "all"]},
    ]
    pools = {name: {"lanes": "vlm"} for name in ("vlm", "text-mtp", "all")}
    red = CallerAttributes(team="red")
    recent.add(RoutingRequest(OLD, SAMPLED, CallerAttributes(team="blue")))
    for allowed in ({"vlm", "all"}, {"unknown"}):
        recent.add(RoutingRequest(OLD, SAMPLED, red, frozenset(allowed)))
    moves = await count_moves(recent, OLD, make_policy(routes, pools), FLEET)
    assert moves == {("vlm", "vlm"): 1, ("vlm", "all"): 1, ("none", "none"): 1}


def test_a_stored_request_has_no_text_and_gets_the_same_decision() -> None:
    recent = RecentRequests()
    bias = tuple((token, 1.0) for token in range(1024))
    profile = GREEDY._replace(
        stop=("canary words",) * 16, sampling=GREEDY.sampling._replace(logit_bias=bias)
    )
    attributes = CallerAttributes(key="k1", headers={"x-app": "batch"})
    recent.add(RoutingRequest(OLD, profile, attributes))
    (stored,) = recent._requests
    assert "canary" not in repr(stored)
    assert len(stored.profile.sampling.logit_bias) == 1
    assert bypass_reasons(stored.profile) == bypass_reasons(profile)
    assert (stored.policy, stored.attributes) == (OLD, attributes)
