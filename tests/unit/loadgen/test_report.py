"""Ratios of two endpoints, and the picture of a sweep."""

from __future__ import annotations

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


def measured(
    endpoint: str, repetition: int, took_s: float, *, level: Level = ONE, drafts: bool = False
) -> Measurement:
    answer = Answer(
        due_s=0,
        ended_s=took_s,
        pieces_s=(took_s / 2, took_s),
        output_tokens=11,
        drafts=Drafts(steps=2, drafted=4, accepted=3, per_position=(2, 1)) if drafts else None,
    )
    return Measurement(
        endpoint=endpoint,
        level=level,
        repetition=repetition,
        figures=summarize([answer]),
        problems=(),
    )


TURNS = [
    *(measured("A", 1, 1.0), measured("B", 1, 2.0)),
    *(measured("A", 2, 4.0), measured("B", 2, 2.0)),
    *(measured("A", 3, 1.0), measured("B", 3, 4.0)),
]


def test_a_ratio_is_the_median_over_repetitions() -> None:
    found = {ratio.name: ratio for ratio in compare(TURNS)}
    speed = found["output_throughput"]
    assert (speed.a, speed.b) == (11.0, 5.5)
    assert (speed.lowest, speed.ratio, speed.highest) == (0.5, 2.0, 4.0)
    assert found["median_ttft_ms"].ratio == 0.5


def test_a_figure_that_one_of_them_lacks_is_left_out() -> None:
    found = compare([measured("A", 1, 1.0, drafts=True), measured("B", 1, 1.0)])
    assert not [ratio for ratio in found if "spec_decode" in ratio.name]


def test_a_turn_that_was_cut_short_is_left_out() -> None:
    assert {ratio.ratio for ratio in compare(TURNS[:3])} == {
        ratio.ratio for ratio in compare(TURNS[:2])
    }
    assert compare(TURNS[:1]) == ()


def test_medians_are_taken_place_by_place() -> None:
    found = medians(measured("A", turn, took_s, drafts=True) for turn, took_s in ((1, 1), (2, 3)))
    assert found["duration"] == 2.0
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]


def test_a_sweep_in_which_nothing_was_accepted_or_answered_can_be_drawn() -> None:
    failed = Answer(due_s=0, ended_s=1, problem="503: nobody is there")
    nothing = Answer(due_s=0, ended_s=1, drafts=Drafts(steps=1, drafted=2, per_position=(0, 0)))
    for answer in (failed, nothing):
        found = Measurement(
            endpoint="A", level=ONE, repetition=1, figures=summarize([answer]), problems=()
        )
        ET.fromstring(svg([found], endpoints=["m on here"]))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4), st.booleans())
def test_any_sweep_can_be_drawn(times_s: list[float], drafts: bool) -> None:
    sweep = [
        measured(letter, 1, time_s, level=Level(concurrency=number + 1), drafts=drafts)
        for number, time_s in enumerate(times_s)
        for letter in "AB"
    ]
    root = ET.fromstring(svg(sweep, endpoints=["m on <here>", "m & there"]))
    numbers = [float(dot.attrib["cy"]) for dot in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(numbers) >= 10 * len(times_s)
    assert all(0 <= number <= 250 for number in numbers)
