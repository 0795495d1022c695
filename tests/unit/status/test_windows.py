"""Statistics of windows: what counts in which."""

from __future__ import annotations

from collections import Counter

from gateway.status.render import WindowStats
from gateway.telemetry.stats import SnapshotHistory
from gateway.types import Outcome


async def test_the_last_minute_is_a_minute_in_a_window_of_any_length() -> None:
    now_s = 1_000_000.0
    outcomes = Counter({outcome.value: 0 for outcome in Outcome})
    history = SnapshotHistory(dict, lambda: dict(outcomes), lambda: now_s)
    for _ in range(18):
        outcomes[Outcome.COMPLETED] += 1
        outcomes[Outcome.FAILED] += 1
        now_s += 10.0
        await history.record()
    for length_s, answered in ((30.0, 6), (120.0, 24)):
        window = WindowStats(history, length_s)
        assert window.answers() == {"answered": answered, "errors": answered // 2}
        assert window.answers(60.0) == {"answered": 12, "errors": 6}


async def test_the_last_hour_counts_each_minute_and_forgets_older_ones() -> None:
    now_s = 1_000_000.0
    outcomes = Counter({outcome.value: 0 for outcome in Outcome})
    history = SnapshotHistory(dict, lambda: dict(outcomes), lambda: now_s)
    for minute in range(1, 181):
        outcomes[Outcome.FAILED] += 1
        now_s += 60.0
        await history.record()
        expected = min(minute, 60)
        assert WindowStats(history, 30.0).answers(3600.0) == {
            "answered": expected,
            "errors": expected,
        }
    assert len(history._outcomes_by_minute) == 61
