"""One worker in the live table, and the slot of it that a request holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gateway.config.static_workers import ListedWorker
from gateway.fleet.circuit_breaker import HEALTHY, CircuitBreaker
from gateway.routing.cost import Throughput, throughput_of
from gateway.routing.select import Candidate
from gateway.routing.view import LaneView, WorkerView
from gateway.types import WorkerBoot
from workers.protocol import WorkerReport

HEARTBEAT_TIMEOUT_S = 7.0
"""Three beats missed: out, and so within ten seconds in every case."""


@dataclass(slots=True, eq=False)
class WorkerState:
    """One boot of one worker; only `Fleet` changes it."""

    report: WorkerReport
    heartbeat_at_s: float
    listed: ListedWorker | None = None
    """Set for a worker that is listed by hand; its slots are shared by all its lanes."""
    breaker: CircuitBreaker = HEALTHY
    in_flight: Counter[str] = field(default_factory=Counter)
    probation_requests: int = 0
    """Requests sent since its last ejection that it has not yet answered."""
    cordoned: bool = False
    """An admin keeps new requests from it."""
    local_heartbeat_at_s: float = float("-inf")
    """When it was heard here last, not through another gateway."""
    local: bool = True
    """It beats at this gateway, as far as is known."""
    peak_in_flight: dict[str, int] = field(default_factory=dict)
    """By lane, since its last report: how many of its rows may have been this gateway's."""
    remote_requests: dict[str, int] = field(default_factory=dict)
    """By lane, as of its last report: the rows of other gateways."""
    prefill_until_s: float = 0.0
    """When it will have read the prompts that it has, as far as can be told."""
    pending_prefill_s: float = 0.0
    """How long it reads, in all, what this gateway has sent and got no answer to yet."""
    answered_at_s: float = 0.0
    """When it last answered a request of this gateway, or joined."""
    throughput: Throughput = field(init=False)
    """How fast it is, by its last report."""
    slots: dict[str, int] = field(default_factory=dict)
    """By lane, by its last report."""
    _view: WorkerView | None = None
    _seen: dict[tuple[int, ...], WorkerView] = field(default_factory=dict)
    """By the requests on its lanes, since its last report: the same few come again and again."""

    def __post_init__(self) -> None:
        self.answered_at_s = self.prefill_until_s = self.heartbeat_at_s
        self.update(self.report, self.heartbeat_at_s)

    def update(self, report: WorkerReport, now_s: float) -> None:
        """Take over what a report says, and work out once what each decision asks of it."""
        self.report = report
        self.throughput = throughput_of(report)
        self.slots = {lane.name: max(1, lane.slots) for lane in report.lanes}
        self._seen.clear()
        self.invalidate_view()
        if self.listed is not None:
            return  # it says nothing of itself
        pending_prefill_tokens = 0
        for lane in report.lanes:
            pending_prefill_tokens += lane.pending_prefill_tokens
            in_flight = self.in_flight[lane.name]
            # A report is older than what was sent and answered since: only what cannot have been
            # this gateway's at any time since the one before is others'.
            mine = max(in_flight, self.peak_in_flight.get(lane.name, 0))
            self.remote_requests[lane.name] = max(0, lane.running + lane.waiting - mine)
            self.peak_in_flight[lane.name] = in_flight
        self.prefill_until_s = now_s + pending_prefill_tokens * self.throughput.prefill_token_s

    def is_live(self, now_s: float) -> bool:
        """Say whether it was heard of lately."""
        return now_s - self.heartbeat_at_s <= HEARTBEAT_TIMEOUT_S

    @property
    def accepting(self) -> bool:
        """Say whether it takes new requests as far as it says itself, and admins do."""
        return self.report.ready and not self.report.draining and not self.cordoned

    @property
    def models(self) -> tuple[str, ...]:
        """Name the models that it serves."""
        return self.listed.models if self.listed else (self.report.model,)

    def occupied(self, lane: str) -> int:
        """Count the requests that this gateway has sent to a lane and not yet got back."""
        return self.in_flight.get(lane, 0) if self.listed is None else self.in_flight.total()

    def view(self) -> WorkerView:
        """Take a snapshot; made anew only where something changed."""
        if self._view is None:
            busy = tuple([self.occupied(lane) for lane in self.slots])
            seen = self._seen.get(busy)
            if seen is None:
                seen = self._seen[busy] = self._look()
            self._view = seen.at_time(self.prefill_until_s, self.answered_at_s)
        return self._view

    def _look(self) -> WorkerView:
        report = self.report
        lanes = [
            LaneView.of(lane, self.occupied(lane.name), self.remote_requests.get(lane.name, 0))
            for lane in report.lanes
        ]
        return WorkerView.of(
            report.worker_id,
            self.models,
            tuple(lanes),
            report.labels,
            report.boot_id,
            throughput=self.throughput,
        )

    def invalidate_view(self) -> None:
        """Forget the snapshot."""
        self._view = None


@dataclass(slots=True, eq=False)
class Lease:
    """One slot of one lane, held by one request from the decision to the last byte."""

    candidate: Candidate
    state: WorkerState
    ejected_at_s: float
    """Of the worker's last ejection before this request was sent."""
    on_probation: bool
    """The request is the test of a worker that comes back."""
    waited_s: float = 0.0
    """How long the request stood in line for it."""

    @property
    def report(self) -> WorkerReport:
        """The worker whose slot it is."""
        return self.state.report

    @property
    def boot(self) -> WorkerBoot:
        """The worker in this life of it, as one that holds system prompts."""
        return self.report.worker_id, self.report.boot_id


def serves_alike(one: WorkerReport, other: WorkerReport) -> bool:
    """Say whether a worker takes the same requests by both reports."""
    return (
        (one.ready, one.draining, one.model, one.labels)
        == (other.ready, other.draining, other.model, other.labels)
    ) and [lane.name for lane in one.lanes] == [lane.name for lane in other.lanes]
