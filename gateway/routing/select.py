"""Decide which worker takes a request: pure, from policy, profile and the view of a fleet."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from gateway.routing.features import CHECKED, Feature, features_of
from gateway.routing.prefix_keys import NO_KEYS, PrefixKeys
from gateway.routing.score import Chance, ScoredLane, rank
from gateway.routing.view import (
    NOTHING_CACHED,
    TAKES_ALL,
    CachedPrefixes,
    FleetView,
    LaneGroup,
    LaneView,
)
from paceline.protocol import MTP_LANE, POOLING_LANES
from paceline.request.profile import GENERATING, Bypass, RequestProfile
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument
from policies.evaluate import match_route
from policies.sections import Pool

# Reasons of a candidate beside those of `Bypass`.
ELIGIBLE = "eligible"
BY_POLICY = "policy"
"""The request and a worker could speculate, but the policy routes the request elsewhere."""
SPILLED = "spilled"
"""The preferred pool stayed full for longer than the route lets a request wait only for it."""


class RoutingRequest(NamedTuple):
    """Input of a decision; a request keeps its policy when a newer version comes into force."""

    policy: PolicyDocument
    profile: RequestProfile
    attributes: CallerAttributes = ANONYMOUS
    allowed_pools: frozenset[str] | None = None
    """Pools that the API key may use; None: all."""
    prefix: PrefixKeys = NO_KEYS
    """Keys of the beginnings that workers may have cached."""


class Candidate(NamedTuple):
    """One lane that may take the request, and why it would."""

    pool: str
    lane: str
    worker_id: str
    reason: str
    load: float
    spill: bool = False
    """Used only after the request has waited for the preferred pool as long as the route says."""
    prefix_cached: bool = False
    """The worker has the system prompt or an earlier turn of the request cached."""
    score_s: float = 0.0
    """Cost of the request there, in seconds, by weight: the least is first."""
    prefill_s: float = 0.0
    """Part of it: the prefill of the tokens that the worker has not cached."""
    explored: bool = False
    """First because it has not answered for a while, not because it costs least."""
    cached_tokens: int = 0
    """Tokens of the prompt that the worker is expected to have cached."""


class Decision(NamedTuple):
    """Candidates for a request, best first; empty if no worker can take it."""

    route: str
    bypass: tuple[Bypass, ...]
    candidates: tuple[Candidate, ...]
    spill_after_s: float | None = None
    """None: the route never spills."""
    forbidden: bool = False
    """The API key may use none of the route's pools."""
    complete: bool = True
    """All candidates are listed, not just the best ones."""
    lacking: frozenset[Feature] = TAKES_ALL
    """Features of the request that no worker takes which could serve it otherwise."""


