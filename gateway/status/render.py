"""Render `/v1/status`: every sum is over the last report of every boot; nothing in it is null.

What happened in a window, for any part of the fleet: the `recent` blocks of `/v1/status`.

What lanes did, added up over workers and over the boots of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from gateway.errors import FieldInvalid
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.worker import WorkerState
from gateway.status import model as told
from gateway.storage.counters import CounterKey, sum_lanes
from gateway.telemetry.stats import (
    EMPTY,
    MAX_WINDOW_S,
    SNAPSHOT_INTERVAL_S,
    Buckets,
    LaneKey,
    LaneTotals,
    SnapshotHistory,
    percentile,
    sum_totals,
)
from policies.document import PolicyDocument
from policies.sections import Pool
from workers.protocol import LaneReport, PrefixCounts, TimeSaved, WorkerReport, mtp_block

DEFAULT_WINDOW = "5m"
_WINDOW = re.compile(r"([1-9][0-9]{0,4})(s|m)")
_SECONDS = {"s": 1.0, "m": 60.0}


def window_s(text: str) -> float:
    """Read a window, as 90s or 5m; raise `FieldInvalid` for what is none, or is not kept."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not SNAPSHOT_INTERVAL_S <= seconds <= MAX_WINDOW_S:
        raise FieldInvalid(
            f"'window' must be between {SNAPSHOT_INTERVAL_S:.0f}s and {MAX_WINDOW_S / 60:.0f}m, "
            "for example 90s or 5m.",
            param="window",
        )
    return seconds


class Recently:
    """One window up to now; all that it tells is of the same two moments."""

    def __init__(self, history: SnapshotHistory, asked_s: float) -> None:
        now = history.take_snapshot()
        self._steps = history.window(now, asked_s)
        self._now_s = now.at_s
        self._seconds = now.at_s - self._steps[0].at_s
        self._places = now.minus(self._steps[0])
        self._everywhere = now.all_lanes.minus(self._steps[0].all_lanes)
        self.window = told.Window(
            asked_s=asked_s, covered_s=round(self._seconds, 3), longest_s=MAX_WINDOW_S
        )

    def of_all(self, mtp: told.Mtp) -> told.Recent:
        """Tell what all requests came to; `mtp` is of all lanes."""
        return self._recent(self._everywhere, mtp)

    def of(self, chosen: Callable[[LaneKey], bool], mtp: told.Mtp) -> told.Recent:
        """Tell what the requests of these places came to; `mtp` is of the lanes there."""
        places = (one for place, one in self._places.items() if chosen(place))
        return self._recent(sum_totals(places), mtp)

    def _recent(self, figures: LaneTotals, mtp: told.Mtp) -> told.Recent:
        return told.Recent(
            requests=figures.requests,
            failed=figures.failed,
            prompt_tokens=figures.prompt_tokens,
            completion_tokens=figures.completion_tokens,
            cached_tokens=figures.cached_tokens,
            tokens_per_s=_a_second(figures.completion_tokens, self._seconds),
            first_token_s=_spread(figures.first_token_s),
            token_s=_spread(figures.token_s),
            request_tokens_per_s=_speeds(figures.token_s),
            wait_s=_spread(figures.wait_s),
            answer_s=_spread(figures.answer_s),
            reasons=dict(sorted(figures.reasons.items())),
            prefix=told.PrefixResults(
                hit=figures.prefix.get("hit", 0),
                miss=figures.prefix.get("miss", 0),
                none=figures.prefix.get("none", 0),
            ),
            mtp=_drafts(figures, mtp),
        )

    def added_s(self) -> told.Percentiles:
        """Tell what this gateway itself added to requests."""
        return _spread(self._everywhere.added_s)

    def history(self) -> tuple[told.Point, ...]:
        """Tell of the window step by step, oldest first."""
        points = []
        for then, now in pairwise(self._steps):
            figures = now.all_lanes.minus(then.all_lanes)
            seconds = now.at_s - then.at_s
            points.append(
                told.Point(
                    ago_s=round(self._now_s - now.at_s, 3),
                    seconds=round(seconds, 3),
                    requests=figures.requests,
                    tokens_per_s=_a_second(figures.completion_tokens, seconds),
                    first_token_s=_spread(figures.first_token_s),
                    answer_s=_spread(figures.answer_s),
                    drafts=figures.drafts,
                    attempted=figures.drafted,
                    accepted=figures.accepted,
                    acceptance_rate=_share(figures.accepted, figures.drafted),
                )
            )
        return tuple(points)


