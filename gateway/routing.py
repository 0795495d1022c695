"""Decide which worker takes a request: pure, from policy, profile and one fleet snapshot."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import log1p
from random import Random

from gateway.domain import Candidate, Case, Decision, FleetView, LaneView, WorkerView
from policies.evaluation import judge
from policies.pools import Pool
from policies.profile import Bypass

MTP_LANE = "text-mtp"
ELIGIBLE = "eligible"
# A worker that holds the system prompt is asked first while it has a free slot and is at most so
# much busier (1 is a full lane) than the least busy: behind others the head start would be lost,
# and a prompt that all share would pile up on one machine. `bench.fleet_sim` says how much is good.
_HOLDERS_LEAD = 0.625
_NOBODY: frozenset[str] = frozenset()
# The request may speculate and somebody could do it, but the policy sends it elsewhere.
BY_POLICY = "policy"
# The preferred pool was full for longer than the route lets a request wait for it alone.
SPILLED = "spilled"


_Ranked = tuple[float, float, float, str, LaneView]
"""Load of the lane and of its worker, dice, worker, lane."""


def decide(case: Case, fleet: FleetView, rng: Random) -> Decision:
    """Rank the workers that may take this request: pools in the route's order, then by load.

    Who holds the request's system prompt comes first while that means no wait. Among equals the
    order is `rng`'s, so that one seed always gives one decision. A speculative lane that cannot
    speculate now comes last: it answers plainly where nobody else does. Behind the first pool that
    somebody serves all others are for spilling. Pools that the asker may not use are as if the
    route did not name them.
    """
    policy, profile, asker, pools, _ = case
    verdict = judge(policy, profile, asker)
    route = verdict.route
    workers = [worker for worker in fleet.workers if profile.model in worker.models]
    bypass = verdict.bypass or _fleet_bypass(workers)
    holders = _holders(workers, fleet)
    candidates: list[Candidate] = []
    last_resort: list[Candidate] = []
    allowed = route.to if pools is None else [pool for pool in route.to if pool in pools]
    for pool in allowed:
        spill = bool(candidates)
        ranked = _ranked(workers, pool, policy.pools[pool], bool(verdict.bypass), rng)
        if holders and len(ranked) > 1:
            ranked = _holders_first(ranked, holders)
        for _, _, _, worker_id, lane in ranked:
            holder = worker_id in holders
            if lane.name == MTP_LANE and not lane.drafts:
                reason = bypass[0].value if bypass else BY_POLICY
                last_resort.append(
                    Candidate(pool, lane.name, worker_id, reason, lane.load, holder=holder)
                )
            else:
                reason = SPILLED if spill else _reason(lane, bypass)
                candidates.append(
                    Candidate(pool, lane.name, worker_id, reason, lane.load, spill, holder)
                )
    if candidates:
        last_resort = [one._replace(reason=SPILLED, spill=True) for one in last_resort]
    return Decision(
        route=route.name,
        bypass=bypass,
        candidates=(*candidates, *last_resort),
        spill_after_s=None if route.spill is None else route.spill.after_wait_ms / 1000,
        barred=not allowed,
    )


def _fleet_bypass(workers: Sequence[WorkerView]) -> tuple[Bypass, ...]:
    """Say why no worker could speculate, though the request may."""
    lanes = [lane for worker in workers for lane in worker.lanes if lane.name == MTP_LANE]
    if [lane for lane in lanes if lane.drafts]:
        return ()
    sick = any(not lane.report.head_healthy for lane in lanes)
    return (Bypass.HEAD_UNHEALTHY if sick else Bypass.NO_MTP_WORKER,)


def _ranked(
    workers: Sequence[WorkerView], name: str, pool: Pool, bypassed: bool, rng: Random
) -> list[_Ranked]:
    """List the lanes of a pool that may take the request, the least loaded for its weight first."""
    if pool.workers is not None:
        workers = [one for one in workers if pool.takes(one.labels, one.models)]
    lanes = pool.lanes
    found = [
        (lane.load, worker.load, rng.random(), worker.worker_id, lane)
        for worker in workers
        for lane in worker.lanes
        # A lane named as the pool belongs to it: so it is with workers that are listed by hand.
        if (lane.name in lanes or lane.name == name)
        # Whatever a policy says, the speculative lane only takes what it can do.
        and not (bypassed and lane.name == MTP_LANE)
    ]
    if pool.weights:
        weights = {one.worker_id: pool.weight(one.labels) for one in workers}
        # The last figure gives idle workers their shares too: of numbers that fall off
        # exponentially, the least is a worker's as often as its weight says.
        found = [
            (load / weight, machine / weight, -log1p(-dice) / weight, worker_id, lane)
            for load, machine, dice, worker_id, lane in found
            for weight in (weights[worker_id],)
        ]
    if len(found) > 1:
        found.sort()
    return found


def _holders(workers: Sequence[WorkerView], fleet: FleetView) -> Set[str]:
    """Name the workers that hold the system prompt."""
    if not fleet.holders:
        return _NOBODY
    return {one.worker_id for one in workers if (one.worker_id, one.boot_id) in fleet.holders}


def _holders_first(ranked: list[_Ranked], holders: Set[str]) -> list[_Ranked]:
    """Put those first who hold the system prompt, where that costs no wait."""
    bound = ranked[0][0] + _HOLDERS_LEAD
    first: list[_Ranked] = []
    others: list[_Ranked] = []
    for one in ranked:
        load, _, _, worker_id, lane = one
        ahead = worker_id in holders and lane.in_flight < lane.slots and load <= bound
        (first if ahead else others).append(one)
    return first + others


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    if bypass:
        return bypass[0].value
    if lane.name != MTP_LANE:
        return BY_POLICY
    # What the lane has measured counts for the batch that this request would be part of.
    pays = lane.report.drafting_pays(lane.in_flight + 1)
    return ELIGIBLE if pays else Bypass.MTP_NOT_PAYING.value
