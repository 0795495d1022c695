"""Circuit breaker of one worker: ejection, probation, return. Pure: callers pass clock and jitter.

    healthy --failures in a row--> ejected --time--> probation --answers--> healthy
                                      ^------------any failure----'

Envoy's outlier detection with numbers for a fleet of a few machines, where its defaults would
eject no worker. A worker comes back by answering real requests, first one, then two, then four at a
time; a health check proves too little. It only ends the wait of a worker that could not be reached.

A busy worker, which refuses requests for the moment, gets none in a pause that doubles while it
goes on, and then one, which probes for all who wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

MAX_CONNECT_FAILURES = 3
"""In a row: the machine is off or asleep, or the port is closed."""
MAX_FAILURES = 5
"""In a row, connection failures among them."""
BASE_EJECTION_S = 10.0
"""Multiplied by the number of ejections; each healthy minute reduces that by one."""
MAX_EJECTION_S = 300.0
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_MAX_REFUSALS = 6
"""More lengthen no pause."""
_JITTER = 0.2
_FORGET_EJECTION_S = 60.0


class AttemptResult(Enum):
    """Result of one attempt, as far as it concerns the worker."""

    SUCCEEDED = auto()
    """The worker answered, or rejected an invalid request."""
    FAILED = auto()
    TIMED_OUT = auto()
    """The worker did not answer or continue in time."""
    UNREACHABLE = auto()
    BUSY = auto()
    """The worker asked for a pause by Retry-After."""
    ABANDONED = auto()
    """The client left or this gateway shut down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreaker:
    """Immutable state of one worker's circuit breaker."""

    connect_failures: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_at_s: float = 0.0
    """Results of requests sent before this time are ignored."""
    ejected_until_s: float = 0.0
    healthy_since_s: float = 0.0
    probation_limit: int | None = None
    """Most concurrent requests on probation; None outside of it."""
    busy_until_s: float = 0.0
    refusals: int = 0
    """Pauses in a row that a busy worker has asked for; 0 once it has taken a request."""
    reason: str = ""
    """Reason of the last ejection."""
    unreachable: bool = False
    """The last attempt got no connection."""

    def is_ejected(self, now_s: float) -> bool:
        """Return whether the worker is ejected."""
        return now_s < self.ejected_until_s

    def is_busy(self, now_s: float) -> bool:
        """Return whether the worker has asked for a pause that still lasts."""
        return now_s < self.busy_until_s

    @property
    def available_at_s(self) -> float:
        """Return the time when the worker gets requests again."""
        return max(self.ejected_until_s, self.busy_until_s)

    def record_success(self, now_s: float, slots: int) -> CircuitBreaker:
        """Record a success; on probation, the limit doubles until it reaches all slots.

        An answer of an ejected worker, which was asked for lack of another one, ends the ejection.
        """
        if self.probation_limit is None and not self.failures:
            return self
        recovered = replace(
            self,
            connect_failures=0,
            failures=0,
            unreachable=False,
            ejected_until_s=min(self.ejected_until_s, now_s),
        )
        if self.probation_limit is None:
            return recovered
        more = self.probation_limit * 2
        limit = more if more < slots else None
        return replace(recovered, probation_limit=limit, healthy_since_s=now_s)

    def record_connection(self, now_s: float) -> CircuitBreaker:
        """Record that a call back got a connection again; probation replaces an ejection."""
        return replace(
            self,
            connect_failures=0,
            failures=self.failures - self.connect_failures,
            unreachable=False,
            ejected_until_s=min(self.ejected_until_s, now_s),
        )

    def record_busy(
        self, now_s: float, retry_after_s: float, *, jitter: float = 0.0
    ) -> CircuitBreaker:
        """Record that the worker asks for a pause; those of one time count once."""
        if self.is_busy(now_s):
            return replace(self, busy_until_s=max(self.busy_until_s, now_s + retry_after_s))
        doubled_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0**self.refusals) * (1 + _JITTER * jitter)
        pause_s = max(retry_after_s, doubled_s) if self.refusals else retry_after_s
        refusals = min(self.refusals + 1, _MAX_REFUSALS)
        return replace(self, busy_until_s=now_s + pause_s, refusals=refusals)

    def record_taken(self) -> CircuitBreaker:
        """Record that a worker has taken a request, so that others may follow."""
        return replace(self, refusals=0) if self.refusals else self

    def record_failure(
        self, now_s: float, result: AttemptResult, *, last: bool, jitter: float
    ) -> CircuitBreaker:
        """Record a failure; eject unless this is the last worker. `jitter` is in [0, 1)."""
        unreachable = result is AttemptResult.UNREACHABLE
        noted = replace(
            self,
            connect_failures=self.connect_failures + 1 if unreachable else 0,
            failures=self.failures + 1,
            unreachable=unreachable,
        )
        why = noted.ejection_reason
        if last or not why:
            return noted
        forgiven = int(max(0.0, now_s - self.healthy_since_s) / _FORGET_EJECTION_S)
        ejections = max(0, self.ejections - forgiven) + 1
        length_s = min(MAX_EJECTION_S, BASE_EJECTION_S * ejections * (1 + _JITTER * jitter))
        return CircuitBreaker(
            ejections=ejections,
            ejected_at_s=now_s,
            ejected_until_s=now_s + length_s,
            healthy_since_s=now_s + length_s,
            probation_limit=1,
            busy_until_s=self.busy_until_s,
            refusals=self.refusals,
            reason=why,
            unreachable=unreachable,
        )

    @property
    def ejection_reason(self) -> str:
        """Return why the recorded failures justify an ejection; empty if they do not."""
        if self.connect_failures >= MAX_CONNECT_FAILURES:
            return f"{self.connect_failures} connections failed in a row"
        if self.failures >= MAX_FAILURES:
            return f"{self.failures} requests failed in a row"
        if self.probation_limit is not None:
            return "it failed on probation"
        return ""


HEALTHY = CircuitBreaker()
"""No failures; the state of nearly all workers."""
