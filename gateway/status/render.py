"""Render `/v1/status` from reports of workers, counts, and statistics of a window.

Sums over lanes include the last report of every boot of every worker, so counts survive restarts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from gateway.errors import FieldInvalid
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.worker import WorkerState
from gateway.status.model import (
    Decisions,
    Ejection,
    FleetPrefix,
    GatewayStatus,
    LanePrefix,
    LaneStatus,
    ModelStatus,
    Mtp,
    MtpOff,
    MtpOn,
    Percentiles,
    Point,
    PolicyStatus,
    PoolStatus,
    PrefixResults,
    Recent,
    Savings,
    Status,
    StoreStatus,
    Tokens,
    Window,
    WorkerCondition,
    WorkerStatus,
)
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
_NO_VALUES = Percentiles(count=0, p50=0.0, p95=0.0)


def window_s(text: str) -> float:
    """Parse the length of a window, such as 90s or 5m; raise `FieldInvalid` if out of range."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not SNAPSHOT_INTERVAL_S <= seconds <= MAX_WINDOW_S:
        raise FieldInvalid(
            f"'window' must be between {SNAPSHOT_INTERVAL_S:.0f}s and {MAX_WINDOW_S / 60:.0f}m, "
            "for example 90s or 5m.",
            param="window",
        )
    return seconds


class LocalState(NamedTuple):
    """The parts of the status that only the gateway that answers can fill in."""

    unix_s: float
    gateway: GatewayStatus
    store: StoreStatus
    policy: PolicyStatus
    retries_denied: int
    quarantined_bodies: int
    prefix_index_size: int
    prefix_mispredicted: int


def render_status(
    *,
    local: LocalState,
    policy: PolicyDocument,
    fleet: WorkerRegistry,
    queued: Callable[[str], int],
    in_flight: Callable[[str], int],
    reports: tuple[WorkerReport, ...],
    counts: Mapping[CounterKey, int],
    stats: WindowStats,
) -> Status:
    """Render the complete state without waiting, so that all of it is of one moment.

    `queued` and `in_flight` return the requests of this gateway by the name of a pool.
    """
    workers = {worker.report.worker_id: worker for worker in fleet.workers()}
    served = {model for worker in workers.values() for model in worker.models}
    models = sorted({report.model for report in reports} | served)
    reports = _mark_past_boots(reports, workers)
    lanes = _lanes(reports)
    mtp = mtp_status(lanes)
    return Status(
        unix_s=local.unix_s,
        window=stats.window,
        gateway=local.gateway,
        store=local.store,
        policy=local.policy,
        mtp=mtp,
        savings=_savings(lanes),
        recent=stats.recent(mtp),
        history=stats.history(),
        decisions=_decisions(counts),
        outcomes=_family(counts, "outcomes"),
        errors=_family(counts, "errors"),
        retries=counts.get(("retries",), 0),
        retries_denied=local.retries_denied,
        quarantined_bodies=local.quarantined_bodies,
        prefix=FleetPrefix(
            **_prefix_results(_family(counts, "prefix")),
            index_size=local.prefix_index_size,
            mispredicted=local.prefix_mispredicted,
        ),
        pools={
            name: _pool(
                fleet,
                name,
                pool,
                _pool_lanes(name, pool, reports, workers),
                counts=counts,
                queued=queued(name),
                in_flight=in_flight(name),
                stats=stats,
            )
            for name, pool in policy.pools.items()
        },
        models={
            model: _model(
                model,
                _lanes(report for report in reports if report.model == model),
                workers.values(),
                counts,
                stats,
            )
            for model in models
        },
        workers={
            worker_id: _worker(
                fleet,
                workers.get(worker_id),
                tuple(report for report in reports if report.worker_id == worker_id),
                stats,
            )
            for worker_id in sorted({report.worker_id for report in reports})
        },
    )


def worker_state(fleet: WorkerRegistry, worker: WorkerState | None) -> WorkerCondition:
    """Return the state of a worker in one word; the first that applies."""
    if worker is None:
        return "gone"
    conditions: tuple[tuple[WorkerCondition, bool], ...] = (
        ("draining", worker.report.draining),
        ("starting", not worker.report.ready),
        ("cordoned", worker.cordoned),
        ("ejected", fleet.ejected_for_s(worker) > 0),
        ("busy", fleet.busy_for_s(worker) > 0),
        ("probation", worker.breaker.probation_limit is not None),
    )
    return next((condition for condition, applies in conditions if applies), "ready")


