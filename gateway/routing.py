"""Decide which worker takes a request: pure, from policy, profile and one fleet snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from gateway.domain import Candidate, Decision, FleetView, LaneView, WorkerView
from policies.document import PolicyDocument
from policies.evaluation import Verdict, judge
from policies.profile import Bypass, RequestProfile

MTP_LANE = "text-mtp"
ELIGIBLE = "eligible"
# The request may speculate and somebody could do it, but the policy sends it elsewhere.
BY_POLICY = "policy"


def decide(
    policy: PolicyDocument, profile: RequestProfile, fleet: FleetView, rng: Random
) -> Decision:
    """Rank the workers that may take this request: pools in the route's order, then by load.

    Among equals the order is `rng`'s, so that one seed always gives one decision. A speculative
    lane that cannot speculate now comes last: it answers plainly where nobody else does.
    """
    verdict = judge(policy, profile)
    workers = [worker for worker in fleet.workers if worker.model == profile.model]
    bypass = verdict.bypass or _fleet_bypass(workers)
    candidates: list[Candidate] = []
    last_resort: list[Candidate] = []
    for pool in verdict.route.to:
        ranked = sorted(
            _open_lanes(workers, policy.pools[pool].lanes, verdict),
            key=lambda found: (found[1].load, found[0].load, rng.random()),
        )
        for worker, lane in ranked:
            candidate = Candidate(
                pool=pool,
                lane=lane.report.name,
                worker_id=worker.worker_id,
                reason=_reason(lane, bypass),
                load=lane.load,
            )
            idle_head = lane.report.name == MTP_LANE and not _speculates(lane)
            (last_resort if idle_head else candidates).append(candidate)
    return Decision(route=verdict.route.name, bypass=bypass, candidates=(*candidates, *last_resort))


def _fleet_bypass(workers: Iterable[WorkerView]) -> tuple[Bypass, ...]:
    """Say why no worker could speculate, though the request may."""
    lanes = [lane for worker in workers for lane in worker.lanes if lane.report.name == MTP_LANE]
    if any(_speculates(lane) for lane in lanes):
        return ()
    sick = any(not lane.report.head_healthy for lane in lanes)
    return (Bypass.HEAD_UNHEALTHY if sick else Bypass.NO_MTP_WORKER,)


def _open_lanes(
    workers: Iterable[WorkerView], lanes: tuple[str, ...], verdict: Verdict
) -> Iterable[tuple[WorkerView, LaneView]]:
    for worker in workers:
        for lane in worker.lanes:
            # Whatever a policy says, the speculative lane only takes what it can do.
            refused = lane.report.name == MTP_LANE and verdict.bypass
            if lane.report.name in lanes and not refused:
                yield worker, lane


def _speculates(lane: LaneView) -> bool:
    report = lane.report
    return report.name == MTP_LANE and report.mtp_enabled and report.head_healthy


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    if bypass:
        return bypass[0].value
    return ELIGIBLE if _speculates(lane) else BY_POLICY
