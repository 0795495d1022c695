"""Render `/v1/status` from reports of workers, counts, and statistics of a window.

Sums over lanes include the last report of every boot of every worker, so counts survive restarts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gateway.errors import FieldInvalid
from gateway.fleet.registry import Absence, WorkerRegistry, speaks_tls
from gateway.fleet.worker import WorkerState
from gateway.state.counters import CounterKey, sum_lanes
from gateway.status import model
from gateway.telemetry import engine_counts, stats
from gateway.types import Outcome
from paceline import protocol
from policies.document import PolicyDocument
from policies.sections import Pool

DEFAULT_WINDOW = "5m"
_WINDOW = re.compile(r"([1-9][0-9]{0,4})(s|m)")
_SECONDS = {"s": 1.0, "m": 60.0}
_LANE_FIELDS = set(
    "slots running waiting requests completion_tokens head_healthy pending_prefill_tokens "
    "prefill_tokens_per_s".split()
)
"""The fields of a lane that its report has too."""
_NO_LOAD = dict.fromkeys(
    "slots running waiting pending_prefill_tokens requested_draft_tokens "
    "effective_draft_tokens".split(),
    0,
)
_WORKERS_SHOWN = 4
_PREFIX_RESULTS = ("hit", "miss", "none", "unknown")
_TOKENS = ("prompt", "completion", "cached")
_ERRORS = (Outcome.REFUSED, Outcome.UNSERVED, Outcome.FAILED)
_MINUTE_S = 60.0
_HOUR_S = 3600.0
_NO_VALUES = model.Percentiles(count=0, p50=0.0, p95=0.0)


def window_s(text: str) -> float:
    """Parse the length of a window, such as 90s or 5m; raise `FieldInvalid` if out of range."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not stats.SNAPSHOT_INTERVAL_S <= seconds <= stats.MAX_WINDOW_S:
        raise FieldInvalid(
            f"'window' must be between {stats.SNAPSHOT_INTERVAL_S:.0f}s and "
            f"{stats.MAX_WINDOW_S / 60:.0f}m, for example 90s or 5m.",
            param="window",
        )
    return seconds


