"""When a worker is left alone, for how long, and how it comes back: pure, clock and dice passed in.

    healthy --failures in a row--> ejected --time--> probation --answers--> healthy
                                      ^------------any failure----'

Envoy's outlier detection with numbers for a fleet of a few machines, where its defaults would
eject nobody. A worker comes back by answering real requests, first one, then two, then four at a
time; a health check proves too little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

MAX_CONNECT_FAILURES = 3
"""In a row: the machine is off, asleep, or nobody listens."""
MAX_FAILURES = 5
"""In a row, connection failures among them."""
BASE_EJECTION_S = 10.0
"""Times the number of ejections so far, which one healthy minute takes one from."""
MAX_EJECTION_S = 300.0
_JITTER = 0.2
_FORGET_EJECTION_S = 60.0


class AttemptResult(Enum):
    """What the end of one request says of the worker that had it."""

    SUCCEEDED = auto()
    """It did what a worker does; refusing a wrong request is that too."""
    FAILED = auto()
    TIMED_OUT = auto()
    """It did not answer, or not go on, in the time allowed."""
    UNREACHABLE = auto()
    BUSY = auto()
    """It asks to be left alone for a while, and is not broken."""
    ABANDONED = auto()
    """The end was not its doing: the client left, or this gateway ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreaker:
    """What is held against one worker; a new value for each thing that happens."""

    connect_failures: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_at_s: float = 0.0
    """Requests that were sent before this moment have nothing more to say."""
    ejected_until_s: float = 0.0
    healthy_since_s: float = 0.0
    probation_limit: int | None = None
    """How many requests it may have on probation; None once it is trusted with all its slots."""
    busy_until_s: float = 0.0
    reason: str = ""
    """Of the last ejection."""

    def is_ejected(self, now_s: float) -> bool:
        """Say whether it gets nothing because of what it did."""
        return now_s < self.ejected_until_s

    def is_busy(self, now_s: float) -> bool:
        """Say whether it gets nothing because it asked for that."""
        return now_s < self.busy_until_s

    @property
    def available_at_s(self) -> float:
        """Return the moment from which it gets requests again."""
        return max(self.ejected_until_s, self.busy_until_s)

    def record_success(self, now_s: float, slots: int) -> CircuitBreaker:
        """Take note of a good end; on probation the number at a time doubles up to all slots."""
        if self.probation_limit is None:
            if not self.failures:
                return self
            return replace(self, connect_failures=0, failures=0)
        more = self.probation_limit * 2
        return replace(
            self,
            connect_failures=0,
            failures=0,
            probation_limit=more if more < slots else None,
            healthy_since_s=now_s,
        )

    def record_busy(self, now_s: float, retry_after_s: float) -> CircuitBreaker:
        """Leave it alone for as long as it asks."""
        return replace(self, busy_until_s=max(self.busy_until_s, now_s + retry_after_s))

    def record_failure(
        self, now_s: float, result: AttemptResult, *, last: bool, jitter: float
    ) -> CircuitBreaker:
        """Take note of a failure; eject unless this is the last worker. `jitter` is in [0, 1)."""
        unreachable = result is AttemptResult.UNREACHABLE
        noted = replace(
            self,
            connect_failures=self.connect_failures + 1 if unreachable else 0,
            failures=self.failures + 1,
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
            reason=why,
        )

    @property
    def ejection_reason(self) -> str:
        """Say why what is noted is enough for an ejection; empty when it is not."""
        if self.connect_failures >= MAX_CONNECT_FAILURES:
            return f"{self.connect_failures} connections failed in a row"
        if self.failures >= MAX_FAILURES:
            return f"{self.failures} requests failed in a row"
        if self.probation_limit is not None:
            return "it failed on probation"
        return ""


HEALTHY = CircuitBreaker()
"""Nothing is held against it; nearly all workers at nearly all times."""
