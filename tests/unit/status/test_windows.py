"""Statistics of windows: what counts in which."""

from collections import Counter

from gateway.status.render import WindowStats
from gateway.telemetry.stats import SnapshotHistory
from gateway.types import Outcome


async def test_a_minute_and_an_hour_are_as_long_in_a_window_of_any_length() -> None:
    now_s = 1_000_000.0
    outcomes = Counter({outcome.value: 0 for outcome in Outcome})
    history = SnapshotHistory(dict, lambda: dict(outcomes), lambda: now_s)
    for number in range(1, 181 * 6):
        outcomes[Outcome.COMPLETED] += 1
        outcomes[Outcome.FAILED] += 1
        now_s += 10.0
        await history.record()
        for length_s, rows in ((30.0, 6), (120.0, 24), (60.0, 12)):
            if number >= 18:
                window = WindowStats(history, length_s)
                assert window.answers() == {"answered": rows, "errors": rows // 2}
                assert window.answers(60.0) == {"answered": 12, "errors": 6}
        if number % 6 == 0:
            hour = WindowStats(history, 30.0).answers(3600.0)["answered"]
            assert hour == min(number, 360) * 2
    assert len(history._outcomes_by_minute) == 61