@dataclass(kw_only=True)
class FleetRenderer:
    """The fields of the status that the routes, the workers and their counts determine.

    Nothing here waits, so that all of it is of one moment. `queued` and `in_flight` return the
    requests of this gateway by the name of a pool.
    """

    unix_s: float
    policy: PolicyDocument
    fleet: WorkerRegistry
    queued: Callable[[str], int]
    in_flight: Callable[[str], int]
    reports: tuple[protocol.WorkerReport, ...]
    counts: Mapping[CounterKey, int]
    window: WindowStats

    def __post_init__(self) -> None:
        self._workers = {worker.report.worker_id: worker for worker in self.fleet.workers()}
        stored = {report.worker_id for report in self.reports}
        # The counts of a worker that was never reached are not stored, nor those of one that was
        # lost before this gateway started.
        present: dict[str, Absence | WorkerState] = {**self.fleet.absences(), **self._workers}
        known = (*self.reports, *(one.report for id_, one in present.items() if id_ not in stored))
        labels = {report.worker_id: report.labels for report in known}
        counted = [
            report.model_copy(update={"labels": labels.get(report.worker_id, ())})
            for report in engine_counts.engine_reports(self.counts)
        ]
        self.reports = _mark_past_boots((*counted, *known), self._workers)
        self._untold = engine_counts.untold_by_place(self.counts)

    def render(self) -> dict[str, Any]:
        """Return the fields by name."""
        lanes = _lanes(self.reports)
        prefix = sum((lane.prefix for lane in lanes), protocol.PrefixCounts())
        too_large = {"too large": prefix.too_large} if prefix.too_large else {}
        served = {name for worker in self._workers.values() for name in worker.models}
        models = {report.model for report in self.reports} | served
        return {
            "window": model.Window(coverage_s=round(self.window.seconds, 3)),
            "mtp": mtp_status(lanes),
            "savings": _savings(lanes),
            "recent": self.window.recent(),
            "last_minute": model.AnswerCounts(**self.window.answers(_MINUTE_S)),
            "last_hour": model.AnswerCounts(**self.window.answers(_HOUR_S)),
            "history": self.window.history(),
            "decisions": _decisions(self.counts),
            "outcomes": _family(self.counts, "outcomes"),
            "errors": _family(self.counts, "errors"),
            "failovers": self.counts.get(("failovers",), 0),
            "prefix": model.FleetPrefix(
                **{name: self.counts.get(("prefix", name), 0) for name in _PREFIX_RESULTS},
                tokens_by_kind=prefix.tokens_by_kind,
                not_reused=_family(self.counts, "not_reused") | too_large,
            ),
            "pools": {name: self._pool(name, pool) for name, pool in self.policy.pools.items()},
            "models": {name: self._model(name) for name in sorted(models)},
            "workers": {
                worker_id: self._worker(worker_id)
                for worker_id in sorted({report.worker_id for report in self.reports})
            },
        }

    def _pool(self, name: str, pool: Pool) -> model.PoolStatus:
        present = self.fleet.pool_lanes(name, pool)
        accepting = [(worker, lane) for worker, lane in present if self.fleet.is_available(worker)]
        # Of all boots of its workers, those that are gone too.
        members = [report for report in self.reports if self._belongs(report, pool)]
        names = (name, *pool.lanes)
        lanes = tuple(lane for lane in _lanes(members) if lane.name in names)
        ids = {report.worker_id for report in members}
        return model.PoolStatus(
            lanes=pool.lanes,
            workers=tuple(sorted({worker.report.worker_id for worker, _ in accepting})),
            slots=pool.usable_slots(sum(lane.slots for _, lane in accepting)),
            running=sum(lane.running for _, lane in present),
            # In the queue of this gateway and, if other gateways send too, at the workers.
            waiting=self.queued(name) + sum(lane.waiting for _, lane in present),
            in_flight=self.in_flight(name),
            requests=sum(lane.requests for lane in lanes),
            completion_tokens=sum(lane.completion_tokens for lane in lanes),
            mtp=mtp_status(lanes),
            unreported=self._unreported(lambda at: at.worker_id in ids and at.lane in names),
            recent=self.window.recent(name),
        )

    def _belongs(self, report: protocol.WorkerReport, pool: Pool) -> bool:
        worker = self._workers.get(report.worker_id)
        return pool.accepts(report.labels, worker.models if worker else (report.model,))

    def _model(self, name: str) -> model.ModelStatus:
        serving = [one.report.worker_id for one in self._workers.values() if name in one.models]
        tokens = {kind: self.counts.get(("tokens", name, kind), 0) for kind in _TOKENS}
        return model.ModelStatus(
            workers=tuple(sorted(serving)),
            tokens=model.Tokens(**tokens),
            mtp=mtp_status(_lanes(report for report in self.reports if report.model == name)),
        )

    def _worker(self, worker_id: str) -> model.WorkerStatus:
        reports = [report for report in self.reports if report.worker_id == worker_id]
        worker = self._workers.get(worker_id)
        latest = worker.report if worker else reports[-1]
        lanes = _lanes(reports)
        prefix = sum((lane.prefix for lane in lanes), protocol.PrefixCounts())
        age_s = worker.heartbeat_age_s if worker else 0.0
        return model.WorkerStatus(
            state=worker_state(worker),
            problem=worker.trouble if worker else "",
            kind=worker.backend.kind if worker else "",
            tls=speaks_tls(latest),
            model=latest.model,
            models=worker.models if worker else (),
            labels=latest.labels,
            group_size=latest.group_size,
            boots=sum(report.boot_id != engine_counts.BOOT_ID for report in reports),
            context_tokens=latest.context_tokens,
            memory_bytes=latest.memory_bytes if worker else 0,
            prefix_cache_bytes=latest.prefix_cache_bytes if worker else 0,
            prefix_moves=prefix.moves,
            heartbeat_age_s=round(max(0.0, age_s), 3),
            start=_start(worker),
            absence=self._absence(worker_id),
            ejection=_ejection(worker),
            lanes={lane.name: self._lane(lane, worker_id) for lane in sum_lanes(lanes)},
            mtp=mtp_status(lanes),
            savings=_savings(lanes),
            unreported=self._unreported(lambda at: at.worker_id == worker_id),
        )

    def _absence(self, worker_id: str) -> model.Absence:
        absence = self.fleet.absence(worker_id)
        if absence is None:
            return model.Absence(kind="", unix_s=0.0)
        kind, seconds = absence
        return model.Absence(kind=kind, unix_s=round(max(0.0, self.unix_s - seconds), 3))

    def _lane(self, lane: protocol.LaneReport, worker_id: str) -> model.LaneStatus:
        worker = self._workers.get(worker_id)
        place = (worker_id, lane.name)
        return model.LaneStatus(
            **lane.model_dump(include=_LANE_FIELDS),
            in_flight=worker.in_flight[lane.name] if worker else 0,
            mtp=mtp_status((lane,)),
            unreported=self._unreported(lambda at: (at.worker_id, at.lane) == place),
        )

    def _unreported(self, matches: Callable[[engine_counts.LanePlace], bool]) -> model.Unreported:
        """Sum the unreported numbers of the matching lanes of engines."""
        untold = Counter[str]()
        for place, counts in self._untold.items():
            if matches(place):
                untold.update(counts)
        return model.Unreported(**{name: untold[name] for name in model.Unreported.model_fields})


