"""Whatever joins, leaves and shares the batch: each row is as if alone, each token explained."""

import os

from tests.support.lane_schedules import ScheduleRunner

SEED = 3
COUNT = int(os.environ.get("PACELINE_TEST_SCHEDULES", "15"))
"""`bench.engine.schedules` plays thousands; this many are played with every test run."""


def test_any_schedule_gives_every_row_its_answer_and_its_counts(
    checkpoint, prompt_renderer
) -> None:
    schedules = ScheduleRunner(checkpoint, prompt_renderer, SEED)
    for number in range(COUNT):
        try:
            schedules.run(number)
        except AssertionError as error:
            raise AssertionError(f"schedule {number} of seed {SEED}: {error}") from error
    found = schedules.stats

    assert found.schedules == COUNT
    covered = (found.with_rules, found.cancelled, found.ended_by_string, found.ended_in_draft)
    assert min(covered) > 0, "schedules that never do it prove nothing about it"
    assert min(found.from_prefix_cache, found.without_head) > 0
    assert found.near_ties <= found.rows // 20, "noise is rare; more of it is a bug"
