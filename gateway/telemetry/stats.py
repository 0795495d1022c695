"""Statistics of requests by lane: counters, latency histograms, and windows over the last minutes.

Counters and histograms only grow. Every ten seconds a snapshot is taken; a window is the
difference of two snapshots. So a window costs a request nothing and counts each request once.

Histogram bounds are Renard's R10 series, ten per decade, from ten microseconds to eight hundred
seconds. Each bound is about a quarter above the last, so a percentile is correct to about an
eighth; the bounds that Prometheus shows (1, 2.5 and 5) are among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add, sub
from typing import Any, NamedTuple

SNAPSHOT_INTERVAL_S = 10.0
MAX_WINDOW_S = 900.0
_OUTCOMES_INTERVAL_S = 60.0
_OUTCOMES_KEPT_S = 3600.0

_STEPS = ("1", "1.25", "1.6", "2", "2.5", "3.15", "4", "5", "6.3", "8")
BOUNDS_S = tuple(float(f"{step}e{ten}") for ten in range(-5, 3) for step in _STEPS)
"""The inclusive upper bound of each bucket; one more bucket counts all that is above the last."""
Buckets = tuple[int, ...]
EMPTY: Buckets = (0,) * (len(BOUNDS_S) + 1)
_ROUNDING = 1e-6


class LogHistogram:
    """Counts durations: two additions for each."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = list(EMPTY)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


def percentile(counts: Sequence[int], share: float) -> float:
    """Return the duration that this share of the durations did not exceed; 0 without any."""
    rank = share * sum(counts) - _ROUNDING
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = BOUNDS_S[index - 1] if index else 0.0
            high = BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return 0.0


def cumulative(counts: Sequence[int], bounds_s: Sequence[float]) -> list[tuple[str, int]]:
    """Return cumulative counts for some of our bounds, in Prometheus' form."""
    buckets = []
    below, start = 0, 0
    for bound in bounds_s:
        end = bisect_left(BOUNDS_S, bound) + 1
        below += sum(counts[start:end])
        start = end
        buckets.append((str(bound), below))
    return [*buckets, ("+Inf", below + sum(counts[start:]))]


class LaneKey(NamedTuple):
    """One lane of one worker, as one pool uses it for one model."""

    pool: str
    lane: str
    worker_id: str
    model: str


class LaneTotals(NamedTuple):
    """Counts and latency buckets of one or more lanes: since the start, or within a window."""

    requests: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token_s: Buckets = EMPTY
    token_s: Buckets = EMPTY
    wait_s: Buckets = EMPTY
    duration_s: Buckets = EMPTY
    added_latency_s: Buckets = EMPTY

    def minus(self, earlier: LaneTotals) -> LaneTotals:
        """Subtract earlier totals of the same lane."""
        return LaneTotals(*map(_minus, self, earlier))


NO_TOTALS = LaneTotals()


class LaneStats:
    """The counters and histograms of one lane."""

    def __init__(self) -> None:
        self.requests = self.completion_tokens = 0
        self.drafted = self.accepted = 0
        self.first_token_s = LogHistogram()
        self.token_s = LogHistogram()
        self.wait_s = LogHistogram()
        self.duration_s = LogHistogram()
        self.added_latency_s = LogHistogram()
        self._totals = NO_TOTALS

    def totals(self) -> LaneTotals:
        """Return a snapshot, the previous one itself if no request ended since."""
        if self.requests != self._totals.requests:
            values = (getattr(self, name) for name in LaneTotals._fields)
            self._totals = LaneTotals(*map(_frozen, values, self._totals))
        return self._totals


def sum_totals(totals: Iterable[LaneTotals]) -> LaneTotals:
    """Add up the totals of several lanes."""
    added = NO_TOTALS
    for one in totals:
        added = LaneTotals(*map(_plus, added, one))
    return added


