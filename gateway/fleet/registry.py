"""Registry of live workers: heartbeats, free slots, circuit-breaker state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from gateway.engines.base import Engine
from gateway.engines.paceline import PacelineWorker
from gateway.errors import TooManyWorkers, WorkerIdTaken
from gateway.fleet.circuit_breaker import HEALTHY, AttemptResult, CircuitBreaker
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, Lease, WorkerState
from gateway.routing.select import Candidate
from gateway.routing.view import FleetView
from gateway.state.counters import MAX_WORKERS
from gateway.types import WorkerBoot
from paceline.addresses import is_loopback
from paceline.protocol import CRITICAL_PRESSURE, MAX_SOURCES, LaneReport, NodeSource, WorkerReport
from paceline.request.profile import Sampling
from policies.sections import Pool

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 2.0
"""Interval of heartbeats that the gateway requests."""
MAX_KNOWN_MODELS = 1024
NEVER_S = float("-inf")
NO_WORKERS: frozenset[str] = frozenset()
# After this gateway's event loop has stalled for so long, timeouts prove nothing about workers.
_STALL_S = 1.0
_ABSENCES = {
    "restarting": (logging.WARNING, "its process ended and is being restarted"),
    "silent": (logging.WARNING, "it has sent nothing for {age_s:.0f} s"),
    "left": (logging.INFO, "it signed off"),
}
_TIMEOUTS = frozenset((AttemptResult.TIMED_OUT, AttemptResult.UNREACHABLE))


AbsenceKind = Literal["restarting", "silent", "left"]
"""Why a worker is gone; `restarting`: its process ended, and its supervisor starts it again."""


ABSENCE_LIMIT_S = 86_400.0
"""A worker that is gone is shown for a day."""


class Absence(NamedTuple):
    """Why a worker is gone, and its last report without load."""

    kind: AbsenceKind
    since_s: float
    report: WorkerReport


class WorkerRegistry:
    """Workers by id. One event loop owns it, so it needs no lock.

    `clock` returns monotonic seconds. `jitter` returns numbers in [0, 1) that spread the ends of
    ejections. `on_capacity` is called after each change that may let a queued request run, but not
    by `release`. `backend` is that of workers that send heartbeats.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        known_models: frozenset[str] = frozenset(),
        backend: Engine | None = None,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._static_models = self._known_models = known_models
        self._seen_models: dict[str, None] = {}
        """Models of workers that send heartbeats, including missing workers."""
        self._sampling: dict[str, Sampling] = {}
        """The defaults of each model, as the last of its workers to start reports them."""
        self._logged_full = False
        self.on_capacity: Callable[[], None] = lambda: None
        self._backend = backend or PacelineWorker()
        self._workers: dict[str, WorkerState] = {}
        self._absences: dict[str, Absence] = {}
        """The last workers that are gone; one whose process is started again until it is ready."""
        self._cordoned: frozenset[str] = frozenset()
        self._stalled_until_s = NEVER_S
        self._last_tick_s: float | None = None
        self._view = FleetView.of((), known_models)
        self._view_until_s = NEVER_S
        """When time by itself changes which workers are available; the past after a change."""
        self._changed: set[WorkerState] = set()
        """Workers whose load has changed since the view was taken."""

    def heartbeat(
        self, report: WorkerReport, backend: Engine | None = None, *, reached: bool = False
    ) -> None:
        """Record a heartbeat; raise `WorkerIdTaken` if another live worker has the id.

        Raise `TooManyWorkers` if it is of a further worker. `reached`: the gateway has just got an
        answer at the URL of the report.
        """
        if backend is None:
            self._check_count(report)
        worker = self._record(report, self._clock(), backend)
        if worker is None:
            raise WorkerIdTaken
        worker.local = True
        worker.local_heartbeat_at_s = worker.heartbeat_at_s
        if reached:
            self._set_reached(worker)
        self._log_arrival(worker)

    def needs_call_back(self, report: WorkerReport) -> bool:
        """Return whether the gateway must reach the worker at its URL before its heartbeat counts.

        So it is for a new boot or URL, and after a failed connection. A worker that is not ready
        gets no requests, so it need not be reached. Raise the errors of `heartbeat`.
        """
        self._check_count(report)
        worker = self._workers.get(report.worker_id)
        if worker is not None and _is_taken(worker, report.boot_id, report.url, self._backend):
            raise WorkerIdTaken
        return report.ready and (
            worker is None
            or worker.backend is not self._backend
            or not _same_address(worker.report, report)
            or not worker.confirmed
            or bool(worker.problem)
            or worker.breaker.unreachable
        )

    def check_id(self, worker_id: str, url: str) -> None:
        """Raise `WorkerIdTaken` if a live worker at another URL has this id."""
        worker = self._workers.get(worker_id)
        if worker is not None and _is_taken(worker, "", url, self._backend):
            self.record_rival(worker_id, url)
            raise WorkerIdTaken

    def record_rival(self, worker_id: str, url: str) -> None:
        """Record, and log, that another worker than the live one asks for its id."""
        worker = self._workers[worker_id]
        if not worker.has_rival:
            log.warning("fleet.id_taken worker=%s url=%s", worker_id, url)
        worker.rival_at_s = self._clock()

    def record_unreachable(self, report: WorkerReport, problem: str) -> None:
        """Record a heartbeat of a worker that this gateway cannot reach, for people to see.

        It gets no requests, and the counts of a new one are ignored. A live worker that is reached
        elsewhere stays as it is: nothing proves that the report is its own.
        """
        now_s = self._clock()
        before = worker = self._workers.get(report.worker_id)
        known = worker is not None and _same_address(worker.report, report)
        if worker is not None and not (known or worker.problem) and worker.is_live:
            return
        if before is None or before.problem != problem:
            log.warning("worker.unreachable worker=%s: %s", report.worker_id, problem)
        if worker is not None and known and worker.confirmed:
            worker.heartbeat_at_s = now_s
        else:
            worker = self._record(report.model_copy(update={"lanes": (), "prefixes": ()}), now_s)
            if worker is None:
                return
            worker.confirmed = False
        worker.problem = problem
        self._view_until_s = NEVER_S

    def merge_remote(self, report: WorkerReport, age_s: float) -> bool:
        """Record a heartbeat that another gateway received; return whether it is news."""
        heartbeat_at_s = self._clock() - age_s
        worker = self._workers.get(report.worker_id)
        if age_s > HEARTBEAT_TIMEOUT_S or (
            worker is not None
            and (not worker.backend.sends_reports or heartbeat_at_s <= worker.heartbeat_at_s)
        ):
            return False
        try:
            self._check_count(report)
        except TooManyWorkers:
            return False
        worker = self._record(report, heartbeat_at_s)
        if worker is not None:
            self._log_arrival(worker)
        return worker is not None

    def probe_succeeded(self, report: WorkerReport) -> None:
        """Record a worker's answer to a probe as a heartbeat at this gateway."""
        if self.merge_remote(report, 0.0):
            worker = self._workers[report.worker_id]
            worker.local_heartbeat_at_s = self._clock()
            self._set_reached(worker)

    def update_report(self, report: WorkerReport) -> None:
        """Replace the report of a worker without recording a heartbeat."""
        worker = self._workers.get(report.worker_id)
        if worker is not None and worker.report.boot_id == report.boot_id:
            worker.update(report)
            self._view_until_s = NEVER_S

    def compensate_stall(self, stall_s: float) -> None:
        """Extend all heartbeats by the time for which this gateway's event loop has stalled.

        Call it several times a second with the delay of the call; after the first call, a missing
        call counts as a stall too.
        """
        self._last_tick_s = self._clock()
        if stall_s >= _STALL_S:
            self._stalled_until_s = self._last_tick_s + _STALL_S
            for worker in self._workers.values():
                extended_s = worker.heartbeat_at_s + stall_s
                worker.heartbeat_at_s = min(extended_s, self._last_tick_s)  # never in the future
            self._view_until_s = NEVER_S

    def set_cordoned(self, worker_ids: frozenset[str]) -> None:
        """Cordon these workers, in later boots too, and uncordon all others."""
        self._cordoned = worker_ids
        for worker_id, worker in self._workers.items():
            worker.cordoned = worker_id in worker_ids
        self._announce()

    def remove(self, worker_id: str, *, restarting: bool = False) -> None:
        """Remove a worker that has left, or whose process has ended and is started again."""
        last = self._workers.pop(worker_id, None) or self._absences.get(worker_id)
        if last is not None:
            self.add_absence(last.report, "restarting" if restarting else "left")
        self._announce()

    def add_absence(self, report: WorkerReport, kind: AbsenceKind, age_s: float = 0.0) -> None:
        """Record, and log, that a worker is gone, which is not in the fleet."""
        worker_id = report.worker_id
        before = self._absences.pop(worker_id, None)
        self._absences[worker_id] = Absence(kind, self._clock() - age_s, report.bare())
        if len(self._absences) > MAX_WORKERS:
            del self._absences[next(iter(self._absences))]
        if before is None or before.kind != kind:
            level, why = _ABSENCES[kind]
            why = why.format(age_s=age_s)
            log.log(level, "fleet.lost worker=%s kind=%s: %s", worker_id, kind, why)

    def acquire(self, candidate: Candidate, *, ejected: bool = False) -> Lease | None:
        """Acquire a slot of a lane; return None if all are taken.

        `ejected`: allow an ejected worker too, for as many requests as on probation.
        """
        worker = self._workers.get(candidate.worker_id)
        if worker is None or not self._has_free_slot(worker, candidate.lane, ejected=ejected):
            return None
        worker.add_request(candidate.lane, candidate.prefill_s)
        self._changed.add(worker)
        breaker = worker.breaker
        on_probation = breaker.probation_limit is not None
        worker.probation_requests += on_probation
        worker.probing = probes = breaker.refusals > 0
        return Lease(candidate, worker, breaker.ejected_at_s, on_probation, probes)

    def record_taken(self, lease: Lease) -> None:
        """Record that a worker takes a request, after which others may follow to a busy one."""
        if lease.probes:
            lease.probes = lease.state.probing = False
            self._set_breaker(lease.state, lease.state.breaker.record_taken())

    def release(self, lease: Lease, result: AttemptResult, retry_after_s: float = 0.0) -> None:
        """Release a slot and record the result in the worker's circuit breaker."""
        now_s = self._clock()
        worker = lease.state
        worker.remove_request(lease.candidate.lane, lease.candidate.prefill_s)
        self._changed.add(worker)
        if result is AttemptResult.SUCCEEDED:
            worker.answered_at_s = now_s
            self.record_taken(lease)
            if worker.breaker is HEALTHY:
                return
        elif lease.probes:
            lease.probes = worker.probing = False
        before = after = worker.breaker
        if lease.ejected_at_s != before.ejected_at_s:
            return  # sent before the last ejection, which has taken account of such requests
        if before.probation_limit is not None:
            worker.probation_requests -= 1
        if result is AttemptResult.SUCCEEDED:
            after = before.record_success(now_s, max(worker.slots.values(), default=1))
        elif result is AttemptResult.BUSY:
            after = before.record_busy(now_s, retry_after_s, jitter=self._jitter())
        elif result is AttemptResult.FAILED or (
            result in _TIMEOUTS and not self._is_stalled(now_s)
        ):
            # An ejected worker was asked for lack of another one: no failure of it is news.
            last = before.is_ejected(now_s) or self._is_last(worker)
            after = before.record_failure(now_s, result, last=last, jitter=self._jitter())
        if after.ejected_at_s != before.ejected_at_s:
            worker.probation_requests = 0
        self._set_breaker(worker, after)

    def get(self, worker_id: str) -> WorkerState | None:
        """Return a live worker; None if it is not in the fleet."""
        self._expire()
        return self._workers.get(worker_id)

    def workers(self) -> tuple[WorkerState, ...]:
        """Return all live workers, whether they accept requests or not."""
        self._expire()
        return tuple(self._workers.values())

    def silent_urls(self) -> tuple[str, ...]:
        """Return the URLs of workers whose heartbeats have ceased."""
        self._expire()
        return tuple(one.report.url for one in self._absences.values() if one.kind == "silent")

    def absences(self) -> Mapping[str, Absence]:
        """Return the workers of the last day that are not in the fleet."""
        self._expire()
        return {name: one for name, one in self._absences.items() if name not in self._workers}

    def pool_lanes(self, name: str, pool: Pool) -> tuple[tuple[WorkerState, LaneReport], ...]:
        """Return the lanes of a pool over all live workers."""
        return tuple(
            (worker, lane)
            for worker in self.workers()
            if pool.accepts(worker.report.labels, worker.models)
            for lane in worker.report.lanes
            if lane.name == name or lane.name in pool.lanes
        )

    def view_of_all(self) -> FleetView:
        """Return all workers for decisions, whether they accept requests or not."""
        views = [worker.update_view() for worker in self.workers()]
        return FleetView.of(views, self._known_models, self._sampling)

    def view(self, without: frozenset[str] = NO_WORKERS) -> FleetView:
        """Return the available workers for decisions, except `without`."""
        now_s = self._clock()
        if now_s >= self._view_until_s:
            self._expire()
            workers = self._workers.values()
            timeouts_s = [one.heartbeat_at_s + HEARTBEAT_TIMEOUT_S for one in workers]
            available_s = [one.breaker.available_at_s for one in workers]
            ends_s = *timeouts_s, *(at_s for at_s in available_s if at_s > now_s)
            self._view_until_s = min(ends_s, default=NEVER_S)
            views = [worker.update_view() for worker in workers if self.is_available(worker)]
            self._view = FleetView.of(views, self._known_models, self._sampling)
        else:
            for worker in self._changed:
                worker.update_view()
        self._changed.clear()
        if without:
            rest = [view for name, view in self._view.workers.items() if name not in without]
            return FleetView.of(rest, self._known_models, self._sampling)
        return self._view

    def node_sources(
        self, taker: WorkerState, holders: Iterable[tuple[WorkerBoot, int]]
    ) -> tuple[NodeSource, ...]:
        """Return the holders that can send nodes of their prefix cache to a worker.

        Full, cordoned and draining workers can. Another machine cannot reach an address of this
        one, and nothing travels between a worker with a certificate of the fleet and one without.
        """
        sources, name_of = [], taker.backend.server_name
        certified = bool(name_of(taker.report.worker_id))
        for (worker_id, boot_id), tokens in holders:
            holder = self._workers.get(worker_id)
            if (
                holder is not None
                and holder.report.boot_id == boot_id
                and holder.backend is taker.backend is self._backend
                and holder.is_live
                and not holder.problem
                and (is_local(taker.report) or not is_local(holder.report))
                and bool(name := name_of(worker_id)) is certified
            ):
                url = holder.report.url
                sources.append(NodeSource(url=url, tokens=tokens, server_name=name))
        return tuple(sources[:MAX_SOURCES])

    def is_available(self, worker: WorkerState) -> bool:
        """Return whether a worker gets new requests now."""
        if not worker.accepting or worker.busy_for_s:
            return False
        # An ejected worker is better than none, so the last one of a model stays available.
        return not worker.ejected_for_s or self._is_last(worker)

    def available_in_s(self, model: str) -> float | None:
        """Return when the first ejected or busy worker of a model is available again, if any is."""
        now_s = self._clock()
        waits_s = [
            worker.breaker.available_at_s - now_s
            for worker in self._workers.values()
            if worker.accepting and model in worker.models
        ]
        return min((wait_s for wait_s in waits_s if wait_s > 0), default=None)

    def report_short_of_memory(self, model: str) -> WorkerReport | None:
        """Return the report of a worker of a model that refuses requests for lack of memory."""
        for worker in self._workers.values():
            report = worker.report
            if report.memory_pressure == CRITICAL_PRESSURE and model in worker.models:
                return report
        return None

    def engine_free_in_s(self, model: str, without: Collection[str], at_s: float) -> float | None:
        """Return when the first engine is free that took requests at a time but for being busy.

        None without one. Workers of Paceline do not count: they have their own queue.
        """
        waits_s = [
            worker.busy_for_s
            for worker_id, worker in self._workers.items()
            if worker_id not in without
            and worker.accepting
            and model in worker.models
            and not worker.backend.sends_reports
            and not worker.ejected_for_s
            and worker.breaker.is_busy(at_s)
        ]
        return min(waits_s, default=None)

    def absence(self, worker_id: str) -> tuple[AbsenceKind, float] | None:
        """Return why a worker is gone and for how many seconds; None if that is not known."""
        absence = self._absences.get(worker_id)
        return None if absence is None else (absence.kind, self._clock() - absence.since_s)

    def _log_arrival(self, worker: WorkerState) -> None:
        """Log once that a boot of a worker takes requests."""
        if worker.arrived or not worker.report.ready or worker.problem:
            return
        worker.arrived = True
        place = worker.report.worker_id, worker.report.model, worker.report.url
        if worker.away_s:
            log.info("fleet.returned worker=%s model=%s url=%s away_s=%.0f", *place, worker.away_s)
            return
        log.info("fleet.joined worker=%s model=%s url=%s", *place)

    def _record(
        self, report: WorkerReport, heartbeat_at_s: float, backend: Engine | None = None
    ) -> WorkerState | None:
        """Record a heartbeat; return None, and keep the first, for two live workers with one id.

        A new boot begins without requests or failures; requests of an earlier one count there.
        """
        backend = backend or self._backend
        worker = self._workers.get(report.worker_id)
        if worker is not None and _is_taken(worker, report.boot_id, report.url, backend):
            return None
        if (
            worker is not None
            and worker.backend is backend
            and worker.report.boot_id == report.boot_id
        ):
            before = worker.eligibility
            worker.confirmed &= _same_address(worker.report, report)
            worker.update(report)
            worker.heartbeat_at_s = heartbeat_at_s
            self._changed.add(worker)
            if worker.eligibility != before:
                self._view_until_s = NEVER_S
        else:
            cordoned = report.worker_id in self._cordoned
            worker = WorkerState(report, heartbeat_at_s, backend, self._clock, cordoned)
            self._workers[report.worker_id] = worker
            self._view_until_s = NEVER_S
            self._sampling.pop(report.model, None)
        if backend.sends_reports and report.ready and report.model not in self._sampling:
            self._sampling[report.model] = report.sampling.sampling()
        worker.confirmed |= report.ready
        absence = self._absences.get(report.worker_id)
        if absence is not None and (report.ready or absence.kind != "restarting"):
            del self._absences[report.worker_id]
            worker.away_s = self._clock() - absence.since_s
        if not self._known_models.issuperset(worker.models):
            self._seen_models |= dict.fromkeys(worker.models)
            for model in tuple(self._seen_models)[:-MAX_KNOWN_MODELS]:
                del self._seen_models[model]
                self._sampling.pop(model, None)
            self._known_models = self._static_models | self._seen_models.keys()
        self.on_capacity()
        return worker

    def _set_reached(self, worker: WorkerState) -> None:
        """Record that this gateway reaches a worker again."""
        if not (worker.problem or worker.breaker.unreachable):
            return
        log.info("worker.reached worker=%s", worker.report.worker_id)
        worker.problem = ""
        worker.breaker = worker.breaker.record_connection(self._clock())
        self._announce()

    def _set_breaker(self, worker: WorkerState, breaker: CircuitBreaker) -> None:
        if breaker is not worker.breaker:
            if breaker.refusals and not worker.breaker.refusals:
                pause_s = breaker.busy_until_s - self._clock()
                log.info("worker.busy worker=%s pause_s=%.1f", worker.report.worker_id, pause_s)
            if breaker.ejected_at_s != worker.breaker.ejected_at_s:
                name, reason = worker.report.worker_id, breaker.reason
                log.warning("worker.ejected worker=%s reason=%s", name, reason)
            worker.breaker = breaker
            self._view_until_s = NEVER_S

    def _announce(self) -> None:
        """Let the next decisions see that other workers are available now."""
        self._view_until_s = NEVER_S
        self.on_capacity()

    def _check_count(self, report: WorkerReport) -> None:
        """Raise `TooManyWorkers` if a worker that is not in the fleet would be one too many."""
        if report.worker_id in self._workers or len(self._workers) < MAX_WORKERS:
            return
        self._expire()
        joined = sum(worker.backend.sends_reports for worker in self._workers.values())
        if joined < MAX_WORKERS:
            self._logged_full = False
            return
        if not self._logged_full:
            self._logged_full = True
            log.error("fleet.full workers=%d rejected=%s", joined, report.worker_id)
        raise TooManyWorkers

    def _has_free_slot(self, worker: WorkerState, lane: str, *, ejected: bool) -> bool:
        if worker.occupied(lane) >= worker.slots.get(lane, 0) or worker.cordoned:
            return False
        breaker = worker.breaker
        if breaker is HEALTHY:
            return True
        if breaker.refusals and worker.probing:
            return False
        limit = breaker.probation_limit
        available = self.is_available(worker) or (
            ejected and worker.accepting and not worker.busy_for_s
        )
        return available and (
            limit is None or worker.probation_requests < limit or self._is_last(worker)
        )

    def _is_last(self, worker: WorkerState) -> bool:
        """Return whether no other worker of its models is available."""
        now_s = self._clock()
        return not any(
            other is not worker
            and other.accepting
            and not set(worker.models).isdisjoint(other.models)
            and now_s >= other.breaker.available_at_s
            for other in self._workers.values()
        )

    def _is_stalled(self, now_s: float) -> bool:
        """Return whether the event loop stalls now or did until just before."""
        last_tick_s = now_s if self._last_tick_s is None else self._last_tick_s
        return now_s < self._stalled_until_s or now_s - last_tick_s > _STALL_S

    def _expire(self) -> None:
        """Remove workers without heartbeats, unless this gateway could not receive any."""
        now_s = self._clock()
        if self._is_stalled(now_s):
            return
        for worker_id, worker in tuple(self._workers.items()):
            if not worker.is_live:
                del self._workers[worker_id]
                self.add_absence(worker.report, "silent", worker.heartbeat_age_s)
        for worker_id, absence in tuple(self._absences.items()):
            if now_s - absence.since_s > ABSENCE_LIMIT_S:
                del self._absences[worker_id]


def is_local(report: WorkerReport) -> bool:
    """Return whether only this machine reaches a worker."""
    return is_loopback(urlsplit(report.url).hostname or "")


def speaks_tls(report: WorkerReport) -> bool:
    """Return whether a worker is called over TLS."""
    return report.url.startswith("https://")


def _is_taken(worker: WorkerState, boot_id: str, url: str, backend: Engine) -> bool:
    """Return whether the id of this live worker is not free for a worker of this boot and URL."""
    report = worker.report
    # A heartbeat of the id of a static worker must not get the key of that worker.
    if worker.backend is backend and (report.boot_id == boot_id or report.url == url):
        return False
    return not worker.problem and worker.is_live


def _same_address(one: WorkerReport, other: WorkerReport) -> bool:
    """Return whether two reports of a worker are of one boot at one URL."""
    return (one.boot_id, one.url) == (other.boot_id, other.url)
