"""A lane whose steps the test runs: rows join and leave, and the counts add up."""

from itertools import chain

import pytest

from paceline.request.profile import Bypass
from tests.support.engine_lane import run_until_idle
from tests.support.reference_decoder import assert_matches_reference
from workers.engine.types import Finished, FinishReason

QUESTIONS = [
    "Hello",
    "What is 2 + 2?",
    "Count from 1 to 20.",
    "Tell me a story about a fox.",
    "Who are you?",
    "Name three fruits.",
    "What is the capital of France?",
    "Tell me about the sea.",
]


def test_a_family_verified_token_by_token_gives_the_same_answers_and_counts(
    checkpoint, make_lane, submit, monkeypatch
) -> None:
    native = make_lane()
    expected = [submit(native, question) for question in QUESTIONS[:4]]
    run_until_idle(native)
    monkeypatch.setattr(checkpoint.target, "native_verify", False)
    stepwise = make_lane()
    actual = [submit(stepwise, question) for question in QUESTIONS[:4]]
    run_until_idle(stepwise)

    assert [result.row.answer for result in actual] == [result.row.answer for result in expected]
    assert [result.row.speculation.total() for result in actual] == [
        result.row.speculation.total() for result in expected
    ]


def test_a_full_lane_measures_when_a_rejected_request_may_return(make_lane, submit) -> None:
    now_s = 100.0
    lane = make_lane(max_rows=1, clock=lambda: now_s)
    submit(lane, "Count from 1 to 20.", max_tokens=40)
    lane.step()
    assert lane.running_rows == 1
    now_s = 200.0
    assert lane.retry_after_s == 1.0, "it has been full for no request"
    rows = [submit(lane, "Count from 1 to 20.", max_tokens=40).row for _ in range(3)]
    now_s = 210.0
    while lane.waiting_rows == 3:
        lane.step()
    assert lane.retry_after_s == 20.0, "two rows wait, and one leaves each 10 s"
    places = [lane.queue_place(row.generation) for row in rows]
    assert places == [None, (1, 10.0), (2, 20.0)]
    run_until_idle(lane)


def test_the_first_interval_of_a_full_lane_is_that_of_all_its_slots(make_lane, submit) -> None:
    now_s = 100.0
    lane = make_lane(max_rows=2, clock=lambda: now_s)
    for tokens in (30, 40):
        submit(lane, "Count from 1 to 20.", max_tokens=tokens)
    while lane.running_rows < 2:
        lane.step()
    for _ in range(2):
        row = submit(lane, "Count from 1 to 20.", max_tokens=40).row
    now_s = 120.0
    while lane.waiting_rows == 2:
        lane.step()
    assert lane.queue_place(row.generation) == (1, 10.0)
    run_until_idle(lane)


def test_a_long_prompt_delays_the_other_rows_by_one_chunk_at_a_time(make_lane, submit) -> None:
    lane = make_lane(chunk_tokens=32)
    early = submit(lane, list(range(20, 40)), max_tokens=200)
    lane.step()
    submit(lane, [20 + i % 700 for i in range(320)], max_tokens=4)

    for _ in range(9):
        before = len(early.row.answer)
        lane.step()
        assert early.end or len(early.row.answer) > before


LONG = [20 + i % 700 for i in range(640)]


@pytest.mark.parametrize("other_lane", [False, True])
def test_a_short_prompt_overtakes_a_long_one_in_either_lane(
    checkpoint, make_lanes, submit, other_lane: bool
) -> None:
    lanes = make_lanes(chunk_tokens=64)

    def step() -> None:
        for lane in lanes:
            lane.step()

    long = submit(lanes[0], LONG, max_tokens=24)
    step()
    short = submit(lanes[other_lane], "Hello", max_tokens=24)
    cancelled = submit(lanes[0], LONG[1:], max_tokens=24)
    step()
    assert short.row.answer
    assert not long.row.answer
    for _ in range(2):
        step()
    cancelled.row.cancelled = True
    while any(lane.busy for lane in lanes):
        before = len(short.row.answer)
        step()
        assert short.end or len(short.row.answer) > before, "it decodes while others are read"

    assert cancelled.end is None
    assert_matches_reference(checkpoint, long, short)


