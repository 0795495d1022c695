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

    Among equals the order is `rng`'s, so that one seed always gives one decision.
    """
    verdict = judge(policy, profile)
    workers = [worker for worker in fleet.workers if worker.model == profile.model]
    bypass = verdict.bypass
    if not bypass and not any(_speculates(lane) for worker in workers for lane in worker.lanes):
        bypass = (Bypass.NO_MTP_WORKER,)
    candidates: list[Candidate] = []
    for pool in verdict.route.to:
        lanes = policy.pools[pool].lanes
        ranked = sorted(
            _open_lanes(workers, lanes, verdict),
            key=lambda found: (found[1].load, found[0].load, rng.random()),
        )
        candidates += [
            Candidate(
                pool=pool,
                lane=lane.report.name,
                worker_id=worker.worker_id,
                reason=_reason(lane, bypass),
                load=lane.load,
            )
            for worker, lane in ranked
        ]
    return Decision(route=verdict.route.name, bypass=bypass, candidates=tuple(candidates))


def _open_lanes(
    workers: Iterable[WorkerView], lanes: tuple[str, ...], verdict: Verdict
) -> Iterable[tuple[WorkerView, LaneView]]:
    for worker in workers:
        for lane in worker.lanes:
            if lane.report.name not in lanes:
                continue
            # Whatever a policy says, the speculative lane only takes what it can do.
            if lane.report.name != MTP_LANE or (_speculates(lane) and not verdict.bypass):
                yield worker, lane


def _speculates(lane: LaneView) -> bool:
    return lane.report.name == MTP_LANE and lane.report.mtp_enabled


def _reason(lane: LaneView, bypass: tuple[Bypass, ...]) -> str:
    if bypass:
        return bypass[0].value
    return ELIGIBLE if lane.report.name == MTP_LANE else BY_POLICY