def worker_state(worker: WorkerState | None) -> model.WorkerCondition:
    """Return the state of a worker in one word; the first that applies."""
    if worker is None:
        return "gone"
    conditions: tuple[tuple[model.WorkerCondition, bool], ...] = (
        ("draining", worker.report.draining),
        ("starting", not worker.report.ready),
        ("unreachable", bool(worker.problem)),
        ("cordoned", worker.cordoned),
        ("ejected", worker.ejected_for_s > 0),
        ("busy", worker.busy_for_s > 0),
        ("probation", worker.breaker.probation_limit is not None),
    )
    return next((condition for condition, applies in conditions if applies), "ready")


def mtp_status(lanes: tuple[protocol.LaneReport, ...]) -> model.Mtp:
    """Return the sum of the draft counts of these lanes."""
    block = protocol.mtp_block(lanes)
    return model.MtpOn.model_validate(block) if block["enabled"] else model.MtpOff(enabled=False)


class WindowStats:
    """Statistics of the requests that ended within one window up to now."""

    def __init__(self, history: stats.SnapshotHistory, length_s: float) -> None:
        self._history = history
        self._now = now = history.take_snapshot()
        self._snapshots = history.window(now, length_s)
        begin = self._snapshots[0]
        self.seconds = now.at_s - begin.at_s
        self._lanes = now.minus(begin)
        self._all_lanes = now.all_lanes.minus(begin.all_lanes)

    @property
    def added_latency_s(self) -> model.Percentiles:
        """The latency that this gateway added to requests."""
        return _percentiles(self._all_lanes.added_latency_s)

    def recent(self, pool: str | None = None) -> model.Recent:
        """Return the sum over the lanes of a pool, or over all."""
        totals = self._all_lanes
        if pool is not None:
            totals = stats.sum_totals(lane for key, lane in self._lanes.items() if key.pool == pool)
        return model.Recent(
            requests=totals.requests,
            first_token_s=_percentiles(totals.first_token_s),
            token_s=_percentiles(totals.token_s),
            request_tokens_per_s=_speeds(totals.token_s),
            wait_s=_percentiles(totals.wait_s),
            duration_s=_percentiles(totals.duration_s),
        )

    def answers(self, length_s: float | None = None) -> dict[str, Any]:
        """Count the responses and errors of the window, or of another one up to now."""
        before = self._snapshots[0].outcomes
        if length_s is not None:
            before = self._history.outcomes_before(self._now, length_s)
        counts = {
            outcome: count - before.get(outcome, 0) for outcome, count in self._now.outcomes.items()
        }
        errors = sum(counts[outcome] for outcome in _ERRORS)
        return {"answered": counts[Outcome.COMPLETED] + errors, "errors": errors}

    def history(self) -> tuple[model.Point, ...]:
        """Return the intervals of the window, oldest first."""
        points = []
        for earlier, later in pairwise(self._snapshots):
            totals = later.all_lanes.minus(earlier.all_lanes)
            interval_s = later.at_s - earlier.at_s
            points.append(
                model.Point(
                    age_s=round(self._now.at_s - later.at_s, 3),
                    interval_s=round(interval_s, 3),
                    requests=totals.requests,
                    tokens_per_s=_rate(totals.completion_tokens, interval_s),
                    first_token_s=_percentiles(totals.first_token_s),
                    duration_s=_percentiles(totals.duration_s),
                    attempted=totals.drafted,
                    accepted=totals.accepted,
                )
            )
        return tuple(points)