def _drafts(figures: LaneTotals, mtp: told.Mtp) -> told.Mtp:
    """Tell what drafting did, as the workers' answers said."""
    lanes = mtp if isinstance(mtp, told.MtpOn) else None
    if lanes is None and not figures.drafts:
        return told.MtpOff(enabled=False)
    longest = max(figures.histogram, default=0)
    if lanes is not None:
        longest = max(longest, lanes.requested_draft_tokens)
    by_accepted = [figures.histogram.get(count, 0) for count in range(longest + 1)]
    return told.MtpOn(
        enabled=True,
        requested_draft_tokens=lanes.requested_draft_tokens if lanes else longest,
        effective_draft_tokens=lanes.effective_draft_tokens if lanes else longest,
        drafts=figures.drafts,
        attempted=figures.drafted,
        accepted=figures.accepted,
        rejected=figures.drafted - figures.accepted,
        errors=0,
        acceptance_rate=_share(figures.accepted, figures.drafted),
        mean_acceptance_length=1.0 + (figures.accepted / figures.drafts if figures.drafts else 0.0),
        acceptance_rate_per_position=tuple(
            _share(sum(by_accepted[position + 1 :]), figures.drafts) for position in range(longest)
        ),
        bypass_counts=dict(sorted(figures.bypass.items())),
    )


def _spread(counts: Buckets) -> told.Percentiles:
    if counts is EMPTY:
        return _NO_VALUES
    return told.Percentiles(
        count=sum(counts), p50=percentile(counts, 0.5), p95=percentile(counts, 0.95)
    )


def _speeds(token_s: Buckets) -> told.Percentiles:
    """Turn seconds a token into tokens a second: who is fastest took the least time."""
    slow_s, fast_s = percentile(token_s, 0.5), percentile(token_s, 0.05)
    return told.Percentiles(count=sum(token_s), p50=_a_second(1, slow_s), p95=_a_second(1, fast_s))


def _a_second(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole else 0.0


_NO_VALUES = told.Percentiles(count=0, p50=0.0, p95=0.0)


def as_of_now(
    reports: Iterable[WorkerReport], members: Mapping[str, WorkerState]
) -> tuple[WorkerReport, ...]:
    """Leave of boots that are over their counts alone, and put them before those that live."""
    live, over = [], []
    for report in reports:
        member = members.get(report.worker_id)
        if member is not None and member.report.boot_id == report.boot_id:
            live.append(report)
        else:
            lanes = tuple(_over(lane) for lane in report.lanes)
            over.append(report.model_copy(update={"lanes": lanes}))
    return (*over, *live)


def _over(lane: LaneReport) -> LaneReport:
    nothing = ("slots", "running", "waiting", "requested_draft_tokens", "effective_draft_tokens")
    return lane.model_copy(update=dict.fromkeys(nothing, 0))


def lanes_of(reports: Iterable[WorkerReport]) -> tuple[LaneReport, ...]:
    """List the lanes of these boots."""
    return tuple(lane for report in reports for lane in report.lanes)


def lanes_of_pool(
    name: str,
    pool: Pool,
    reports: Iterable[WorkerReport],
    members: Mapping[str, WorkerState],
) -> tuple[LaneReport, ...]:
    """List the lanes of a pool, those of workers that are gone too."""
    models = {worker_id: member.models for worker_id, member in members.items()}
    return tuple(
        lane
        for report in reports
        if pool.takes(report.labels, models.get(report.worker_id, (report.model,)))
        for lane in report.lanes
        if lane.name == name or lane.name in pool.lanes
    )


def mtp_of(lanes: tuple[LaneReport, ...]) -> told.Mtp:
    """Tell what drafting did on these lanes."""
    block = mtp_block(lanes)
    if not block["enabled"]:
        return told.MtpOff(enabled=False)
    return told.MtpOn.model_validate(block)


def saved_by(lanes: Iterable[LaneReport]) -> told.Saved:
    """Tell what drafting and kept system prompts saved on these lanes."""
    lanes = tuple(lanes)
    time = sum((lane.time_saved for lane in lanes), TimeSaved())
    return told.Saved(
        decode_steps=sum(lane.speculation.accepted for lane in lanes),
        decode_s=time.decode_ms / 1000,
        prompt_tokens=sum(lane.prefix.cached_tokens for lane in lanes),
        prompt_s=time.prefill_ms / 1000,
    )


def prefix_of(lanes: Iterable[LaneReport]) -> told.LanePrefix:
    """Tell what was found of system prompts on these lanes."""
    total = sum((lane.prefix for lane in lanes), PrefixCounts())
    return told.LanePrefix(hits=total.hits, misses=total.misses, cached_tokens=total.cached_tokens)


class Around(NamedTuple):
    """What is told of the gateway itself and of what it stands on."""

    unix_s: float
    gateway: told.GatewayStatus
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
    fleet: WorkerRegistry,
    in_line: Callable[[str], int],
    in_flight: Callable[[str], int],
    reports: tuple[WorkerReport, ...],
    counts: Mapping[CounterKey, int],
    recently: Recently,
) -> told.Status:
    """Put the state of the whole line into one record; all of it is read in one go."""
    members = {member.report.worker_id: member for member in fleet.workers()}
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


