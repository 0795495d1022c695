"""Ratios of two endpoints."""

from gateway.loadgen.client import Answer
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.report import compare, medians
from gateway.loadgen.runner import Level, Measurement
from gateway.loadgen.stats import summarize


def measurement(
    endpoint: str, repetition: int, duration_s: float, *, drafts: bool = False
) -> Measurement:
    answer = Answer(
        due_s=0,
        ended_s=duration_s,
        pieces_s=(duration_s / 2, duration_s),
        output_tokens=11,
        drafts=Drafts(steps=2, drafted=4, accepted=3, per_position=(2, 1)) if drafts else None,
    )
    return Measurement(
        endpoint=endpoint,
        level=Level(concurrency=1),
        repetition=repetition,
        figures=summarize([answer]),
        problems=(),
    )


MEASUREMENTS = [
    *(measurement("A", 1, 1.0), measurement("B", 1, 2.0)),
    *(measurement("A", 2, 4.0), measurement("B", 2, 2.0)),
    *(measurement("A", 3, 1.0), measurement("B", 3, 4.0)),
]


def test_a_ratio_is_the_median_over_repetitions() -> None:
    ratios = {ratio.figure: ratio for ratio in compare(MEASUREMENTS)}
    throughput = ratios["output_throughput"]
    assert (throughput.a, throughput.b) == (11.0, 5.5)
    assert (throughput.lowest, throughput.ratio, throughput.highest) == (0.5, 2.0, 4.0)
    assert ratios["median_ttft_ms"].ratio == 0.5


def test_what_one_endpoint_lacks_has_no_ratio() -> None:
    ratios = compare([measurement("A", 1, 1.0, drafts=True), measurement("B", 1, 1.0)])
    assert not [ratio for ratio in ratios if "spec_decode" in ratio.figure]
    assert compare(MEASUREMENTS[:3]) == compare(MEASUREMENTS[:2]), "a repetition"
    assert compare(MEASUREMENTS[:1]) == []


def test_medians_of_lists_are_computed_by_position() -> None:
    repetitions = [measurement("A", 1, 1.0, drafts=True), measurement("A", 2, 3.0, drafts=True)]
    figures = medians([repetition.figures for repetition in repetitions])
    assert figures["duration"] == 2.0
    assert figures["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