def decide(
    request: RoutingRequest,
    fleet: FleetView,
    now_s: float,
    rng: Chance,
    cached: CachedPrefixes = NOTHING_CACHED,
    *,
    first_only: bool = False,
) -> Decision:
    """Rank the lanes that may take a request: pools in the route's order, then by cost.

    `now_s` is by the clock of the lanes. `rng` orders lanes of equal cost, so that one seed always
    gives one decision. `cached` are the parts of the prompt that boots have cached. A speculative
    lane that cannot speculate now comes last: it answers without drafts if no other lane can. Pools
    after the first with a worker are for spilling. `first_only` ranks the best lane alone: nearly
    always it takes the request, and sorting the others would take most of the time.
    """
    policy, profile = request.policy, request.profile
    route, bypass = match_route(policy, profile, request.attributes)
    speculation_barred = bool(bypass)
    bypass = bypass or fleet.bypass.get(profile.model, (Bypass.NO_MTP_WORKER,))
    spill_after_s = None if route.spill is None else route.spill.after_wait_ms / 1000
    first_only = first_only and spill_after_s != 0
    pools: Collection[str] = route.to
    if request.allowed_pools is not None:
        pools = [name for name in route.to if name in request.allowed_pools]
    found: list[Candidate] = []
    last_resort: list[Candidate] = []
    complete = True
    checked = deferred = False
    needs = TAKES_ALL if fleet.takes_all else features_of(profile)
    lacking: list[frozenset[Feature]] = []
    for name in pools:
        spill = bool(found)
        if spill and first_only:
            complete = False
            break
        pool = policy.pools[name]
        group = _pool_lanes(fleet, profile, name, pool, speculation_barred=speculation_barred)
        if needs and group.lanes:
            lacking += [lane.model.lacks & needs for lane in group.lanes]
            group, checked = _taking(group, needs)
        if not group.lanes:
            continue
        if first_only and not group.capable:
            deferred = True
            continue
        ranked = rank(
            group,
            pool,
            profile,
            cached,
            now_s=now_s,
            rng=rng,
            explore=not spill,
            first_only=first_only,
        )
        complete = complete and len(ranked) == len(group.lanes)
        if checked:
            ranked.sort(key=lambda one: not one.lane.capable)
        for scored in ranked:
            capable = scored.lane.capable
            candidate = _candidate(name, scored, bypass, spill=spill and capable)
            (found if capable and not checked else last_resort).append(candidate)
    if deferred and not found:
        return decide(request, fleet, now_s, rng, cached)
    if found and last_resort:
        last_resort = [one._replace(reason=SPILLED, spill=True) for one in last_resort]
    candidates = (*found, *last_resort)
    complete = complete and not deferred
    lacks = TAKES_ALL if candidates or not lacking else min(lacking, key=len)
    return Decision(route.name, bypass, candidates, spill_after_s, not pools, complete, lacks)


def _pool_lanes(
    fleet: FleetView, profile: RequestProfile, name: str, pool: Pool, *, speculation_barred: bool
) -> LaneGroup:
    """Return the lanes of a pool that serve a model and endpoint."""
    found = LaneGroup()
    # A lane with the pool's name belongs to the pool: static workers have such lanes.
    lanes = pool.lanes if name in pool.lanes else (*pool.lanes, name)
    wanted = None if profile.endpoint in GENERATING else profile.endpoint
    for lane in lanes:
        # Whatever a policy says, the speculative lane takes only requests that can speculate, and
        # each lane those of its endpoints.
        if (speculation_barred and lane == MTP_LANE) or POOLING_LANES.get(lane) is not wanted:
            continue
        if group := fleet.lanes.get((profile.model, lane)):
            found = LaneGroup(found.lanes + group.lanes) if found.lanes else group
    if pool.workers is None:
        return found
    accepted = [lane for lane in found.lanes if pool.accepts(lane.labels, lane.models)]
    return LaneGroup(tuple(accepted))


def _taking(group: LaneGroup, needs: frozenset[Feature]) -> tuple[LaneGroup, bool]:
    """Return the lanes that take these features.

    Return also whether they lack one that the gateway checks in the answer.
    """
    for wanted in (needs, needs - CHECKED):
        if taking := tuple([lane for lane in group.lanes if not lane.model.lacks & wanted]):
            kept = group if len(taking) == len(group.lanes) else LaneGroup(taking)
            return kept, wanted is not needs and bool(needs & CHECKED)
    return LaneGroup(), False


def _candidate(
    pool: str, scored: ScoredLane, bypass: tuple[Bypass, ...], *, spill: bool
) -> Candidate:
    lane, cached = scored.lane, scored.cached
    return Candidate(
        pool=pool,
        lane=lane.report.name,
        worker_id=lane.worker_id,
        reason=SPILLED if spill else _reason(lane, bypass),
        load=lane.load,
        spill=spill,
        prefix_cached=cached is not None,
        score_s=scored.score_s,
        prefill_s=scored.prefill_s,
        explored=scored.explored,
        cached_tokens=cached.tokens if cached else 0,
    )


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    """Return why the request would go to a lane of its preferred pool."""
    if bypass:
        return bypass[0].value
    if lane.report.name != MTP_LANE or not lane.can_draft:
        return BY_POLICY
    # The lane's measurement for the batch that this request would join.
    return (
        ELIGIBLE if lane.report.drafting_pays(lane.busy_rows + 1) else Bypass.MTP_NOT_PAYING.value
    )