class Snapshot(NamedTuple):
    """The totals of all lanes at one moment."""

    at_s: float
    lanes: Mapping[LaneKey, LaneTotals]
    all_lanes: LaneTotals
    """The sum over all lanes."""
    outcomes: Mapping[str, int]
    """All requests, whether they reached a lane or not."""

    def minus(self, earlier: Snapshot) -> dict[LaneKey, LaneTotals]:
        """Return the totals since an earlier snapshot, of lanes where requests ended since."""
        return {
            key: totals.minus(earlier.lanes.get(key, NO_TOTALS))
            for key, totals in self.lanes.items()
            if totals is not earlier.lanes.get(key)
        }


class SnapshotHistory:
    """Snapshots of the last fifteen minutes, and the outcomes of each minute of the last hour.

    `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        lane_totals: Callable[[], Mapping[LaneKey, LaneTotals]],
        outcomes: Callable[[], Mapping[str, int]],
        clock: Callable[[], float],
    ) -> None:
        self._lane_totals = lane_totals
        self._outcomes = outcomes
        self._clock = clock
        self._snapshots: deque[Snapshot] = deque([Snapshot(clock(), {}, NO_TOTALS, {})])
        self._outcomes_by_minute = deque[tuple[float, Mapping[str, int]]]([(clock(), {})])

    async def record(self) -> None:
        """Add a snapshot, every `SNAPSHOT_INTERVAL_S`; drop those older than any window."""
        now = self.take_snapshot()
        self._snapshots.append(now)
        while now.at_s - self._snapshots[1].at_s >= MAX_WINDOW_S:
            self._snapshots.popleft()
        minutes = self._outcomes_by_minute
        if now.at_s - minutes[-1][0] >= _OUTCOMES_INTERVAL_S:
            minutes.append((now.at_s, now.outcomes))
        while len(minutes) > 1 and now.at_s - minutes[1][0] >= _OUTCOMES_KEPT_S:
            minutes.popleft()

    def take_snapshot(self) -> Snapshot:
        """Return a snapshot of this moment, without adding it to the history."""
        lanes = self._lane_totals()
        return Snapshot(self._clock(), lanes, sum_totals(lanes.values()), self._outcomes())

    def window(self, now: Snapshot, window_s: float) -> list[Snapshot]:
        """List the snapshots of a window, oldest first and `now` last.

        The first is the newest that is old enough, else the snapshot of the gateway's start.
        """
        found = [now]
        for snapshot in reversed(self._snapshots):
            found.append(snapshot)
            if now.at_s - snapshot.at_s >= window_s:
                break
        return found[::-1]

    def outcomes_before(self, now: Snapshot, length_s: float) -> Mapping[str, int]:
        """Return the outcomes at the beginning of a window of an hour at most.

        A window that is longer than those of `window` begins up to a minute earlier.
        """
        if length_s <= MAX_WINDOW_S:
            return self.window(now, length_s)[0].outcomes
        old_enough = (
            outcomes
            for at_s, outcomes in reversed(self._outcomes_by_minute)
            if now.at_s - at_s >= length_s
        )
        return next(old_enough, self._outcomes_by_minute[0][1])


# The three that follow take and return one field of `LaneTotals`: a number or buckets. Empty
# buckets are one object, so those of quiet lanes are compared and kept for nothing.


def _plus(one: Any, other: Any) -> Any:
    if isinstance(one, int):
        return one + other
    if one is EMPTY or other is EMPTY:
        return other if one is EMPTY else one
    return tuple(map(add, one, other))


def _minus(now: Any, earlier: Any) -> Any:
    if isinstance(now, int):
        return now - earlier
    if earlier is EMPTY:
        return now
    return EMPTY if now is earlier else tuple(map(sub, now, earlier))


def _frozen(value: Any, last: Any) -> Any:
    if not isinstance(value, LogHistogram):
        return value
    counts = tuple(value.counts)
    return last if counts == last else counts
