"""One request on its way to a worker and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.routing.select import Candidate, Decision, RoutingRequest
from gateway.types import NO_PREFIX, UNUSED, Caller, Drafts, Headers, Inspected, Usage

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Trace


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """One request on its way, and what happened to it so far: kept here, read by accounting."""

    identity: str
    inspected: Inspected
    case: RoutingRequest
    began_s: float
    caller: Caller = field(default_factory=Caller)
    decision: Decision | None = None
    attempts: int = 0
    candidate: Candidate | None = None
    waited_s: float = 0.0
    dispatched_s: float | None = None
    begun: bool = False
    """A worker has it, and may have begun with it."""
    first_token_s: float | None = None
    usage: Usage = UNUSED
    drafts: Drafts | None = None
    trace: Trace | None = None
    """Its spans, where traces are asked for."""

    def begin(self) -> None:
        """Note that it goes out to a worker now."""
        self.begun = True

    def record_decision(self, decision: Decision) -> None:
        """Record the decision that the first attempt followed."""
        if self.decision is None:
            self.decision = decision

    @property
    def prefix(self) -> str:
        """Tell what became of its system prompt: hit, miss, or none to look for.

        Until the worker has counted it is what is expected.
        """
        if not self.case.prefix_key:
            return NO_PREFIX
        if self.usage is not UNUSED:
            return "hit" if self.usage.cached_tokens else "miss"
        return "hit" if self.candidate and self.candidate.prefix_cached else "miss"


def route_headers(trip: RequestContext) -> Headers:
    """Say in headers where the request went and why."""
    if trip.candidate is None:
        return []
    return [
        (b"x-paceline-pool", trip.candidate.pool.encode()),
        (b"x-paceline-worker", trip.candidate.worker_id.encode()),
        (b"x-paceline-reason", trip.candidate.reason.encode()),
        (b"x-paceline-prefix", trip.prefix.encode()),
        (b"x-paceline-attempts", str(trip.attempts).encode()),
    ]
