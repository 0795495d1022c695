"""The counts of engines that send no reports, as reports."""

from gateway.telemetry import engine_counts
from gateway.telemetry.engine_counts import engine_reports, untold_by_place


def counts_of(worker_id: str, model: str, **counts: int) -> dict[tuple[str, ...], int]:
    return {("engine", worker_id, model, "vlm", name): count for name, count in counts.items()}


COUNTS = {
    ("decisions", "vlm", "rest", "policy"): 9,
    **counts_of("mac", "org/a:8b", requests=4, prompt=40, completion=12, steps=3, drafted=6),
    **counts_of("mac", "org/a:8b", accepted=4, accepted_1=2, accepted_2=1),
    **counts_of("mac", "/models/b", requests=1, untold_drafts=1),
    **counts_of("liar", "a", drafted=1, accepted=2),
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
    place = engine_counts.LanePlace("mac", "/models/b", "vlm")
    assert untold_by_place(COUNTS)[place] == {"usage": 0, "cached_tokens": 0, "drafts": 1}
    assert engine_counts.accepted_name(10_000) == engine_counts.accepted_name(64), "the longest"
