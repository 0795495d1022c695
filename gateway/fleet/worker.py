"""One worker of the registry, and the lease of one of its slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.engines.base import Engine
from gateway.fleet.circuit_breaker import HEALTHY, CircuitBreaker
from gateway.routing.load_cost import Throughput, throughput_of
from gateway.routing.select import Candidate
from gateway.routing.view import WorkerView
from gateway.types import WorkerBoot
from paceline.protocol import WorkerReport

HEARTBEAT_TIMEOUT_S = 7.0
"""Three missed heartbeats: a worker that dies is out of the fleet within ten seconds."""
_RIVAL_SHOWN_S = 600.0
_RIVAL = "Another worker has started with the same id, and gets no requests: give it another --id."


@dataclass(slots=True, eq=False)
class WorkerState:
    """State of one boot of one worker; only `WorkerRegistry` changes it."""

    report: WorkerReport
    heartbeat_at_s: float
    backend: Engine
    clock: Callable[[], float]
    """Monotonic seconds."""
    cordoned: bool
    """An admin has stopped new requests."""
    breaker: CircuitBreaker = HEALTHY
    in_flight: Counter[str] = field(default_factory=Counter)
    """Requests of this gateway, by lane."""
    probation_requests: int = 0
    """Requests sent since the last ejection that are not answered yet."""
    probing: bool = False
    """One request tests whether the worker is still busy."""
    local_heartbeat_at_s: float = float("-inf")
    """Time of the last heartbeat that this gateway received itself."""
    local: bool = False
    """The worker sends its heartbeats to this gateway, as far as is known."""
    confirmed: bool = False
    """A gateway has reached the worker at its URL."""
    arrived: bool = False
    """Its arrival is in the log."""
    away_s: float = 0.0
    """How long it was gone before this boot, or within it; 0: not at all."""
    problem: str = ""
    """Why this gateway cannot reach the worker; empty if it can, as far as is known."""
    rival_at_s: float = float("-inf")
    """When another worker last asked for its id."""
    peak_in_flight: dict[str, int] = field(default_factory=dict)
    """Most requests of this gateway since the last report, by lane."""
    remote_requests: dict[str, int] = field(default_factory=dict)
    """Requests of other gateways by the last report, by lane."""
    prefill_until_s: float = 0.0
    """Estimated time at which it finishes the prefill of the prompts that it has."""
    pending_prefill_s: float = 0.0
    """Estimated prefill time of this gateway's unanswered requests."""
    answered_at_s: float = 0.0
    """Time of the last answer to this gateway, or of the first heartbeat."""
    throughput: Throughput = field(init=False)
    slots: dict[str, int] = field(default_factory=dict)
    """By lane, by the last report."""
    models: tuple[str, ...] = ()
    """The models that it serves, by the last report."""
    eligibility: tuple[object, ...] = ()
    """Its eligibility for requests, by the last report."""
    view: WorkerView = field(init=False)

    def __post_init__(self) -> None:
        self.answered_at_s = self.prefill_until_s = self.heartbeat_at_s
        self.update(self.report)

    def update(self, report: WorkerReport) -> None:
        """Replace the report and compute the values that decisions read."""
        self.report = report
        self.throughput = throughput_of(report)
        self.slots = {lane.name: max(1, lane.slots) for lane in report.lanes}
        self.models, by_model = self.backend.models(report)
        tells_system = report.system_inside is not None
        of_worker = report.ready, report.draining, report.labels, tells_system
        lanes = [(lane.name, lane.mtp_enabled, lane.head_healthy) for lane in report.lanes]
        eligibility = (*of_worker, lanes, self.models, by_model)
        if eligibility != self.eligibility:
            self.eligibility = eligibility
            self.view = WorkerView.of(
                report.worker_id,
                self.models,
                report.lanes,
                report.labels,
                report.boot_id,
                by_model=by_model,
                tells_system=tells_system,
            )
        if not self.backend.sends_reports:
            return
        pending_tokens = 0
        for lane in report.lanes:
            pending_tokens += lane.pending_prefill_tokens
            in_flight = self.in_flight[lane.name]
            # A report is older than the requests sent and answered since, so only rows that were
            # at no time since the previous report this gateway's are other gateways'.
            peak = max(in_flight, self.peak_in_flight.get(lane.name, 0))
            self.remote_requests[lane.name] = max(0, lane.running + lane.waiting - peak)
            self.peak_in_flight[lane.name] = in_flight
        self.prefill_until_s = self.clock() + pending_tokens * self.throughput.prefill_token_s

    def add_request(self, lane: str, prefill_s: float) -> None:
        """Count a request that is about to be sent, and its prefill."""
        in_flight = self.in_flight[lane] = self.in_flight.get(lane, 0) + 1
        if in_flight > self.peak_in_flight.get(lane, 0):
            self.peak_in_flight[lane] = in_flight
        if prefill_s:
            self.pending_prefill_s += prefill_s
            self.prefill_until_s = max(self.prefill_until_s, self.clock()) + prefill_s

    def remove_request(self, lane: str, prefill_s: float) -> None:
        """Remove a request that has ended, and its prefill."""
        self.in_flight[lane] -= 1
        self.pending_prefill_s -= prefill_s
        self.prefill_until_s = min(self.prefill_until_s, self.clock() + self.pending_prefill_s)

    @property
    def heartbeat_age_s(self) -> float:
        """Return the time since the last heartbeat."""
        return self.clock() - self.heartbeat_at_s

    @property
    def is_live(self) -> bool:
        """Return whether the last heartbeat is recent."""
        return self.heartbeat_age_s <= HEARTBEAT_TIMEOUT_S

    @property
    def ejected_for_s(self) -> float:
        """Return how long it stays ejected; 0 if it is not."""
        return max(0.0, self.breaker.ejected_until_s - self.clock())

    @property
    def busy_for_s(self) -> float:
        """Return how long it stays busy by its own Retry-After; 0 if it is not."""
        return max(0.0, self.breaker.busy_until_s - self.clock())

    @property
    def reported_requests(self) -> int:
        """Return how many requests it has as of its last report, whoever sent them.

        Engines without reports, and workers that are silent for too long, have 0.
        """
        if not self.backend.sends_reports or not self.is_live:
            return 0
        return sum(lane.running + lane.waiting for lane in self.report.lanes)

    @property
    def has_rival(self) -> bool:
        """Return whether another worker has asked for its id lately."""
        return self.clock() - self.rival_at_s < _RIVAL_SHOWN_S

    @property
    def trouble(self) -> str:
        """Return the advice for an admin; empty if it needs no action."""
        return self.problem or (_RIVAL if self.has_rival else "")

    @property
    def accepting(self) -> bool:
        """Return whether it can be reached, and neither it nor an admin refuses new requests."""
        report = self.report
        return report.ready and not report.draining and not self.cordoned and not self.problem

    def occupied(self, lane: str) -> int:
        """Return how many slots of a lane this gateway's requests occupy."""
        if self.backend.shares_slots:
            return self.in_flight.total()
        return self.in_flight.get(lane, 0)

    def update_view(self) -> WorkerView:
        """Let decisions see its present load."""
        self.view.update(
            self.report.lanes,
            self.occupied,
            remote_requests=self.remote_requests,
            throughput=self.throughput,
            prefill_until_s=self.prefill_until_s,
            answered_at_s=self.answered_at_s,
        )
        return self.view


@dataclass(slots=True, eq=False)
class Lease:
    """One slot of one lane, held by one request from the decision to its last byte."""

    candidate: Candidate
    state: WorkerState
    ejected_at_s: float
    """Time of the worker's last ejection before this request."""
    on_probation: bool
    """The request tests a worker after an ejection."""
    probes: bool = False
    """The request tests whether a worker is still busy."""
    waited_s: float = 0.0
    """Time that the request spent in the queue."""

    @property
    def boot(self) -> WorkerBoot:
        """Return the worker's id and boot."""
        return self.candidate.worker_id, self.state.report.boot_id