def mtp_status(lanes: tuple[LaneReport, ...]) -> Mtp:
    """Return the sum of the draft counts of these lanes."""
    block = mtp_block(lanes)
    return MtpOn.model_validate(block) if block["enabled"] else MtpOff(enabled=False)


class WindowStats:
    """Statistics of the requests that ended within one window up to now."""

    def __init__(self, history: SnapshotHistory, length_s: float) -> None:
        now = history.take_snapshot()
        self._snapshots = history.window(now, length_s)
        self._now_s = now.at_s
        begin = self._snapshots[0]
        self._seconds = now.at_s - begin.at_s
        self._lanes = now.minus(begin)
        self._all_lanes = now.all_lanes.minus(begin.all_lanes)
        self.window = Window(
            length_s=length_s, coverage_s=round(self._seconds, 3), max_length_s=MAX_WINDOW_S
        )

    @property
    def added_latency_s(self) -> Percentiles:
        """The latency that this gateway added to requests."""
        return _percentiles(self._all_lanes.added_latency_s)

    def recent(self, mtp: Mtp, matches: Callable[[LaneKey], bool] | None = None) -> Recent:
        """Return the sum over the matching lanes (default: all); `mtp` holds their draft counts."""
        totals = self._all_lanes
        if matches is not None:
            totals = sum_totals(lane for key, lane in self._lanes.items() if matches(key))
        return Recent(
            requests=totals.requests,
            failures=totals.failures,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            cached_tokens=totals.cached_tokens,
            tokens_per_s=_rate(totals.completion_tokens, self._seconds),
            first_token_s=_percentiles(totals.first_token_s),
            token_s=_percentiles(totals.token_s),
            request_tokens_per_s=_speeds(totals.token_s),
            wait_s=_percentiles(totals.wait_s),
            duration_s=_percentiles(totals.duration_s),
            reasons=dict(sorted(totals.reasons.items())),
            prefix=PrefixResults(**_prefix_results(totals.prefix)),
            mtp=_recent_mtp(totals, mtp),
        )

    def history(self) -> tuple[Point, ...]:
        """Return the intervals of the window, oldest first."""
        points = []
        for earlier, later in pairwise(self._snapshots):
            totals = later.all_lanes.minus(earlier.all_lanes)
            interval_s = later.at_s - earlier.at_s
            points.append(
                Point(
                    age_s=round(self._now_s - later.at_s, 3),
                    interval_s=round(interval_s, 3),
                    requests=totals.requests,
                    tokens_per_s=_rate(totals.completion_tokens, interval_s),
                    first_token_s=_percentiles(totals.first_token_s),
                    duration_s=_percentiles(totals.duration_s),
                    drafts=totals.drafts,
                    attempted=totals.drafted,
                    accepted=totals.accepted,
                    acceptance_rate=_share(totals.accepted, totals.drafted),
                )
            )
        return tuple(points)


def _worker(
    fleet: WorkerRegistry,
    worker: WorkerState | None,
    reports: tuple[WorkerReport, ...],
    stats: WindowStats,
) -> WorkerStatus:
    latest = worker.report if worker else reports[-1]
    worker_id = latest.worker_id
    lanes = _lanes(reports)
    return WorkerStatus(
        state=worker_state(fleet, worker),
        model=latest.model,
        labels=latest.labels,
        boots=len(reports),
        boot_id=latest.boot_id if worker else "",
        context_tokens=latest.context_tokens,
        memory_bytes=latest.memory_bytes if worker else 0,
        prefix_cache_bytes=latest.prefix_cache_bytes if worker else 0,
        heartbeat_age_s=round(max(0.0, fleet.heartbeat_age_s(worker)), 3) if worker else 0.0,
        ejection=_ejection(fleet, worker),
        retry_after_s=round(fleet.busy_for_s(worker), 3) if worker else 0.0,
        lanes={lane.name: _lane(lane, worker, worker_id, stats) for lane in sum_lanes(lanes)},
        **_sums(lanes, stats, lambda key: key.worker_id == worker_id),
    )


