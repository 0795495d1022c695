"""The counts of engines that send no reports, as reports."""

from __future__ import annotations

from gateway.telemetry import engine_counts
from gateway.telemetry.engine_counts import engine_reports, untold_by_place

COUNTS = {
    ("decisions", "vlm", "rest", "policy"): 9,
    ("engine", "mac", "org/a:8b", "vlm", "requests"): 4,
    ("engine", "mac", "org/a:8b", "vlm", "prompt"): 40,
    ("engine", "mac", "org/a:8b", "vlm", "completion"): 12,
    ("engine", "mac", "org/a:8b", "vlm", "steps"): 3,
    ("engine", "mac", "org/a:8b", "vlm", "drafted"): 6,
    ("engine", "mac", "org/a:8b", "vlm", "accepted"): 4,
    ("engine", "mac", "org/a:8b", "vlm", "accepted_1"): 2,
    ("engine", "mac", "org/a:8b", "vlm", "accepted_2"): 1,
    ("engine", "mac", "/models/b", "vlm", "requests"): 1,
    ("engine", "mac", "/models/b", "vlm", "untold_drafts"): 1,
    ("engine", "liar", "a", "vlm", "drafted"): 1,
    ("engine", "liar", "a", "vlm", "accepted"): 2,
}


def test_each_model_of_an_engine_has_a_report_of_its_counts() -> None:
    second, first = engine_reports(COUNTS)
    assert [report.model for report in (first, second)] == ["org/a:8b", "/models/b"]
    (lane,) = first.lanes
    assert (lane.requests, lane.prompt_tokens, lane.completion_tokens) == (4, 40, 12)
    assert lane.mtp_enabled
    assert lane.speculation.histogram == (0, 2, 1)
    assert lane.speculation.acceptance_rate == 4 / 6
    assert not second.lanes[0].mtp_enabled, "nobody told a draft"


def test_what_an_engine_does_not_tell_is_counted_apart() -> None:
    untold = untold_by_place(COUNTS)
    place = engine_counts.LanePlace("mac", "/models/b", "vlm")
    assert untold[place] == {"usage": 0, "cached_tokens": 0, "drafts": 1}


def test_a_longer_draft_than_any_counts_as_the_longest() -> None:
    assert engine_counts.accepted_name(10_000) == engine_counts.accepted_name(64)