def worker_state(fleet: WorkerRegistry, member: WorkerState | None) -> told.WorkerState:
    """Name the state of a worker in one word."""
    if member is None:
        return "gone"
    found: tuple[tuple[told.WorkerState, bool], ...] = (
        ("draining", member.report.draining),
        ("starting", not member.report.ready),
        ("cordoned", member.cordoned),
        ("ejected", fleet.ejected_for_s(member) > 0),
        ("busy", fleet.busy_for_s(member) > 0),
        ("probation", member.breaker.probation_limit is not None),
    )
    return next((state for state, holds in found if holds), "ready")


def _worker(
    fleet: WorkerRegistry,
    member: WorkerState | None,
    reports: tuple[WorkerReport, ...],
    recently: Recently,
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
        prefix_cache_bytes=latest.prefix_cache_bytes if member else 0,
        last_beat_s_ago=round(max(0.0, fleet.heartbeat_age_s(member)), 3) if member else 0.0,
        ejected=_ejection(fleet, member),
        busy_for_s=round(fleet.busy_for_s(member), 3) if member else 0.0,
        lanes={lane.name: _lane(lane, member, worker_id, recently) for lane in sum_lanes(lanes)},
        prefix=prefix_of(lanes),
        saved=saved_by(lanes),
        mtp=mtp,
        recent=recently.of(lambda place: place.worker_id == worker_id, mtp),
    )


def _ejection(fleet: WorkerRegistry, member: WorkerState | None) -> told.Ejection:
    for_s = fleet.ejected_for_s(member) if member else 0.0
    if member is None or not for_s:
        return told.Ejection(for_s=0.0, why="", times=0)
    breaker = member.breaker
    return told.Ejection(for_s=round(for_s, 3), why=breaker.reason, times=breaker.ejections)


def _lane(
    lane: LaneReport, member: WorkerState | None, worker_id: str, recently: Recently
) -> told.Lane:
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
    fleet: WorkerRegistry,
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
    live = fleet.pool_lanes(name, pool)
    open_to_requests = [(member, lane) for member, lane in live if fleet.is_available(member)]
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
    members: Iterable[WorkerState],
    counts: Mapping[CounterKey, int],
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


def _decisions(counts: Mapping[CounterKey, int]) -> told.Decisions:
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


def _decisions_of(counts: Mapping[CounterKey, int], pool: str) -> dict[str, int]:
    """List the decisions for one pool by their reason."""
    found: dict[str, int] = {}
    for key, count in sorted(counts.items()):
        if key[:2] == ("decisions", pool):
            found[key[3]] = found.get(key[3], 0) + count
    return found


def _under(counts: Mapping[CounterKey, int], first: str) -> dict[str, int]:
    """List the counts of one family by their second name."""
    return {key[1]: count for key, count in sorted(counts.items()) if key[0] == first}
