"""Latency histograms, and windows over snapshots of counters."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.stats import (
    BOUNDS_S,
    MAX_WINDOW_S,
    SNAPSHOT_INTERVAL_S,
    LaneKey,
    LaneTotals,
    LogHistogram,
    Snapshot,
    SnapshotHistory,
    percentile,
)

LANE = LaneKey("vlm", "vlm", "a", "demo")


@given(st.lists(st.floats(1e-6, 900), min_size=1), st.sampled_from([0.05, 0.5, 0.95]))
def test_a_percentile_is_correct_to_its_bucket(durations_s: list[float], share: float) -> None:
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (1e-05, 800.0)
    histogram = LogHistogram()
    for duration_s in durations_s:
        histogram.add(duration_s)
    rank = max(1, -(-round(share * len(durations_s) * 1000) // 1000))
    true_s = sorted(durations_s)[rank - 1]
    found_s = percentile(histogram.counts, share)
    above = next((bound for bound in BOUNDS_S if bound >= true_s), BOUNDS_S[-1])
    below = max((bound for bound in BOUNDS_S if bound < true_s), default=0.0)
    assert below <= found_s <= above


class GrowingTotals:
    """Totals that a test increases, and a clock that it advances."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.requests = 0
        self.history = SnapshotHistory(self.lane_totals, dict, lambda: self.now_s)

    def lane_totals(self) -> dict[LaneKey, LaneTotals]:
        return {LANE: LaneTotals(requests=self.requests)} if self.requests else {}


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 120)), max_size=60), st.floats(10, 900))
async def test_a_window_counts_each_of_its_requests_once_in_bounded_memory(
    increments: list[tuple[int, float]], window_s: float
) -> None:
    totals = GrowingTotals()
    samples = [(totals.now_s, 0)]
    for requests, seconds in increments:
        totals.now_s += seconds
        totals.requests += requests
        await totals.history.record()
        samples.append((totals.now_s, totals.requests))
    snapshot = totals.history.take_snapshot()
    steps = totals.history.window(snapshot, window_s)

    def counted(first: Snapshot, last: Snapshot) -> int:
        return last.minus(first).get(LANE, LaneTotals()).requests

    total = counted(steps[0], snapshot)
    assert total == totals.requests - dict(samples)[steps[0].at_s]
    assert total == sum(counted(*pair) for pair in itertools.pairwise(steps))
    covered_s = snapshot.at_s - steps[0].at_s
    times_s = [at_s for at_s, _ in samples]
    old_s = [at_s for at_s in times_s if snapshot.at_s - at_s >= MAX_WINDOW_S]
    oldest_at_s = max([times_s[0], *old_s])
    assert covered_s >= min(window_s, snapshot.at_s - oldest_at_s)
    assert len(steps) <= len(increments) + 2


async def test_snapshots_are_stored_for_fifteen_minutes() -> None:
    totals = GrowingTotals()
    for _ in range(1000):
        totals.now_s += SNAPSHOT_INTERVAL_S
        totals.requests += 1
        await totals.history.record()
    steps = totals.history.window(totals.history.take_snapshot(), MAX_WINDOW_S)
    assert steps[-1].at_s - steps[0].at_s == MAX_WINDOW_S
    newest = totals.history.take_snapshot()
    minute = totals.history.window(newest, 60.0)
    assert newest.at_s - minute[0].at_s == 60.0, "a shorter window is no longer than that"
    assert len(totals.history._snapshots) == MAX_WINDOW_S / SNAPSHOT_INTERVAL_S + 1
