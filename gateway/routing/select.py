"""Decide which worker takes a request: pure, from policy, profile and one fleet snapshot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import log1p
from typing import NamedTuple, Protocol, TypeVar

from gateway.routing.features import CHECKED, Feature, features_of
from gateway.routing.prefix_keys import NO_KEYS, PrefixKeys
from gateway.routing.view import (
    TAKES_ALL,
    CachedPrefix,
    CachedPrefixes,
    FleetView,
    LaneCost,
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
"""The preferred pool stayed full for longer than the route lets a request wait for it alone."""

# A cached system prompt lowers a worker's cost only while its load (1 is a full lane) is at most
# this much above the best other worker's: a prompt that all requests share would overload one
# machine. A conversation has one next turn, so its cost alone decides how long it waits for its
# worker. `bench.fleet.sim` measures which value is good.
_MAX_LOAD_LEAD = 0.625

# This share of requests goes to a worker without an answer for so long, if there is one: only
# answers show that a worker works, and how fast.
_EXPLORED_SHARE = 0.01
_UNPROVEN_AFTER_S = 30.0
_CHARS_PER_TOKEN = 4
_TOKENS_PER_IMAGE = 300
# Scale of the random term by which idle workers are chosen by weight: below any measured cost.
_TIE_BREAK_S = 1e-9


Item = TypeVar("Item")


class Chance(Protocol):
    """Random choices; `random.Random` makes them."""

    def random(self) -> float:
        """Return a number of [0, 1)."""

    def choice(self, items: Sequence[Item], /) -> Item:
        """Return one of the items."""


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


@dataclass(slots=True)
class _Ranking:
    """Result of ranking the lanes of one pool; lanes are given by their index."""

    order: Sequence[int]
    """Best first; the best alone where that is enough."""
    scores_s: Sequence[float]
    cached: Mapping[int, tuple[CachedPrefix, float]]
    """What the workers of lanes have cached of the prompt, and the prefill time that it saves."""
    prompt_tokens: float = 0.0
    explored: int | None = None
    """Lane that is first for another reason than its cost."""


_ONLY_LANE = _Ranking(order=(0,), scores_s=(0.0,), cached={})


def decide(
    request: RoutingRequest, fleet: FleetView, rng: Chance, *, first_only: bool = False
) -> Decision:
    """Rank the lanes that may take a request: pools in the route's order, then by cost.

    `rng` orders lanes of equal cost, so that one seed always gives one decision. A speculative lane
    that cannot speculate now comes last: it answers without drafts if no other lane can. Pools
    after the first with a worker are for spilling. `first_only` ranks the best lane alone: nearly
    always it takes the request, and sorting the others would take most of the time.
    """
    policy, profile = request.policy, request.profile
    route, bypass = match_route(policy, profile, request.attributes)
    speculation_barred = bool(bypass)
    bypass = bypass or _fleet_bypass(fleet, profile.model)
    spill_after_s = None if route.spill is None else route.spill.after_wait_ms / 1000
    first_only = first_only and spill_after_s != 0
    pools: Collection[str] = route.to
    if request.allowed_pools is not None:
        pools = [name for name in route.to if name in request.allowed_pools]
    found: list[Candidate] = []
    last_resort: list[Candidate] = []
    complete = True
    checked = False
    needs = TAKES_ALL if fleet.takes_all else features_of(profile)
    lacking: list[frozenset[Feature]] = []
    for name in pools:
        spill = bool(found)
        if spill and first_only:
            complete = False
            break
        pool = policy.pools[name]
        costs, positions = _pool_lanes(
            fleet, profile, name, pool, speculation_barred=speculation_barred
        )
        if needs and costs:
            lacking += [cost.ref.lacks & needs for cost in costs]
            costs, positions, checked = _taking(costs, positions, needs)
        if not costs:
            continue
        ranking = _rank(
            costs,
            positions,
            pool,
            profile,
            fleet,
            rng=rng,
            explore=not spill,
            first_only=first_only,
        )
        complete = complete and len(ranking.order) == len(costs)
        capable, incapable = _candidates(name, costs, ranking, bypass, spill=spill)
        (last_resort if checked else found).extend(capable)
        last_resort += incapable
    if found and last_resort:
        last_resort = [one._replace(reason=SPILLED, spill=True) for one in last_resort]
    candidates = (*found, *last_resort)
    lacks = TAKES_ALL if candidates or not lacking else min(lacking, key=len)
    return Decision(route.name, bypass, candidates, spill_after_s, not pools, complete, lacks)


def _fleet_bypass(fleet: FleetView, model: str) -> tuple[Bypass, ...]:
    """Return why no worker of a model can speculate; empty if one can."""
    costs = fleet.lane_costs.get((model, MTP_LANE), ())
    for cost in costs:
        if cost.ref.lane.can_draft:
            return ()
    unhealthy = any(not cost.ref.lane.report.head_healthy for cost in costs)
    return (Bypass.HEAD_UNHEALTHY if unhealthy else Bypass.NO_MTP_WORKER,)


def _pool_lanes(
    fleet: FleetView, profile: RequestProfile, name: str, pool: Pool, *, speculation_barred: bool
) -> tuple[tuple[LaneCost, ...], Mapping[str, int] | None]:
    """Return the lanes of a pool that serve a model and endpoint, and the index of each worker.

    The index is None where the pool merges or filters lanes, since the snapshot has none for that.
    """
    found: tuple[LaneCost, ...] = ()
    positions = None
    # A lane with the pool's name belongs to the pool: static workers have such lanes.
    lanes = pool.lanes if name in pool.lanes else (*pool.lanes, name)
    wanted = None if profile.endpoint in GENERATING else profile.endpoint
    for lane in lanes:
        # Whatever a policy says, the speculative lane takes only requests that can speculate, and
        # each lane those of its endpoints.
        if (speculation_barred and lane == MTP_LANE) or POOLING_LANES.get(lane) is not wanted:
            continue
        key = profile.model, lane
        if costs := fleet.lane_costs.get(key):
            positions = None if found else fleet.positions[key]
            found = found + costs if found else costs
    if pool.workers is None:
        return found, positions
    return tuple([cost for cost in found if pool.accepts(cost.ref.labels, cost.ref.models)]), None


def _taking(
    costs: tuple[LaneCost, ...],
    positions: Mapping[str, int] | None,
    needs: frozenset[Feature],
) -> tuple[tuple[LaneCost, ...], Mapping[str, int] | None, bool]:
    """Return the lanes that take these features, and the index of each worker if known.

    Return also whether they lack one that the gateway checks in the answer.
    """
    for wanted in (needs, needs - CHECKED):
        if taking := tuple([cost for cost in costs if not cost.ref.lacks & wanted]):
            kept = positions if len(taking) == len(costs) else None
            return taking, kept, wanted is not needs and bool(needs & CHECKED)
    return (), None, False


def _rank(
    costs: Sequence[LaneCost],
    positions: Mapping[str, int] | None,
    pool: Pool,
    profile: RequestProfile,
    fleet: FleetView,
    *,
    rng: Chance,
    explore: bool,
    first_only: bool,
) -> _Ranking:
    """Rank the lanes of a pool by their cost for this request."""
    if first_only and len(costs) == 1:
        ref = costs[0].ref
        found = fleet.cached.get((ref.worker_id, ref.boot_id)) if fleet.cached else None
        return _ONLY_LANE if found is None else _Ranking((0,), (0.0,), {0: (found, 0.0)})
    tokens = _prompt_tokens(profile, fleet)
    scores_s = _scores_s(costs, pool, tokens, fleet.now_s, rng)
    first = scores_s.index(min(scores_s))
    cached: Mapping[int, tuple[CachedPrefix, float]] = {}
    if fleet.cached:
        cached = _cached(costs, positions, costs[first].ref.lane.load, fleet.cached)
        for index, (_, saved_s) in cached.items():
            scores_s[index] -= saved_s
            if scores_s[index] < scores_s[first]:
                first = index
    least_s = scores_s[first]
    if scores_s.count(least_s) > 1:
        first = rng.choice([at for at, score_s in enumerate(scores_s) if score_s == least_s])
    explored = None
    # A conversation would be read again elsewhere, which takes far longer than other requests.
    explore = explore and not (first in cached and not cached[first][0].is_system)
    if explore and len(costs) > 1 and rng.random() < _EXPLORED_SHARE:
        explored = _unproven(costs, fleet.now_s, rng)
        first = first if explored is None else explored
    if first_only and _is_capable(costs[first].ref.lane):
        order = [first]
    else:
        order = _order(first, scores_s, rng)
    return _Ranking(order, scores_s, cached, tokens, explored)


def _prompt_tokens(profile: RequestProfile, fleet: FleetView) -> float:
    """Return the estimated tokens of a prompt, at least those that a worker has cached."""
    tokens = profile.text_chars / _CHARS_PER_TOKEN
    if profile.media:
        tokens += profile.media_count * _TOKENS_PER_IMAGE
    if not fleet.cached:
        return tokens
    return max([tokens, *[found.tokens for found in fleet.cached.values()]])


def _scores_s(
    costs: Sequence[LaneCost], pool: Pool, tokens: float, now_s: float, rng: Chance
) -> list[float]:
    """Return the cost of the request at each lane, by weight, with its whole prefill."""
    if pool.weights:
        return [
            _weighted_s(cost, pool.weight(cost.ref.labels), tokens, now_s, rng) for cost in costs
        ]
    return [
        cost.load_cost_s + tokens * cost.prefill_token_s
        if cost.prefill_until_s <= now_s
        else cost.load_cost_s + tokens * cost.prefill_token_s + cost.prefill_until_s - now_s
        for cost in costs
    ]


def _weighted_s(cost: LaneCost, weight: float, tokens: float, now_s: float, rng: Chance) -> float:
    """Return a score by which a worker of twice the weight gets twice the load."""
    wait_s = max(cost.prefill_until_s - now_s, 0.0)
    # Idle workers get requests by weight too: of exponentially distributed numbers, a worker's is
    # the least as often as its weight says.
    tie_break_s = -log1p(-rng.random()) * _TIE_BREAK_S
    return (cost.load_cost_s + wait_s + tie_break_s) / weight + tokens * cost.prefill_token_s


def _cached(
    costs: Sequence[LaneCost],
    positions: Mapping[str, int] | None,
    best_load: float,
    by_boot: CachedPrefixes,
) -> dict[int, tuple[CachedPrefix, float]]:
    """Return what workers have cached of the prompt, and the prefill time that each would save.

    A worker that is full saves nothing, since waiting there is no gain; neither does one that has
    the system prompt alone and is much busier than the best.
    """
    worker_ids = [worker_id for worker_id, _ in by_boot]
    if positions is None:
        indexes = [at for at, cost in enumerate(costs) if cost.ref.worker_id in worker_ids]
    else:
        indexes = [positions[worker_id] for worker_id in worker_ids if worker_id in positions]
    cached = {}
    for index in indexes:
        cost = costs[index]
        found = by_boot.get((cost.ref.worker_id, cost.ref.boot_id))
        if found is None:
            continue
        lane = cost.ref.lane
        near = not found.is_system or lane.load <= best_load + _MAX_LOAD_LEAD
        worthwhile = near and lane.in_flight < lane.slots
        cached[index] = found, found.tokens * cost.prefill_token_s if worthwhile else 0.0
    return cached


def _unproven(costs: Sequence[LaneCost], now_s: float, rng: Chance) -> int | None:
    """Choose a lane with a free slot whose worker has not answered for a while, if there is one."""
    unproven = [
        index
        for index, cost in enumerate(costs)
        if cost.answered_at_s + _UNPROVEN_AFTER_S < now_s
        and cost.ref.lane.in_flight < cost.ref.lane.slots
    ]
    return rng.choice(unproven) if unproven else None


def _order(first: int, scores_s: Sequence[float], rng: Chance) -> list[int]:
    """Order all lanes by score, equal ones at random, after the first."""
    throw = rng.random
    tie_breaks = [throw() for _ in scores_s]
    ranked = sorted(zip(scores_s, tie_breaks, range(len(scores_s)), strict=True))
    return [first, *[index for _, _, index in ranked if index != first]]


def _candidates(
    pool: str,
    costs: Sequence[LaneCost],
    ranking: _Ranking,
    bypass: tuple[Bypass, ...],
    *,
    spill: bool,
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates of a pool in their order, the incapable ones apart."""
    candidates: list[Candidate] = []
    incapable: list[Candidate] = []
    for index in ranking.order:
        cost = costs[index]
        lane, worker_id = cost.ref.lane, cost.ref.worker_id
        capable = _is_capable(lane)
        reason = SPILLED if spill and capable else _reason(lane, bypass)
        found, saved_s = ranking.cached.get(index, (None, 0.0))
        score_s = ranking.scores_s[index]
        prefill_s = ranking.prompt_tokens * cost.prefill_token_s - saved_s
        cached_tokens = found.tokens if found else 0
        # By position: keywords would triple the time of this.
        candidate = Candidate(
            pool, lane.name, worker_id, reason, lane.load, capable and spill, found is not None,
            score_s, prefill_s, index == ranking.explored, cached_tokens,
        )  # fmt: skip
        (candidates if capable else incapable).append(candidate)
    return candidates, incapable


def _is_capable(lane: LaneView) -> bool:
    """Return whether a lane does what its name says: a speculative one can draft."""
    return lane.can_draft or lane.name != MTP_LANE


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    """Return why the request would go to a lane of its preferred pool."""
    if bypass:
        return bypass[0].value
    if lane.name != MTP_LANE or not lane.can_draft:
        return BY_POLICY
    # The lane's measurement for the batch that this request would join.
    return ELIGIBLE if lane.drafting_pays else Bypass.MTP_NOT_PAYING.value
