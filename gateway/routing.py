"""Decide which worker takes a request: pure, from policy, profile and one fleet snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from gateway.domain import Candidate, Decision, FleetView, LaneView, WorkerView
from policies.asker import SOMEBODY, Asker
from policies.document import PolicyDocument
from policies.evaluation import judge
from policies.profile import Bypass, RequestProfile

MTP_LANE = "text-mtp"
ELIGIBLE = "eligible"
# The request may speculate and somebody could do it, but the policy sends it elsewhere.
BY_POLICY = "policy"
# The preferred pool was full for longer than the route lets a request wait for it alone.
SPILLED = "spilled"


def decide(
    policy: PolicyDocument,
    profile: RequestProfile,
    fleet: FleetView,
    rng: Random,
    asker: Asker = SOMEBODY,
) -> Decision:
    """Rank the workers that may take this request: pools in the route's order, then by load.

    Among equals the order is `rng`'s, so that one seed always gives one decision. A speculative
    lane that cannot speculate now comes last: it answers plainly where nobody else does. Behind
    the first pool that somebody serves all others are for spilling.
    """
    verdict = judge(policy, profile, asker)
    route = verdict.route
    workers = [worker for worker in fleet.workers if profile.model in worker.models]
    bypass = verdict.bypass or _fleet_bypass(workers)
    candidates: list[Candidate] = []
    last_resort: list[Candidate] = []
    for pool in route.to:
        spill = bool(candidates)
        lanes = policy.pools[pool].lanes
        for _, _, _, worker_id, lane in _ranked(workers, pool, lanes, bool(verdict.bypass), rng):
            if lane.name == MTP_LANE and not lane.drafts:
                reason = bypass[0].value if bypass else BY_POLICY
                last_resort.append(Candidate(pool, lane.name, worker_id, reason, lane.load))
            else:
                reason = SPILLED if spill else _reason(lane, bypass)
                candidates.append(Candidate(pool, lane.name, worker_id, reason, lane.load, spill))
    if candidates:
        last_resort = [one._replace(reason=SPILLED, spill=True) for one in last_resort]
    return Decision(
        route=route.name,
        bypass=bypass,
        candidates=(*candidates, *last_resort),
        spill_after_s=None if route.spill is None else route.spill.after_wait_ms / 1000,
    )


def _fleet_bypass(workers: Iterable[WorkerView]) -> tuple[Bypass, ...]:
    """Say why no worker could speculate, though the request may."""
    lanes = [lane for worker in workers for lane in worker.lanes if lane.name == MTP_LANE]
    if [lane for lane in lanes if lane.drafts]:
        return ()
    sick = any(not lane.report.head_healthy for lane in lanes)
    return (Bypass.HEAD_UNHEALTHY if sick else Bypass.NO_MTP_WORKER,)


def _ranked(
    workers: Iterable[WorkerView],
    pool: str,
    lanes: tuple[str, ...],
    bypassed: bool,
    rng: Random,
) -> list[tuple[float, float, float, str, LaneView]]:
    """List the lanes of a pool that may take the request, the least loaded first."""
    found = [
        (lane.load, worker.load, rng.random(), worker.worker_id, lane)
        for worker in workers
        for lane in worker.lanes
        # A lane named as the pool belongs to it: so it is with workers that are listed by hand.
        if (lane.name in lanes or lane.name == pool)
        # Whatever a policy says, the speculative lane only takes what it can do.
        and not (bypassed and lane.name == MTP_LANE)
    ]
    if len(found) > 1:
        found.sort()
    return found


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    if bypass:
        return bypass[0].value
    if lane.name != MTP_LANE:
        return BY_POLICY
    # What the lane has measured counts for the batch that this request would be part of.
    pays = lane.report.drafting_pays(lane.in_flight + 1)
    return ELIGIBLE if pays else Bypass.MTP_NOT_PAYING.value
