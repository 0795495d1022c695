"""Steps that begin before the host has read the step before."""

import itertools

import pytest

from paceline.request.profile import Sampling
from tests.support.engine_lane import RowEvents, run_until_idle
from tests.support.reference_decoder import assert_matches_reference
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.text.tokenizer import PreparedPrompt
from workers.engine.types import Delta, Finished

GREEDY, PLAIN = {"adaptive": True}, {"draft_tokens": 0}
SAMPLED = {"adaptive": True, "sampling": Sampling(temperature=0.8, top_p=0.9)}
EXACT = {"draft_tokens": 0, "exact": True}
LOOKING_UP = {"adaptive": True, "looks_up": True}
PROMPTS = ("Count from 1 to 20.", "Tell me a story about a fox.")


def has_open_step(lane: LaneScheduler) -> bool:
    return any(batch.opened is not None for batch in lane._decoder._batches)


def note_open_steps(lane: LaneScheduler, result: RowEvents) -> list[bool]:
    """Return a list that gets, for each delta of a row, whether a step was open."""
    noted: list[bool] = []

    def sink(event) -> None:
        if isinstance(event, Delta):
            noted.append(has_open_step(lane))
        result.on_event(event)

    result.row.sink = sink
    return noted


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_step_begins_before_the_tokens_of_the_last_one_are_sent(
    make_lane, submit, draft_tokens: int
) -> None:
    lane = make_lane(draft_tokens=draft_tokens, clock=itertools.count().__next__)
    result = submit(lane, "Count from 1 to 20.", draft_tokens=draft_tokens, max_tokens=30)
    noted = note_open_steps(lane, result)
    run_until_idle(lane)

    assert noted[:6] == [False, True, True, True, True, True], "the prefill chose the first token"
    assert not noted[-1], "the limit of the answer was known"


def test_steps_begin_ahead_while_a_prompt_is_read_until_its_row_joins(
    make_lane, submit, checkpoint
) -> None:
    lane = make_lane(chunk_tokens=64)
    early = submit(lane, "Count from 1 to 20.", max_tokens=120)
    for _ in range(8):  # the costs are known then
        lane.step()
    assert has_open_step(lane)
    late = submit(lane, [20 + i % 700 for i in range(290)], max_tokens=12)
    before = lane.counters.report()
    open_after_chunks = []
    while not late.row.answer:
        lane.step()
        open_after_chunks.append(has_open_step(lane))
    assert open_after_chunks == [True] * 4 + [False], "the row joins the batch"
    after = lane.counters.report()
    assert (after.steps - before.steps, after.steps_ahead - before.steps_ahead) == (5, 4)
    lane.step()
    assert has_open_step(lane)
    run_until_idle(lane)

    assert_matches_reference(checkpoint, early, late)


@pytest.mark.parametrize(
    ("first", "second", "batches"),
    [
        ([GREEDY] * 2, [SAMPLED] * 2, 1),
        ([GREEDY] * 2, [EXACT], 2),
        ([GREEDY, PLAIN], [SAMPLED, PLAIN], 2),
        ([LOOKING_UP], [PLAIN], 2),
    ],
)
def test_rows_of_both_lanes_share_batches_and_the_device_always_has_a_step(
    make_lanes, submit, first, second, batches
) -> None:
    """Once the costs are known, one step in 32 is read while the device computes none."""
    lanes = make_lanes(eos=frozenset(), clock=itertools.count().__next__)
    for _ in range(2):
        rows = [
            submit(lane, prompt, max_tokens=120, **options)
            for lane, mix in zip(lanes, (first, second), strict=True)
            for options, prompt in zip(mix, PROMPTS, strict=False)
        ]
        while sum(lane.running_rows for lane in lanes) < len(rows):
            for lane in lanes:
                lane.step()
        assert len(lanes[0]._decoder.rows_by_batch()) == batches
        before = [lane.counters.report() for lane in lanes]
        while all(result.end is None for result in rows):
            for lane in lanes:
                lane.step()
        after = [lane.counters.report() for lane in lanes]
        run_until_idle(*lanes)
    for then, now in zip(before, after, strict=True):
        assert now.steps - then.steps > 12
        assert now.steps_ahead - then.steps_ahead >= 0.9 * (now.steps - then.steps)


@pytest.mark.parametrize("ends_first", [True, False], ids=["first row", "last row"])
@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_row_that_ends_while_a_step_is_open_leaves_nothing_of_that_step(
    checkpoint, make_lane, submit, draft_tokens: int, ends_first: bool
) -> None:
    lane = make_lane(draft_tokens=draft_tokens)
    options = {"draft_tokens": draft_tokens, "max_tokens": 50}
    count, story = "Count from 1 to 20.", "Tell me a story about a fox."

    def begin(*prompts: str) -> list[RowEvents]:
        """Submit rows that join the batch in this order."""
        rows = []
        for prompt in prompts:
            stop = (" 9",) if prompt == count else ()
            rows.append(submit(lane, prompt, stop=stop, **options))
            while not rows[-1].row.answer:
                lane.step()
        return rows

    if ends_first:
        ending, other = begin(count, story)
    else:
        other, ending = begin(story, count)
    was_open = False
    while ending.end is None:
        was_open = has_open_step(lane)
        lane.step()
    assert was_open
    assert isinstance(ending.end, Finished)
    answer = ending.row.answer
    assert ending.end.usage.completion_tokens == len(answer)
    run_until_idle(lane)
    report = lane.counters.report()
    assert report.completion_tokens == len(answer) + len(other.row.answer)
    assert_matches_reference(checkpoint, other)

    context = (*ending.row.prompt.tokens, *answer[:-1])
    prompt = (*context, *range(100, 108))
    following = submit(lane, PreparedPrompt(tokens=prompt, scope=""), **options)
    run_until_idle(lane)
    assert following.row.cached_tokens == len(context)
    assert_matches_reference(checkpoint, following)
