"""Render `/v1/status`: every sum is over the last report of every boot; nothing in it is null."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.fleet import Fleet
from gateway.member import Member
from gateway.store import Key, add_lanes
from policies.document import PolicyDocument
from policies.pools import Pool
from workers.adapters.report import LaneReport, WorkerReport, mtp_block


def render(
    *,
    gateway: Mapping[str, Any],
    store: Mapping[str, Any],
    policy: PolicyDocument,
    edits: Mapping[str, Any],
    fleet: Fleet,
    in_line: Mapping[str, int],
    in_flight: Mapping[str, int],
    reports: tuple[WorkerReport, ...],
    guards: Mapping[str, int],
    prefixes: Mapping[str, int],
    counts: Mapping[Key, int],
    latencies: Mapping[str, Any],
) -> dict[str, Any]:
    """Put the state of the whole line into one JSON object."""
    members = {member.report.worker_id: member for member in fleet.members()}
    served = {model for member in members.values() for model in member.models}
    models = sorted({report.model for report in reports} | served)
    worker_ids = sorted({report.worker_id for report in reports})
    return {
        "gateway": dict(gateway),
        "store": dict(store),
        "policy": dict(edits),
        "mtp": mtp_block(_lanes(reports)),
        "decisions": _decisions(counts),
        "outcomes": _under(counts, "outcomes"),
        "errors": _under(counts, "errors"),
        "retries": counts.get(("retries",), 0),
        **guards,
        "prefix": {"hit": 0, "miss": 0, "none": 0, **_under(counts, "prefix"), **prefixes},
        "latency": dict(latencies),
        "pools": {
            name: _pool(
                fleet,
                name,
                pool,
                _lanes_of(name, pool, reports, members),
                in_line=in_line[name],
                in_flight=in_flight[name],
            )
            for name, pool in policy.pools.items()
        },
        "models": {
            model: {
                "mtp": mtp_block(_lanes(r for r in reports if r.model == model)),
                "tokens": _tokens(counts, model),
                "workers": sorted(
                    m.report.worker_id for m in members.values() if model in m.models
                ),
            }
            for model in models
        },
        "workers": {
            name: _worker(
                fleet, members.get(name), tuple(r for r in reports if r.worker_id == name)
            )
            for name in worker_ids
        },
    }


def worker_state(fleet: Fleet, member: Member | None) -> str:
    """Name the state of a worker in one word."""
    if member is None:
        return "gone"
    found = (
        ("draining", member.report.draining),
        ("starting", not member.report.ready),
        ("cordoned", member.cordoned),
        ("ejected", fleet.ejected_for_s(member) > 0),
        ("busy", fleet.busy_for_s(member) > 0),
        ("probation", member.breaker.at_a_time is not None),
    )
    return next((state for state, holds in found if holds), "ready")


def _worker(
    fleet: Fleet, member: Member | None, reports: tuple[WorkerReport, ...]
) -> dict[str, Any]:
    latest = member.report if member else reports[-1]
    told: dict[str, Any] = {
        "state": worker_state(fleet, member),
        "model": latest.model,
        "labels": list(latest.labels),
        "boots": len(reports),
        "mtp": mtp_block(_lanes(reports)),
        "lanes": {lane.name: _lane(lane, member) for lane in _summed(reports)},
    }
    if member is not None:
        told |= {
            "boot_id": latest.boot_id,
            "context_tokens": latest.context_tokens,
            "memory_bytes": latest.memory_bytes,
            "snapshot_bytes": latest.snapshot_bytes,
            "last_beat_s_ago": round(fleet.age_s(member), 3),
        }
        if for_s := fleet.ejected_for_s(member):
            breaker = member.breaker
            told["ejected"] = {
                "for_s": round(for_s, 3),
                "why": breaker.why,
                "times": breaker.ejections,
            }
        if for_s := fleet.busy_for_s(member):
            told["busy_for_s"] = round(for_s, 3)
    return told


def _lane(lane: LaneReport, member: Member | None) -> dict[str, Any]:
    """Tell how busy a lane is now, and what it did over all boots."""
    return {
        "slots": lane.slots if member else 0,
        "running": lane.running if member else 0,
        "waiting": lane.waiting if member else 0,
        "in_flight": member.in_flight[lane.name] if member else 0,
        "requests": lane.requests,
        "prompt_tokens": lane.prompt_tokens,
        "completion_tokens": lane.completion_tokens,
        "prefix": lane.prefix.model_dump(),
        "mtp": mtp_block((lane,)),
    }


def _pool(
    fleet: Fleet,
    name: str,
    pool: Pool,
    lanes: tuple[LaneReport, ...],
    *,
    in_line: int,
    in_flight: int,
) -> dict[str, Any]:
    """Tell how busy a pool is now, and what its lanes did over all boots."""
    live = fleet.lanes(name, pool)
    open_to_requests = [(member, lane) for member, lane in live if fleet.opens(member)]
    return {
        "lanes": list(pool.lanes),
        "workers": sorted({member.report.worker_id for member, _ in open_to_requests}),
        "slots": pool.bounded(sum(lane.slots for _, lane in open_to_requests)),
        "running": sum(lane.running for _, lane in live),
        # In this gateway's line and, where other gateways send too, at the workers.
        "waiting": in_line + sum(lane.waiting for _, lane in live),
        "in_flight": in_flight,
        "requests": sum(lane.requests for lane in lanes),
        "prompt_tokens": sum(lane.prompt_tokens for lane in lanes),
        "completion_tokens": sum(lane.completion_tokens for lane in lanes),
        "mtp": mtp_block(lanes),
    }


def _lanes_of(
    name: str,
    pool: Pool,
    reports: tuple[WorkerReport, ...],
    members: Mapping[str, Member],
) -> tuple[LaneReport, ...]:
    """List the reports of the lanes of a pool, those of workers that are gone too."""
    models = {worker_id: member.models for worker_id, member in members.items()}
    return tuple(
        lane
        for report in reports
        if pool.takes(report.labels, models.get(report.worker_id, (report.model,)))
        for lane in report.lanes
        if lane.name == name or lane.name in pool.lanes
    )


def _summed(reports: Iterable[WorkerReport]) -> tuple[LaneReport, ...]:
    """Add up each lane over the boots of one worker; what is no count is the last boot's."""
    by_name: dict[str, LaneReport] = {}
    for lane in _lanes(reports):
        kept = by_name.get(lane.name)
        by_name[lane.name] = lane if kept is None else add_lanes(kept, lane)
    return tuple(by_name.values())


def _lanes(reports: Iterable[WorkerReport]) -> tuple[LaneReport, ...]:
    return tuple(lane for report in reports for lane in report.lanes)


def _decisions(counts: Mapping[Key, int]) -> dict[str, Any]:
    by: dict[str, dict[str, int]] = {"pools": {}, "routes": {}, "reasons": {}}
    total = 0
    for key, count in sorted(counts.items()):
        match key:
            case ("decisions", pool, route, reason):
                total += count
                for kind, name in (("pools", pool), ("routes", route), ("reasons", reason)):
                    by[kind][name] = by[kind].get(name, 0) + count
    return {"total": total, **by, "bypass_counts": _under(counts, "bypass")}


def _tokens(counts: Mapping[Key, int], model: str) -> dict[str, int]:
    kinds = ("prompt", "completion", "cached")
    return {kind: counts.get(("tokens", model, kind), 0) for kind in kinds}


def _under(counts: Mapping[Key, int], first: str) -> dict[str, int]:
    """List the counts of one family by their second name."""
    return {key[1]: count for key, count in sorted(counts.items()) if key[0] == first}
