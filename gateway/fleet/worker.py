"""One worker of the registry, and the lease of one of its slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.engines.base import Engine
from gateway.fleet.circuit_breaker import HEALTHY, CircuitBreaker
from gateway.routing.cost import Throughput, throughput_of
from gateway.routing.select import Candidate
from gateway.routing.view import LaneView, ModelView, WorkerView
from gateway.types import WorkerBoot
from paceline.protocol import WorkerReport

HEARTBEAT_TIMEOUT_S = 7.0
"""Three missed heartbeats: a worker that dies is out of the fleet within ten seconds."""


@dataclass(slots=True, eq=False)
class WorkerState:
    """State of one boot of one worker; only `WorkerRegistry` changes it."""

    report: WorkerReport
    heartbeat_at_s: float
    backend: Engine
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
    problem: str = ""
    """Why this gateway cannot reach the worker; empty if it can, as far as is known."""
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
    model_views: Mapping[str, ModelView] = field(default_factory=dict)
    """Those of its models that lack a feature or are not in memory."""
    _view: WorkerView | None = None
    _views: dict[tuple[int, ...], WorkerView] = field(default_factory=dict)
    """Views since the last report by the requests of each lane: the same few recur."""

    def __post_init__(self) -> None:
        self.answered_at_s = self.prefill_until_s = self.heartbeat_at_s
        self.update(self.report, self.heartbeat_at_s)

    def update(self, report: WorkerReport, now_s: float) -> None:
        """Replace the report and compute what decisions read of it."""
        self.report = report
        self.throughput = throughput_of(report)
        self.slots = {lane.name: max(1, lane.slots) for lane in report.lanes}
        self.models, self.model_views = self.backend.models(report)
        self._views.clear()
        self._view = None
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
        self.prefill_until_s = now_s + pending_tokens * self.throughput.prefill_token_s

    def add_request(self, lane: str, prefill_s: float, now_s: float) -> None:
        """Count a request that is about to be sent, and its prefill."""
        in_flight = self.in_flight[lane] = self.in_flight.get(lane, 0) + 1
        if in_flight > self.peak_in_flight.get(lane, 0):
            self.peak_in_flight[lane] = in_flight
        if prefill_s:
            self.pending_prefill_s += prefill_s
            self.prefill_until_s = max(self.prefill_until_s, now_s) + prefill_s
        self._view = None

    def remove_request(self, lane: str, prefill_s: float, now_s: float) -> None:
        """Remove a request that has ended, and its prefill."""
        self.in_flight[lane] -= 1
        self.pending_prefill_s -= prefill_s
        self.prefill_until_s = min(self.prefill_until_s, now_s + self.pending_prefill_s)
        self._view = None

    def is_live(self, now_s: float) -> bool:
        """Return whether the last heartbeat is recent."""
        return now_s - self.heartbeat_at_s <= HEARTBEAT_TIMEOUT_S

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

    def view(self) -> WorkerView:
        """Return a snapshot; the same one until the worker changes."""
        if self._view is None:
            occupied = tuple([self.occupied(lane) for lane in self.slots])
            view = self._views.get(occupied)
            if view is None:
                report, remote = self.report, self.remote_requests
                lanes = [
                    LaneView.of(lane, self.occupied(lane.name), remote.get(lane.name, 0))
                    for lane in report.lanes
                ]
                view = self._views[occupied] = WorkerView.of(
                    report.worker_id,
                    self.models,
                    lanes,
                    report.labels,
                    report.boot_id,
                    throughput=self.throughput,
                    by_model=self.model_views,
                    tells_system=report.system_inside is not None,
                )
            self._view = view.at_time(self.prefill_until_s, self.answered_at_s)
        return self._view


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


def same_routing(one: WorkerReport, other: WorkerReport) -> bool:
    """Return whether two reports of a worker make it eligible for the same requests."""
    return (
        (one.ready, one.draining, one.model, one.labels)
        == (other.ready, other.draining, other.model, other.labels)
    ) and [lane.name for lane in one.lanes] == [lane.name for lane in other.lanes]
