"""Decide which worker takes a request: pure, from policy, profile and one fleet snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log1p
from random import Random
from typing import NamedTuple

from gateway.domain import Candidate, Case, Decision, FleetView, LaneView, Row
from policies.evaluation import judge
from policies.pools import Pool
from policies.profile import Bypass, RequestProfile

MTP_LANE = "text-mtp"
ELIGIBLE = "eligible"
# The request may speculate and somebody could do it, but the policy sends it elsewhere.
BY_POLICY = "policy"
# The preferred pool was full for longer than the route lets a request wait for it alone.
SPILLED = "spilled"
# What a worker need not read of a system prompt counts for it only while it has a free slot and is
# at most so much busier (1 is a full lane) than the best other: a prompt that all share would pile
# up on one machine. `bench.fleet_sim` says how much is good.
_HOLDERS_LEAD = 0.625
# Of so many requests one goes to a worker that was not heard of for so long, if there is one: how
# fast it is, and that it works, is known from answers alone.
_EXPLORED = 0.01
_QUIET_S = 30.0
# A decision that need not be whole names so many: the first one is nearly always free.
_FEW = 4
_CHARS_A_TOKEN = 4
_TOKENS_A_PICTURE = 300
# Where neither the request nor a worker tells how long a system prompt is.
_USUAL_SHARED_TOKENS = 2000
# Less than anything that is measured: it decides among equals alone.
_DICE_S = 1e-9


class _Ranked(NamedTuple):
    """The lanes of a pool that may take a request; `order` names them by place, best first."""

    order: Sequence[int]
    scores_s: Sequence[float]
    saved_s: Mapping[int, float]
    """Of those that hold its system prompt, by place: the reading that is spared."""
    token_count: float = 0.0
    explored: int = -1
    """The place of one that is first for another reason than its cost."""


_ALONE = _Ranked((0,), (0.0,), {})


def decide(case: Case, fleet: FleetView, rng: Random, *, briefly: bool = False) -> Decision:
    """Rank the workers that may take this request: pools in the route's order, then by cost.

    A cost is in seconds: the wait, what the request takes from others, and the reading of what the
    worker does not hold. Among equals the order is `rng`'s, so that one seed always gives one
    decision. A speculative lane that cannot speculate now comes last: it answers plainly where
    nobody else does. Behind the first pool that somebody serves all others are for spilling. Pools
    that the asker may not use are as if the route did not name them. `briefly` names no more than
    the best few of the first pool: who takes the request is nearly always one of them.
    """
    policy, profile, asker, pools, _ = case
    verdict = judge(policy, profile, asker)
    route, model = verdict.route, profile.model
    bypass = verdict.bypass or _fleet_bypass(fleet.rows.get((model, MTP_LANE), ()))
    spill_after_s = None if route.spill is None else route.spill.after_wait_ms / 1000
    briefly = briefly and spill_after_s != 0
    found: list[Candidate] = []
    last_resort: list[Candidate] = []
    whole = True
    allowed = route.to if pools is None else [pool for pool in route.to if pool in pools]
    for name in allowed:
        spill = bool(found)
        if spill and briefly:
            whole = False
            break
        pool = policy.pools[name]
        rows = _rows(fleet, model, name, pool, verdict.bypass)
        if not rows:
            continue
        if briefly and len(rows) == 1:
            ranked = _ALONE
        else:
            ranked = _rank(rows, pool, profile, fleet, rng, explores=not spill)
        order, scores_s, saved_s, tokens, explored = ranked
        for at in order:
            _, _, read_s, worker_id, seat = rows[at]
            lane = seat.lane
            able = lane.drafts or lane.name != MTP_LANE
            if able:
                reason = SPILLED if spill else _reason(lane, bypass)
            else:
                reason = bypass[0].value if bypass else BY_POLICY
            holder = at in saved_s or (ranked is _ALONE and _holds(rows[at], fleet))
            own_s = tokens * read_s - saved_s.get(at, 0.0)
            (found if able else last_resort).append(
                Candidate(name, lane.name, worker_id, reason, lane.load, able and spill, holder,
                          scores_s[at], own_s, at == explored)
            )  # fmt: skip
            if briefly and len(found) == _FEW < len(rows):
                whole = False
                break
    if found and last_resort:
        last_resort = [one._replace(reason=SPILLED, spill=True) for one in last_resort]
    return Decision(
        route.name, bypass, (*found, *last_resort), spill_after_s, barred=not allowed, whole=whole
    )


def _fleet_bypass(rows: Sequence[Row]) -> tuple[Bypass, ...]:
    """Say why no worker could speculate, though the request may."""
    for row in rows:
        if row[4].lane.drafts:
            return ()
    sick = any(not row[4].lane.report.head_healthy for row in rows)
    return (Bypass.HEAD_UNHEALTHY if sick else Bypass.NO_MTP_WORKER,)


def _rows(
    fleet: FleetView, model: str, name: str, pool: Pool, bypass: tuple[Bypass, ...]
) -> tuple[Row, ...]:
    """List the lanes of a pool that may take the request."""
    found: tuple[Row, ...] = ()
    # A lane named as the pool belongs to it: so it is with workers that are listed by hand.
    for lane in pool.lanes if name in pool.lanes else (*pool.lanes, name):
        # Whatever a policy says, the speculative lane only takes what it can do.
        if not (bypass and lane == MTP_LANE):
            found += fleet.rows.get((model, lane), ())
    if pool.workers is None:
        return found
    return tuple([row for row in found if pool.takes(row[4].labels, row[4].models)])


def _rank(
    rows: Sequence[Row],
    pool: Pool,
    profile: RequestProfile,
    fleet: FleetView,
    rng: Random,
    *,
    explores: bool,
) -> _Ranked:
    """Order the lanes of a pool by cost, each for its weight."""
    now_s, dice = fleet.now_s, rng.random
    tokens = profile.text_chars / _CHARS_A_TOKEN + profile.media_count * _TOKENS_A_PICTURE
    shared_tokens = 0.0
    if fleet.holders:
        shared_tokens = fleet.shared_tokens or tokens or _USUAL_SHARED_TOKENS
        tokens = max(tokens, shared_tokens)
    if pool.weights:
        scores_s = _weighted(rows, pool, tokens, now_s, rng)
    else:
        scores_s = [
            cost_s + tokens * read_s + dice() * _DICE_S
            if until_s <= now_s
            else cost_s + tokens * read_s + dice() * _DICE_S + until_s - now_s
            for cost_s, until_s, read_s, _, _ in rows
        ]
    saved_s = _saved_s(rows, scores_s, shared_tokens, fleet) if fleet.holders else {}
    for at, seconds in saved_s.items():
        scores_s[at] -= seconds
    order = sorted(range(len(rows)), key=scores_s.__getitem__)
    explored = -1
    if explores and rng.random() < _EXPLORED:
        explored = _quiet(rows, now_s, rng)
        if explored >= 0:
            order.remove(explored)
            order.insert(0, explored)
    return _Ranked(order, scores_s, saved_s, tokens, explored)


def _weighted(
    rows: Sequence[Row], pool: Pool, tokens: float, now_s: float, rng: Random
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
    rows: Sequence[Row], scores_s: Sequence[float], shared_tokens: float, fleet: FleetView
) -> dict[int, float]:
    """Say what those who hold the system prompt need not read, by their places.

    Nothing for one that is much busier than the best, or full: that is no reason to wait there.
    """
    holders = fleet.holders
    ids = [worker_id for worker_id, _ in holders]
    places = [at for at, (_, _, _, worker_id, _) in enumerate(rows) if worker_id in ids]
    best = rows[scores_s.index(min(scores_s))][4].lane.load
    saved_s = {}
    for at in places:
        row = rows[at]
        if _holds(row, fleet):
            lane = row[4].lane
            ahead = lane.in_flight < lane.slots and lane.load <= best + _HOLDERS_LEAD
            saved_s[at] = shared_tokens * row[2] if ahead else 0.0
    return saved_s


def _holds(row: Row, fleet: FleetView) -> bool:
    return (row[3], row[4].boot_id) in fleet.holders


def _quiet(rows: Sequence[Row], now_s: float, rng: Random) -> int:
    """Find one with a free slot that was not heard of for a while; -1 where there is none."""
    quiet = [
        at
        for at, (_, _, _, _, seat) in enumerate(rows)
        if seat.heard_s + _QUIET_S < now_s and seat.lane.in_flight < seat.lane.slots
    ]
    return rng.choice(quiet) if quiet else -1


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    if bypass:
        return bypass[0].value
    if lane.name != MTP_LANE:
        return BY_POLICY
    # What the lane has measured counts for the batch that this request would be part of.
    return ELIGIBLE if lane.pays else Bypass.MTP_NOT_PAYING.value
