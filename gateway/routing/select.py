"""Decide which worker takes a request: pure, from policy, profile and one fleet snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log1p
from typing import TYPE_CHECKING, NamedTuple

from gateway.routing.view import FleetView, LaneCost, LaneRef, LaneView
from gateway.types import WorkerBoot
from policies.compiler import SOMEBODY, Asker
from policies.document import PolicyDocument
from policies.evaluate import judge
from policies.request.profile import Bypass, RequestProfile
from policies.sections import Pool
from workers.protocol import MTP_LANE

if TYPE_CHECKING:
    from random import Random

ELIGIBLE = "eligible"
# The request may speculate and somebody could do it, but the policy sends it elsewhere.
BY_POLICY = "policy"
# The preferred pool was full for longer than the route lets a request wait for it alone.
SPILLED = "spilled"

# What a worker need not read of a system prompt counts for it only while it has a free slot and is
# at most so much busier (1 is a full lane) than the best other: a prompt that all share would pile
# up on one machine. `bench.fleet.sim` says how much is good.
_HOLDERS_LEAD = 0.625

# Of so many requests one goes to a worker that was not heard of for so long, if there is one: how
# fast it is, and that it works, is known from answers alone.
_EXPLORED = 0.01
_QUIET_S = 30.0
_CHARS_A_TOKEN = 4
_TOKENS_A_PICTURE = 300
# Where neither the request nor a worker tells how long a system prompt is.
_USUAL_SHARED_TOKENS = 2000
# Of idle workers, each gets by weight this much dice: less than anything that is measured.
_DICE_S = 1e-9


class _Ranked(NamedTuple):
    """The lanes of a pool that may take a request, by their places."""

    first: int
    scores_s: Sequence[float]
    saved_s: Mapping[int, float]
    """Of those that hold its system prompt: the reading that is spared."""
    token_count: float = 0.0
    explored: int = -1
    """The place of one that is first for another reason than its cost."""


_ALONE = _Ranked(0, (0.0,), {})
_ONE: Sequence[int] = (0,)


def decide(
    case: RoutingRequest, fleet: FleetView, rng: Random, *, first_only: bool = False
) -> Decision:
    """Rank the workers that may take this request: pools in the route's order, then by cost.

    A cost is in seconds: the wait, what the request takes from others, and the reading of what the
    worker does not hold. Among equals the order is `rng`'s, so that one seed always gives one
    decision. A speculative lane that cannot speculate now comes last: it answers plainly where
    nobody else does. Behind the first pool that somebody serves all others are for spilling. Pools
    that the asker may not use are as if the route did not name them. `first_only` names the first
    alone: nearly always it takes the request, and to sort the others would take longest.
    """
    policy, profile, asker, pools, _ = case
    route, bypass = judge(policy, profile, asker)
    model, lanes_barred = profile.model, bool(bypass)
    bypass = bypass or _fleet_bypass(fleet.lane_costs.get((model, MTP_LANE), ()))
    spill_after_s = None if route.spill is None else route.spill.after_wait_ms / 1000
    first_only = first_only and spill_after_s != 0
    found: list[Candidate] = []
    last_resort: list[Candidate] = []
    order: Sequence[int]
    whole = True
    allowed = route.to if pools is None else [pool for pool in route.to if pool in pools]
    for name in allowed:
        spill = bool(found)
        if spill and first_only:
            whole = False
            break
        pool = policy.pools[name]
        rows, places = _rows(fleet, model, name, pool, barred=lanes_barred)
        if not rows:
            continue
        if first_only and len(rows) == 1:
            ranked, order = _ALONE, _ONE
        else:
            ranked = _rank(rows, places, pool, profile, fleet, rng=rng, explores=not spill)
            if first_only and _able(rows[ranked.first][4].lane):
                order, whole = (ranked.first,), False
            else:
                order = _order(ranked, rng)
        _, scores_s, saved_s, tokens, explored = ranked
        for at in order:
            _, _, read_s, _, seat = rows[at]
            lane = seat.lane
            able = _able(lane)
            if able:
                reason = SPILLED if spill else _reason(lane, bypass)
            else:
                reason = bypass[0].value if bypass else BY_POLICY
            holder = at in saved_s or (ranked is _ALONE and _holds(seat, fleet))
            own_s = tokens * read_s - saved_s.get(at, 0.0)
            (found if able else last_resort).append(
                Candidate(name, lane.name, seat.worker_id, reason, lane.load, able and spill,
                          holder, scores_s[at], own_s, at == explored)
            )  # fmt: skip
    if found and last_resort:
        last_resort = [one._replace(reason=SPILLED, spill=True) for one in last_resort]
    return Decision(route.name, bypass, (*found, *last_resort), spill_after_s, not allowed, whole)


def _fleet_bypass(rows: Sequence[LaneCost]) -> tuple[Bypass, ...]:
    """Say why no worker could speculate, though the request may."""
    for row in rows:
        if row[4].lane.can_draft:
            return ()
    sick = any(not row[4].lane.report.head_healthy for row in rows)
    return (Bypass.HEAD_UNHEALTHY if sick else Bypass.NO_MTP_WORKER,)


def _able(lane: LaneView) -> bool:
    """Say whether a lane is what it is called: a speculative one speculates."""
    return lane.can_draft or lane.name != MTP_LANE


def _rows(
    fleet: FleetView, model: str, name: str, pool: Pool, *, barred: bool
) -> tuple[tuple[LaneCost, ...], Mapping[str, int] | None]:
    """List the lanes of a pool that may take the request, and where each worker stands there.

    `forbidden`: the request cannot speculate. No places are given where a pool has lanes of its own
    choice, since nobody has kept those.
    """
    found: tuple[LaneCost, ...] = ()
    places = None
    # A lane named as the pool belongs to it: so it is with workers that are listed by hand.
    lanes = pool.lanes
    for lane in lanes if name in lanes else (*lanes, name):
        # Whatever a policy says, the speculative lane only takes what it can do.
        if barred and lane == MTP_LANE:
            continue
        asked = model, lane
        if rows := fleet.lane_costs.get(asked):
            places = None if found else fleet.positions[asked]
            found = found + rows if found else rows
    if pool.workers is None:
        return found, places
    return tuple([row for row in found if pool.takes(row[4].labels, row[4].models)]), None


def _rank(
    rows: Sequence[LaneCost],
    places: Mapping[str, int] | None,
    pool: Pool,
    profile: RequestProfile,
    fleet: FleetView,
    *,
    rng: Random,
    explores: bool,
) -> _Ranked:
    """Tell what each lane of a pool costs, each for its weight, and which is the first."""
    now_s, holders = fleet.now_s, fleet.prefix_boots
    tokens = profile.text_chars / _CHARS_A_TOKEN
    if profile.media:
        tokens += profile.media_count * _TOKENS_A_PICTURE
    shared_tokens = 0.0
    if holders:
        shared_tokens = fleet.prefix_tokens or tokens or _USUAL_SHARED_TOKENS
        tokens = max(tokens, shared_tokens)
    if pool.weights:
        scores_s = _weighted(rows, pool, tokens, now_s, rng)
    else:
        scores_s = [
            cost_s + tokens * read_s
            if until_s <= now_s
            else cost_s + tokens * read_s + until_s - now_s
            for cost_s, until_s, read_s, _, _ in rows
        ]
    least_s = min(scores_s)
    first = scores_s.index(least_s)
    saved_s: dict[int, float] = {}
    if holders:
        saved_s = _saved_s(rows, places, rows[first][4].lane.load, shared_tokens, holders)
        for at, seconds in saved_s.items():
            scores_s[at] -= seconds
            if scores_s[at] < least_s:
                least_s, first = scores_s[at], at
    if scores_s.count(least_s) > 1:
        equals = [at for at, score_s in enumerate(scores_s) if score_s == least_s]
        first = rng.choice(equals)
    explored = -1
    if explores and len(rows) > 1 and rng.random() < _EXPLORED:
        explored = _quiet(rows, now_s, rng)
        if explored >= 0:
            first = explored
    return _Ranked(first, scores_s, saved_s, tokens, explored)


def _order(ranked: _Ranked, rng: Random) -> list[int]:
    """Order all places by cost behind the first."""
    scores_s, throw = ranked.scores_s, rng.random
    dice = [throw() for _ in scores_s]
    order = [at for _, _, at in sorted(zip(scores_s, dice, range(len(dice)), strict=True))]
    order.remove(ranked.first)
    return [ranked.first, *order]


def _weighted(
    rows: Sequence[LaneCost], pool: Pool, tokens: float, now_s: float, rng: Random
) -> list[float]:
    """Score lanes so that of two workers the one of twice the weight has twice the load."""
    scores_s = []
    for cost_s, until_s, read_s, _, seat in rows:
        weight = pool.weight(seat.labels)
        # Idle workers get their shares too: of numbers that fall off exponentially, the least is a
        # worker's as often as its weight says.
        dice_s = -log1p(-rng.random()) * _DICE_S
        scores_s.append((cost_s + max(until_s - now_s, 0.0) + dice_s) / weight + tokens * read_s)
    return scores_s


def _saved_s(
    rows: Sequence[LaneCost],
    places: Mapping[str, int] | None,
    best: float,
    shared_tokens: float,
    holders: frozenset[WorkerBoot],
) -> dict[int, float]:
    """Say what those who hold the system prompt need not read, by their places.

    Nothing for one that is much busier than the best, or full: that is no reason to wait there.
    """
    held: Iterable[int]
    if places is None:
        ids = [worker_id for worker_id, _ in holders]
        held = [at for at, row in enumerate(rows) if row[4].worker_id in ids]
    else:
        held = [places[worker_id] for worker_id, _ in holders if worker_id in places]
    saved_s = {}
    for at in held:
        _, _, read_s, _, seat = rows[at]
        if (seat.worker_id, seat.boot_id) in holders:
            lane = seat.lane
            ahead = lane.in_flight < lane.slots and lane.load <= best + _HOLDERS_LEAD
            saved_s[at] = shared_tokens * read_s if ahead else 0.0
    return saved_s


def _holds(seat: LaneRef, fleet: FleetView) -> bool:
    return (seat.worker_id, seat.boot_id) in fleet.prefix_boots


def _quiet(rows: Sequence[LaneCost], now_s: float, rng: Random) -> int:
    """Find one with a free slot that was not heard of for a while; -1 where there is none."""
    quiet = [
        at
        for at, (_, _, _, heard_s, seat) in enumerate(rows)
        if heard_s + _QUIET_S < now_s and seat.lane.in_flight < seat.lane.slots
    ]
    return rng.choice(quiet) if quiet else -1


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    if bypass:
        return bypass[0].value
    if lane.name != MTP_LANE:
        return BY_POLICY
    # What the lane has measured counts for the batch that this request would be part of.
    return ELIGIBLE if lane.drafting_pays else Bypass.MTP_NOT_PAYING.value


class RoutingRequest(NamedTuple):
    """What one request is decided by to its end; a policy that comes later is for later ones."""

    policy: PolicyDocument
    profile: RequestProfile
    asker: Asker = SOMEBODY
    allowed_pools: frozenset[str] | None = None
    """Those that the asker may use; None: all."""
    prefix_key: str = ""
    """The name of its system prompt; empty where there is none worth looking for."""


class Candidate(NamedTuple):
    """One lane that may take the request, and why it would be that one."""

    pool: str
    lane: str
    worker_id: str
    reason: str
    load: float
    spill: bool = False
    """Only once the request has waited for those before, as long as the route says."""
    prefix_cached: bool = False
    """It holds the system prompt of the request."""
    score_s: float = 0.0
    """What the request would cost there, in seconds: the least comes first."""
    prefill_s: float = 0.0
    """Of these, the reading of what the worker does not hold."""
    explored: bool = False
    """First because nobody has heard of it for a while, not because it costs least."""


class Decision(NamedTuple):
    """Who may take a request, best first; nobody when `candidates` is empty."""

    route: str
    bypass: tuple[Bypass, ...]
    candidates: tuple[Candidate, ...]
    spill_after_s: float | None = None
    """None: it never spills."""
    forbidden: bool = False
    """The key may use none of the route's pools."""
    complete: bool = True
    """All are named who may take it; otherwise the best few."""