def _ejection(fleet: WorkerRegistry, worker: WorkerState | None) -> Ejection:
    remaining_s = fleet.ejected_for_s(worker) if worker else 0.0
    if worker is None or not remaining_s:
        return Ejection(remaining_s=0.0, reason="", count=0)
    breaker = worker.breaker
    return Ejection(
        remaining_s=round(remaining_s, 3), reason=breaker.reason, count=breaker.ejections
    )


def _lane(
    lane: LaneReport, worker: WorkerState | None, worker_id: str, stats: WindowStats
) -> LaneStatus:
    return LaneStatus(
        slots=lane.slots,
        running=lane.running,
        waiting=lane.waiting,
        in_flight=worker.in_flight[lane.name] if worker else 0,
        requests=lane.requests,
        prompt_tokens=lane.prompt_tokens,
        completion_tokens=lane.completion_tokens,
        head_healthy=lane.head_healthy,
        **_sums((lane,), stats, lambda key: key.worker_id == worker_id and key.lane == lane.name),
    )


def _pool(
    fleet: WorkerRegistry,
    name: str,
    pool: Pool,
    lanes: tuple[LaneReport, ...],
    *,
    counts: Mapping[CounterKey, int],
    queued: int,
    in_flight: int,
    stats: WindowStats,
) -> PoolStatus:
    """Render a pool; `lanes` are those of all boots of its workers."""
    present = fleet.pool_lanes(name, pool)
    accepting = [(worker, lane) for worker, lane in present if fleet.is_available(worker)]
    return PoolStatus(
        lanes=pool.lanes,
        workers=tuple(sorted({worker.report.worker_id for worker, _ in accepting})),
        slots=pool.usable_slots(sum(lane.slots for _, lane in accepting)),
        running=sum(lane.running for _, lane in present),
        # In the queue of this gateway and, if other gateways send too, at the workers.
        waiting=queued + sum(lane.waiting for _, lane in present),
        in_flight=in_flight,
        requests=sum(lane.requests for lane in lanes),
        prompt_tokens=sum(lane.prompt_tokens for lane in lanes),
        completion_tokens=sum(lane.completion_tokens for lane in lanes),
        decisions=_decisions(counts, name).reasons,
        **_sums(lanes, stats, lambda key: key.pool == name),
    )


def _model(
    model: str,
    lanes: tuple[LaneReport, ...],
    workers: Iterable[WorkerState],
    counts: Mapping[CounterKey, int],
    stats: WindowStats,
) -> ModelStatus:
    return ModelStatus(
        workers=tuple(sorted(one.report.worker_id for one in workers if model in one.models)),
        tokens=Tokens(
            prompt=counts.get(("tokens", model, "prompt"), 0),
            completion=counts.get(("tokens", model, "completion"), 0),
            cached=counts.get(("tokens", model, "cached"), 0),
        ),
        **_sums(lanes, stats, lambda key: key.model == model),
    )


def _sums(
    lanes: tuple[LaneReport, ...], stats: WindowStats, matches: Callable[[LaneKey], bool]
) -> dict[str, Any]:
    """Return the four fields that a worker, a lane, a pool and a model have in common."""
    prefix = sum((lane.prefix for lane in lanes), PrefixCounts())
    mtp = mtp_status(lanes)
    return {
        "prefix": LanePrefix(
            hits=prefix.hits, misses=prefix.misses, cached_tokens=prefix.cached_tokens
        ),
        "savings": _savings(lanes),
        "mtp": mtp,
        "recent": stats.recent(mtp, matches),
    }


def _savings(lanes: tuple[LaneReport, ...]) -> Savings:
    time = sum((lane.time_saved for lane in lanes), TimeSaved())
    return Savings(
        decode_steps=sum(lane.speculation.accepted for lane in lanes),
        decode_s=time.decode_ms / 1000,
        prompt_tokens=sum(lane.prefix.cached_tokens for lane in lanes),
        prompt_s=time.prefill_ms / 1000,
    )


