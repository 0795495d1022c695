"""Ratios of two endpoints, and the plot of a sweep."""

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from gateway.loadgen.client import Answer
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.plot import svg
from gateway.loadgen.report import compare, medians
from gateway.loadgen.runner import Level, Measurement
from gateway.loadgen.stats import summarize

ONE, FOUR = Level(concurrency=1), Level(concurrency=4)


def measurement(
    endpoint: str, repetition: int, duration_s: float, *, level: Level = ONE, drafts: bool = False
) -> Measurement:
    answer = Answer(
        due_s=0,
        ended_s=duration_s,
        pieces_s=(duration_s / 2, duration_s),
        output_tokens=11,
        drafts=Drafts(steps=2, drafted=4, accepted=3, per_position=(2, 1)) if drafts else None,
    )
    return measured(answer, endpoint, repetition, level)


def measured(
    answer: Answer, endpoint: str = "A", repetition: int = 1, level: Level = ONE
) -> Measurement:
    figures = summarize([answer])
    return Measurement(
        endpoint=endpoint, level=level, repetition=repetition, figures=figures, problems=()
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


def test_a_sweep_without_answers_or_accepted_drafts_can_be_plotted() -> None:
    failed = Answer(due_s=0, ended_s=1, problem="503: no worker")
    rejected = Answer(due_s=0, ended_s=1, drafts=Drafts(steps=1, drafted=2, per_position=(0, 0)))
    for answer in (failed, rejected):
        ET.fromstring(svg([measured(answer)], endpoints=["m on here"]))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4), st.booleans())
def test_any_sweep_can_be_plotted(times_s: list[float], drafts: bool) -> None:
    sweep = [
        measurement(letter, 1, time_s, level=Level(concurrency=number + 1), drafts=drafts)
        for number, time_s in enumerate(times_s)
        for letter in "AB"
    ]
    root = ET.fromstring(svg(sweep, endpoints=["m on <here>", "m & there"]))
    numbers = [float(dot.attrib["cy"]) for dot in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(numbers) >= 10 * len(times_s)
    assert all(0 <= number <= 250 for number in numbers)
