"""The rate at which a queue drains, and so the wait of a request. Pure; for gateways and workers.

The interval between two requests that leave the queue for a slot is a sample. Only a queue that is
not empty has intervals: the others would measure how often requests come. The first interval is
the time of a whole answer, in which as many requests end as run at the same time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_SAMPLES = 32
RETRY_AFTER_RANGE_S = (1.0, 60.0)
"""Of all times that clients are asked to wait."""
_LONGEST_WAIT_S = 3600.0


class QueuePlace(NamedTuple):
    """The place of a request in a queue, 1 for the next one, and its expected wait."""

    place: int
    wait_s: float

    def comment(self) -> bytes:
        """Return the place as a comment of an event stream."""
        return b": queued %d, about %d s\n\n" % (self.place, max(1, round(self.wait_s)))


class DrainRate:
    """The measured rate of one queue; times are monotonic seconds."""

    def __init__(self) -> None:
        self._intervals_s: deque[float] = deque(maxlen=_SAMPLES)
        self._since_s = 0.0

    def begin(self, now_s: float) -> None:
        """Record that a request entered the empty queue."""
        self._since_s = now_s

    def record(self, now_s: float, running: int = 1) -> None:
        """Record that a request left the queue for a slot, while so many run."""
        interval_s = now_s - self._since_s
        self._intervals_s.append(interval_s if self._intervals_s else interval_s / max(running, 1))
        self._since_s = now_s

    def place(self, number: int, now_s: float, running: int = 1) -> QueuePlace:
        """Return the place with its expected wait, while the queue is not empty and so many run.

        The interval that is still open counts if it is longer than the others are on average: a
        queue that has come to a halt must not promise its old rate. Nor is the wait shorter than
        that interval: requests that began together also end together, so the first end is late.
        """
        intervals_s, open_s = self._intervals_s, now_s - self._since_s if number else 0.0
        total_s, samples = sum(intervals_s), len(intervals_s)
        if not samples:
            total_s, samples = open_s, max(running, 1)
        elif open_s * samples >= total_s:
            total_s, samples = total_s + open_s, samples + 1
        wait_s = max(number * total_s / samples, open_s)
        return QueuePlace(number, min(wait_s, _LONGEST_WAIT_S))

    def retry_after_s(self, waiting: int, now_s: float, running: int = 1) -> float:
        """Return after which time a request that the full queue rejects may return, within bounds.

        By then the requests that wait now have a slot.
        """
        low, high = RETRY_AFTER_RANGE_S
        return min(max(self.place(waiting, now_s, running).wait_s, low), high)
