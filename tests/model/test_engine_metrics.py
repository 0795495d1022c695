"""Time saved by drafting and by the prefix cache."""

import itertools

import pytest

from workers.engine.decode.draft_length import SAMPLES

LONG = "You answer in one short sentence. " * 12


def lane_of_seconds(make_lane, plain_s):
    """Return a lane with steps of one second and a known cost of a plain step."""
    lane = make_lane(clock=itertools.count().__next__)
    for _ in range(SAMPLES):
        lane._decoder._draft_length.observe_cost(1, 0, plain_s)
    return lane


def test_a_drafted_step_saves_the_plain_steps_that_it_replaces(make_lane, ask) -> None:
    lane = lane_of_seconds(make_lane, plain_s=1.0)
    result = ask(lane, "Count from 1 to 20.")
    report = lane.counters.report()

    # Each step adds one token to those it accepts, unless the answer ends within it.
    accepted = result.end.speculation.accepted
    assert accepted > 4
    assert 1000 * (accepted - 1) <= report.time_saved.decode_ms <= 1000 * accepted
    assert report.time_saved.prefill_ms == 0


def test_drafting_that_costs_more_than_it_saves_has_negative_savings(make_lane, ask) -> None:
    lane = lane_of_seconds(make_lane, plain_s=0.1)
    ask(lane, "Count from 1 to 20.")

    assert lane.counters.report().time_saved.decode_ms < 0


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_no_saving_is_recorded_before_the_cost_of_a_plain_step_is_measured(
    make_lane, ask, draft_tokens
) -> None:
    lane = make_lane(draft_tokens=draft_tokens, clock=itertools.count().__next__)
    ask(lane, "Say a word.", max_tokens=4, draft_tokens=draft_tokens)

    assert lane.counters.report().time_saved.decode_ms == 0


def test_a_cached_system_prompt_saves_its_prefill_time(make_lane, ask) -> None:
    lane = make_lane(clock=itertools.count().__next__)
    first = ask(lane, "Hello", system=LONG, max_tokens=4)
    before = lane.counters.report()
    second = ask(lane, "Who are you?", system=LONG, max_tokens=4)
    after = lane.counters.report()

    assert (first.row.cached_tokens, before.time_saved.prefill_ms) == (0, 0)
    assert second.row.cached_tokens == after.prefix.cached_tokens > 0
    assert after.time_saved.prefill_ms > 0
