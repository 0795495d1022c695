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

    assert stats.schedules == count
    covered = (stats.with_rules, stats.cancelled, stats.ended_by_string, stats.ended_in_draft)
    assert min(covered) > 0, "every kind of event occurs in some schedule"
    assert min(stats.from_prefix_cache, stats.without_head) > 0
    assert set(stats.speculation.accepted_by_source) == {"head", "lookup"}
    assert stats.near_ties <= stats.rows // 20, "float noise is rare; more differences are an error"
