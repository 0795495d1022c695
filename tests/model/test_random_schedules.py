"""Random schedules: every row gets its reference answer, and the counts match every token."""

import pytest

from tests.support.lane_schedules import ScheduleRunner

SEED = 3


@pytest.mark.parametrize("count", [3, pytest.param(15, marks=pytest.mark.proof)])
def test_any_schedule_gives_every_row_the_reference_answer_and_counts(
    checkpoint, prompt_renderer, count: int
) -> None:
    """`bench.engine.schedules` runs thousands of schedules."""
    schedules = ScheduleRunner(checkpoint, prompt_renderer, SEED)
    for number in range(count):
        try:
            schedules.run(number)
        except AssertionError as error:
            raise AssertionError(f"schedule {number} of seed {SEED}: {error}") from error
    stats = schedules.stats

    assert stats["schedules"] == count
    kinds = ("with rules", "cancelled", "ended by string", "ended in draft", "from prefix cache")
    assert min(stats[kind] for kind in (*kinds, "without head")) > 0, "each occurs somewhere"
    assert set(schedules.speculation.accepted_by_source) == {"head", "lookup"}
    assert stats["near ties"] <= stats["rows"] // 20, "float noise is rare; more is an error"