def _start(worker: WorkerState | None) -> model.StartStatus:
    if worker is None or (progress := worker.report.start) is None:
        return model.StartStatus(description="", elapsed_s=0.0)
    elapsed_s = progress.elapsed_s + max(0.0, worker.heartbeat_age_s)
    return model.StartStatus(description=progress.description, elapsed_s=round(elapsed_s, 1))


def unready_workers(fleet: WorkerRegistry) -> str:
    """Return in one line why no worker takes requests: how far starts are, the states of others."""
    starts, others = [], []
    for worker in fleet.workers():
        if (start := _start(worker)).description:
            progress = f"{start.description}, {start.elapsed_s:.0f} s"
            starts.append(f"{worker.report.worker_id} ({progress})")
        else:
            others.append(f"{worker.report.worker_id} ({worker_state(worker)})")
    others += [f"{name} (gone)" for name, one in fleet.absences().items() if one.kind != "left"]
    known = starts + others
    if not known:
        return "no worker"
    more = f" and {len(known) - _WORKERS_SHOWN} more" if len(known) > _WORKERS_SHOWN else ""
    return f"{'starting' if starts else 'no worker'}: {', '.join(known[:_WORKERS_SHOWN])}{more}"


def _ejection(worker: WorkerState | None) -> model.Ejection:
    remaining_s = worker.ejected_for_s if worker else 0.0
    reason = worker.breaker.reason if worker is not None and remaining_s else ""
    return model.Ejection(remaining_s=round(remaining_s, 3), reason=reason)


def _savings(lanes: tuple[protocol.LaneReport, ...]) -> model.Savings:
    time = sum((lane.time_saved for lane in lanes), protocol.TimeSaved())
    return model.Savings(
        decode_steps=sum(lane.speculation.accepted for lane in lanes),
        decode_s=time.decode_ms / 1000,
        prompt_tokens=sum(lane.prefix.cached_tokens for lane in lanes),
        prompt_s=time.prefill_ms / 1000,
    )


def _mark_past_boots(
    reports: Iterable[protocol.WorkerReport], workers: Mapping[str, WorkerState]
) -> tuple[protocol.WorkerReport, ...]:
    """Order past boots before present ones, and set their momentary values to 0."""
    present, past = [], []
    for report in reports:
        worker = workers.get(report.worker_id)
        if worker is not None and worker.report.boot_id == report.boot_id:
            present.append(report)
        else:
            lanes = tuple(lane.model_copy(update=_NO_LOAD) for lane in report.lanes)
            past.append(report.model_copy(update={"lanes": lanes}))
    return (*past, *present)


def _lanes(reports: Iterable[protocol.WorkerReport]) -> tuple[protocol.LaneReport, ...]:
    return tuple(lane for report in reports for lane in report.lanes)


def _decisions(counts: Mapping[CounterKey, int]) -> model.Decisions:
    """Sum the decisions by route and reason."""
    routes, reasons = Counter[str](), Counter[str]()
    for key, count in sorted(counts.items()):
        match key:
            case ("decisions", _, route, reason):
                routes[route] += count
                reasons[reason] += count
    bypass = _family(counts, "bypass")
    return model.Decisions(
        total=routes.total(), routes=routes, reasons=reasons, bypass_counts=bypass
    )


def _family(counts: Mapping[CounterKey, int], family: str) -> dict[str, int]:
    """Return the counts of one family by their label."""
    return {key[1]: count for key, count in sorted(counts.items()) if key[0] == family}


def _percentiles(buckets: stats.Buckets) -> model.Percentiles:
    if buckets is stats.EMPTY:
        return _NO_VALUES
    return model.Percentiles(
        count=sum(buckets), p50=stats.percentile(buckets, 0.5), p95=stats.percentile(buckets, 0.95)
    )


def _speeds(token_s: stats.Buckets) -> model.Percentiles:
    """Convert seconds per token to tokens per second; the order of the percentiles is reversed."""
    slow_s, fast_s = stats.percentile(token_s, 0.5), stats.percentile(token_s, 0.05)
    return model.Percentiles(count=sum(token_s), p50=_rate(1, slow_s), p95=_rate(1, fast_s))


def _rate(count: int, per: float) -> float:
    return count / per if per else 0.0