def test_a_row_that_waits_for_the_prefix_of_another_holds_up_nobody(make_lane, submit) -> None:
    lane = make_lane(chunk_tokens=64)
    system = "The red fox sees the old tree. " * 60
    first = submit(lane, "Hello", system=system)
    lane.step()
    second, other = submit(lane, "Who are you?", system=system), submit(lane, "Hello")
    lane.step()
    assert other.row.answer
    assert first.row.answer == second.row.answer == []
    run_until_idle(lane)

    assert second.row.cached_tokens == second.row.prompt.prefix.tokens


def test_a_cancelled_row_is_removed_after_one_step_without_effect_on_others(
    checkpoint, make_lane, submit
) -> None:
    lane = make_lane()
    remaining = submit(lane, QUESTIONS[3])
    cancelled = submit(lane, QUESTIONS[7])
    for _ in range(3):
        lane.step()
    cancelled.row.cancelled = True
    lane.step()
    assert cancelled.row not in chain(*lane.rows_by_batch())
    run_until_idle(lane)

    assert_matches_reference(checkpoint, remaining)
    assert cancelled.end is None


def test_a_cancelled_waiting_row_is_never_prefilled(make_lane, submit) -> None:
    lane = make_lane(max_rows=1)
    first = submit(lane, "Hello", max_tokens=8)
    second = submit(lane, "Hello", max_tokens=8)
    second.row.cancelled = True
    run_until_idle(lane)

    assert isinstance(first.end, Finished)
    assert second.row.answer == []
    assert lane.counters.report().requests == 2


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_max_tokens_inside_a_draft_is_exact(make_lane, ask, max_tokens) -> None:
    lane = make_lane(draft_tokens=4)
    results = ask(lane, "Count from 1 to 20.", max_tokens=max_tokens, draft_tokens=4)

    assert isinstance(results.end, Finished)
    assert results.end.usage.completion_tokens == len(results.row.answer) == max_tokens
    assert results.end.reason is FinishReason.LENGTH
    # A draft fits into the rest: the prefill has added one token, and the verify adds one.
    first = [step.drafted for step in results.end.steps[:1]]
    assert first == ([max_tokens - 2] if max_tokens > 2 else [])


def test_a_stop_string_inside_a_draft_shortens_its_step(make_lane, ask) -> None:
    lane = make_lane(draft_tokens=4)
    uncut = ask(lane, "Count from 1 to 20.", draft_tokens=4)
    cut_drafts = 0
    for at in range(1, len(uncut.text) - 2, 4):
        cut = ask(lane, "Count from 1 to 20.", draft_tokens=4, stop=(uncut.text[at : at + 2],))
        *before, last = cut.end.steps or [None]
        if last is None:
            continue
        tokens = len(cut.row.answer) - 1 - sum(each.accepted + 1 for each in before)
        step = uncut.end.steps[len(before)]
        cut_drafts += tokens <= step.accepted
        assert tuple(before) == uncut.end.steps[: len(before)]
        assert last == (step.drafted, min(step.accepted, tokens))
    assert cut_drafts


def test_several_choices_count_their_prompt_once(make_lane, submit, ask) -> None:
    lane = make_lane()
    first = submit(lane, "Hello", bypass=(Bypass.MULTIPLE_CHOICES,))
    second = ask(lane, "Hello", bypass=(Bypass.MULTIPLE_CHOICES,), further_choice=True)
    report = lane.counters.report()

    assert report.bypass_counts == {"multiple_choices": 1}
    assert (report.requests, report.prompt_tokens) == (1, len(first.row.prompt.tokens))
    assert report.completion_tokens == len(first.row.answer) + len(second.row.answer)
