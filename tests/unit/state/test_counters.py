"""Which of two reports of one boot is the later one."""

from typing import Any

import pytest

from gateway.state.counters import progress
from tests.support.scheduler_harness import worker_report
from tests.support.scripted_worker import lane_report

COUNTS = (
    *("requests", "prompt_tokens", "completion_tokens", "speculation.steps"),
    *("speculation.drafted", "prefix.hits", "prefix.misses", "spec_prefill.scored_tokens"),
    *("spec_prefill.full_prefills.short", "bypass_counts.media"),
)


def progress_of(lane: dict[str, int]) -> int:
    """Return the progress of a report with one busy lane beside a lane with these counts."""
    values: dict[str, Any] = {}
    for path, amount in lane.items():
        *sections, count = path.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[count] = amount
    lanes = [lane_report("text-mtp", **values), lane_report("vlm", requests=1)]
    return progress(worker_report(lanes=lanes))


@pytest.mark.parametrize("count", COUNTS)
def test_the_progress_of_a_report_grows_with_each_of_its_counts(count: str) -> None:
    ones = dict.fromkeys(COUNTS, 1)
    first, second, third = (progress_of({**ones, count: amount}) for amount in (1, 2, 3))
    assert (second - first, third - second) == (1, 1)