def _recent_mtp(totals: LaneTotals, mtp: Mtp) -> Mtp:
    """Return the draft counts of responses in the window; `mtp` holds those of the reports."""
    reported = mtp if isinstance(mtp, MtpOn) else None
    if reported is None and not totals.drafts:
        return MtpOff(enabled=False)
    longest = max(totals.histogram, default=0)
    if reported is not None:
        longest = max(longest, reported.requested_draft_tokens)
    steps = [totals.histogram.get(accepted, 0) for accepted in range(longest + 1)]
    return MtpOn(
        enabled=True,
        requested_draft_tokens=reported.requested_draft_tokens if reported else longest,
        effective_draft_tokens=reported.effective_draft_tokens if reported else longest,
        drafts=totals.drafts,
        attempted=totals.drafted,
        accepted=totals.accepted,
        rejected=totals.drafted - totals.accepted,
        errors=0,
        acceptance_rate=_share(totals.accepted, totals.drafted),
        mean_acceptance_length=1.0 + _rate(totals.accepted, totals.drafts),
        acceptance_rate_per_position=tuple(
            _share(sum(steps[position + 1 :]), totals.drafts) for position in range(longest)
        ),
        bypass_counts=dict(sorted(totals.bypass.items())),
    )


def _mark_past_boots(
    reports: Iterable[WorkerReport], workers: Mapping[str, WorkerState]
) -> tuple[WorkerReport, ...]:
    """Order past boots before present ones, and set their momentary values to 0."""
    present, past = [], []
    for report in reports:
        worker = workers.get(report.worker_id)
        if worker is not None and worker.report.boot_id == report.boot_id:
            present.append(report)
        else:
            lanes = tuple(_counts_only(lane) for lane in report.lanes)
            past.append(report.model_copy(update={"lanes": lanes}))
    return (*past, *present)


def _counts_only(lane: LaneReport) -> LaneReport:
    gauges = ("slots", "running", "waiting", "requested_draft_tokens", "effective_draft_tokens")
    return lane.model_copy(update=dict.fromkeys(gauges, 0))


def _lanes(reports: Iterable[WorkerReport]) -> tuple[LaneReport, ...]:
    return tuple(lane for report in reports for lane in report.lanes)


def _pool_lanes(
    name: str,
    pool: Pool,
    reports: Iterable[WorkerReport],
    workers: Mapping[str, WorkerState],
) -> tuple[LaneReport, ...]:
    """List the lanes of a pool, including those of workers that are gone."""
    models = {worker_id: worker.models for worker_id, worker in workers.items()}
    return tuple(
        lane
        for report in reports
        if pool.accepts(report.labels, models.get(report.worker_id, (report.model,)))
        for lane in report.lanes
        if lane.name == name or lane.name in pool.lanes
    )


def _decisions(counts: Mapping[CounterKey, int], only_pool: str | None = None) -> Decisions:
    """Sum the decisions for all pools, or for one, by pool, route and reason."""
    pools, routes, reasons = Counter[str](), Counter[str](), Counter[str]()
    for key, count in sorted(counts.items()):
        match key:
            case ("decisions", pool, route, reason) if only_pool in (None, pool):
                pools[pool] += count
                routes[route] += count
                reasons[reason] += count
    return Decisions(
        total=pools.total(),
        pools=pools,
        routes=routes,
        reasons=reasons,
        bypass_counts=_family(counts, "bypass"),
    )


def _family(counts: Mapping[CounterKey, int], family: str) -> dict[str, int]:
    """Return the counts of one family by their label."""
    return {key[1]: count for key, count in sorted(counts.items()) if key[0] == family}


def _prefix_results(counts: Mapping[str, int]) -> dict[str, int]:
    return {result: counts.get(result, 0) for result in ("hit", "miss", "none")}


def _percentiles(buckets: Buckets) -> Percentiles:
    if buckets is EMPTY:
        return _NO_VALUES
    return Percentiles(
        count=sum(buckets), p50=percentile(buckets, 0.5), p95=percentile(buckets, 0.95)
    )


def _speeds(token_s: Buckets) -> Percentiles:
    """Convert seconds per token to tokens per second; the order of the percentiles is reversed."""
    slow_s, fast_s = percentile(token_s, 0.5), percentile(token_s, 0.05)
    return Percentiles(count=sum(token_s), p50=_rate(1, slow_s), p95=_rate(1, fast_s))


def _rate(count: int, per: float) -> float:
    return count / per if per else 0.0


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole else 0.0
