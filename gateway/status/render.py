"""Render `/v1/status`: every sum is over the last report of every boot; nothing in it is null."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from gateway.fleet.registry import Fleet
from gateway.fleet.worker import Member
from gateway.recently import Recently
from gateway.status import model as told
from gateway.status_lanes import (
    as_of_now,
    lanes_of,
    lanes_of_pool,
    mtp_of,
    prefix_of,
    saved_by,
)
from gateway.storage.counters import Key, by_name
from policies.document import PolicyDocument
from policies.pools import Pool
from workers.protocol import LaneReport, WorkerReport


class Around(NamedTuple):
    """What is told of the gateway itself and of what it stands on."""

    unix_s: float
    gateway: told.Gateway
    store: told.Store
    policy: told.Policy
    retries_denied: int
    quarantined: int
    prefixes_known: int
    prefixes_untrue: int


def render(
    *,
    around: Around,
    policy: PolicyDocument,
    fleet: Fleet,
    in_line: Callable[[str], int],
    in_flight: Callable[[str], int],
    reports: tuple[WorkerReport, ...],
    counts: Mapping[Key, int],
    recently: Recently,
) -> told.Status:
    """Put the state of the whole line into one record; all of it is read in one go."""
    members = {member.report.worker_id: member for member in fleet.members()}
    served = {model for member in members.values() for model in member.models}
    models = sorted({report.model for report in reports} | served)
    reports = as_of_now(reports, members)
    lanes = lanes_of(reports)
    mtp = mtp_of(lanes)
    return told.Status(
        unix_s=around.unix_s,
        window=recently.window,
        gateway=around.gateway,
        store=around.store,
        policy=around.policy,
        mtp=mtp,
        saved=saved_by(lanes),
        recent=recently.of_all(mtp),
        history=recently.history(),
        decisions=_decisions(counts),
        outcomes=_under(counts, "outcomes"),
        errors=_under(counts, "errors"),
        retries=counts.get(("retries",), 0),
        retries_denied=around.retries_denied,
        quarantined=around.quarantined,
        prefix=told.FleetPrefix(
            hit=counts.get(("prefix", "hit"), 0),
            miss=counts.get(("prefix", "miss"), 0),
            none=counts.get(("prefix", "none"), 0),
            known=around.prefixes_known,
            untrue=around.prefixes_untrue,
        ),
        pools={
            name: _pool(
                fleet,
                name,
                pool,
                lanes_of_pool(name, pool, reports, members),
                decisions=_decisions_of(counts, name),
                in_line=in_line(name),
                in_flight=in_flight(name),
                recently=recently,
            )
            for name, pool in policy.pools.items()
        },
        models={
            model: _model(
                model,
                lanes_of(report for report in reports if report.model == model),
                members.values(),
                counts,
                recently,
            )
            for model in models
        },
        workers={
            name: _worker(
                fleet,
                members.get(name),
                tuple(report for report in reports if report.worker_id == name),
                recently,
            )
            for name in sorted({report.worker_id for report in reports})
        },
    )


def worker_state(fleet: Fleet, member: Member | None) -> told.WorkerState:
    """Name the state of a worker in one word."""
    if member is None:
        return "gone"
    found: tuple[tuple[told.WorkerState, bool], ...] = (
        ("draining", member.report.draining),
        ("starting", not member.report.ready),
        ("cordoned", member.cordoned),
        ("ejected", fleet.ejected_for_s(member) > 0),
        ("busy", fleet.busy_for_s(member) > 0),
        ("probation", member.breaker.at_a_time is not None),
    )
    return next((state for state, holds in found if holds), "ready")


def _worker(
    fleet: Fleet, member: Member | None, reports: tuple[WorkerReport, ...], recently: Recently
) -> told.Worker:
    latest = member.report if member else reports[-1]
    worker_id = latest.worker_id
    lanes = lanes_of(reports)
    mtp = mtp_of(lanes)
    return told.Worker(
        state=worker_state(fleet, member),
        model=latest.model,
        labels=latest.labels,
        boots=len(reports),
        boot_id=latest.boot_id if member else "",
        context_tokens=latest.context_tokens,
        memory_bytes=latest.memory_bytes if member else 0,
        snapshot_bytes=latest.snapshot_bytes if member else 0,
        last_beat_s_ago=round(max(0.0, fleet.age_s(member)), 3) if member else 0.0,
        ejected=_ejection(fleet, member),
        busy_for_s=round(fleet.busy_for_s(member), 3) if member else 0.0,
        lanes={lane.name: _lane(lane, member, worker_id, recently) for lane in by_name(lanes)},
        prefix=prefix_of(lanes),
        saved=saved_by(lanes),
        mtp=mtp,
        recent=recently.of(lambda place: place.worker_id == worker_id, mtp),
    )


def _ejection(fleet: Fleet, member: Member | None) -> told.Ejection:
    for_s = fleet.ejected_for_s(member) if member else 0.0
    if member is None or not for_s:
        return told.Ejection(for_s=0.0, why="", times=0)
    breaker = member.breaker
    return told.Ejection(for_s=round(for_s, 3), why=breaker.why, times=breaker.ejections)


def _lane(lane: LaneReport, member: Member | None, worker_id: str, recently: Recently) -> told.Lane:
    """Tell how busy a lane is now, and what it did over all boots."""
    mtp = mtp_of((lane,))
    return told.Lane(
        slots=lane.slots,
        running=lane.running,
        waiting=lane.waiting,
        in_flight=member.in_flight[lane.name] if member else 0,
        requests=lane.requests,
        prompt_tokens=lane.prompt_tokens,
        completion_tokens=lane.completion_tokens,
        head_healthy=lane.head_healthy,
        prefix=prefix_of((lane,)),
        saved=saved_by((lane,)),
        mtp=mtp,
        recent=recently.of(
            lambda place: place.worker_id == worker_id and place.lane == lane.name, mtp
        ),
    )


def _pool(
    fleet: Fleet,
    name: str,
    pool: Pool,
    lanes: tuple[LaneReport, ...],
    *,
    decisions: dict[str, int],
    in_line: int,
    in_flight: int,
    recently: Recently,
) -> told.Pool:
    """Tell how busy a pool is now, and what its lanes did over all boots."""
    live = fleet.lanes(name, pool)
    open_to_requests = [(member, lane) for member, lane in live if fleet.opens(member)]
    mtp = mtp_of(lanes)
    return told.Pool(
        lanes=pool.lanes,
        workers=tuple(sorted({member.report.worker_id for member, _ in open_to_requests})),
        slots=pool.bounded(sum(lane.slots for _, lane in open_to_requests)),
        running=sum(lane.running for _, lane in live),
        # In this gateway's line and, where other gateways send too, at the workers.
        waiting=in_line + sum(lane.waiting for _, lane in live),
        in_flight=in_flight,
        requests=sum(lane.requests for lane in lanes),
        prompt_tokens=sum(lane.prompt_tokens for lane in lanes),
        completion_tokens=sum(lane.completion_tokens for lane in lanes),
        decisions=decisions,
        prefix=prefix_of(lanes),
        saved=saved_by(lanes),
        mtp=mtp,
        recent=recently.of(lambda place: place.pool == name, mtp),
    )


def _model(
    model: str,
    lanes: tuple[LaneReport, ...],
    members: Iterable[Member],
    counts: Mapping[Key, int],
    recently: Recently,
) -> told.Model:
    mtp = mtp_of(lanes)
    return told.Model(
        workers=tuple(sorted(one.report.worker_id for one in members if model in one.models)),
        tokens=told.Tokens(
            prompt=counts.get(("tokens", model, "prompt"), 0),
            completion=counts.get(("tokens", model, "completion"), 0),
            cached=counts.get(("tokens", model, "cached"), 0),
        ),
        prefix=prefix_of(lanes),
        saved=saved_by(lanes),
        mtp=mtp,
        recent=recently.of(lambda place: place.model == model, mtp),
    )


def _decisions(counts: Mapping[Key, int]) -> told.Decisions:
    by: dict[str, dict[str, int]] = {"pools": {}, "routes": {}, "reasons": {}}
    total = 0
    for key, count in sorted(counts.items()):
        match key:
            case ("decisions", pool, route, reason):
                total += count
                for kind, name in (("pools", pool), ("routes", route), ("reasons", reason)):
                    by[kind][name] = by[kind].get(name, 0) + count
    return told.Decisions(
        total=total,
        pools=by["pools"],
        routes=by["routes"],
        reasons=by["reasons"],
        bypass_counts=_under(counts, "bypass"),
    )


def _decisions_of(counts: Mapping[Key, int], pool: str) -> dict[str, int]:
    """List the decisions for one pool by their reason."""
    found: dict[str, int] = {}
    for key, count in sorted(counts.items()):
        if key[:2] == ("decisions", pool):
            found[key[3]] = found.get(key[3], 0) + count
    return found


def _under(counts: Mapping[Key, int], first: str) -> dict[str, int]:
    """List the counts of one family by their second name."""
    return {key[1]: count for key, count in sorted(counts.items()) if key[0] == first}
