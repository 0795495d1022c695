"""An error of the MTP head costs drafts and no answers, in whichever call it occurs."""

import itertools

import pytest

from paceline.request.profile import Bypass
from tests.support.engine_lane import run_until_idle
from tests.support.failing_model import FailingPart
from tests.support.reference_decoder import assert_matches_reference
from workers.engine.decode.draft_head import MAX_CONSECUTIVE_ERRORS
from workers.engine.decode.draft_length import SAMPLES
from workers.engine.model.mtp_head import MtpHead

QUESTIONS = ["Hello", "Count from 1 to 20.", "Tell me a story about a fox.", "Who are you?"]
SYSTEM = "You are the help desk of a small shop. " + "The red fox sees the old tree. " * 20


@pytest.fixture
def head(checkpoint) -> MtpHead | None:
    return checkpoint.head


def make_drafts_of_three_rows_costly(lane) -> None:
    for k, cost_s in ((0, 1.0), (1, 9.0), (2, 9.0)):
        for _ in range(SAMPLES):
            lane._decoder._draft_length.observe_cost(3, k, cost_s)


@pytest.mark.parametrize(
    ("method", "first"),
    [("draft", 1), ("draft", 2), *(("forward", first) for first in (1, 5, 6, 11))],
)
def test_rows_continue_without_drafts_and_with_equal_answers_when_the_head_raises(
    checkpoint, make_lane, submit, method, first
) -> None:
    lane = make_lane(
        head=FailingPart(checkpoint.head, lambda name, n: name == method and n >= first)
    )
    results = [submit(lane, question) for question in QUESTIONS]
    run_until_idle(lane)

    assert_matches_reference(checkpoint, *results)
    for result in results:
        counts = result.end.speculation
        assert counts.drafted == counts.accepted + counts.rejected + counts.errors
    report = lane.counters.report()
    assert 1 <= report.bypass_counts[Bypass.HEAD_UNHEALTHY] <= len(results)
    if method == "draft":
        assert report.speculation.errors > 0


def test_a_head_that_raises_repeatedly_is_disabled_and_reported(
    checkpoint, make_lane, submit, ask, head
) -> None:
    calls: list[str] = []

    def drafting(name: str, _: int) -> bool:
        calls.append(name)
        return name == "draft"

    lane = make_lane(head=FailingPart(head, drafting))
    results = []
    while lane.counters.head_healthy:
        results.append(submit(lane, "Count from 1 to 20."))
        run_until_idle(lane)
    before = len(calls)
    last = ask(lane, "Count from 1 to 20.", bypass=lane.bypass_reasons(results[0].row.generation))
    report = lane.counters.report()

    assert len(results) == MAX_CONSECUTIVE_ERRORS
    assert len(calls) == before, "the lane neither drafts with the head nor prefills it"
    assert last.row.answer == results[0].row.answer
    assert (report.head_healthy, report.effective_draft_tokens) == (False, 0)
    assert report.bypass_counts == {Bypass.HEAD_UNHEALTHY: len(results) + 1}
    assert report.speculation.errors == report.speculation.drafted == 2 * len(results)


def test_rare_errors_do_not_disable_the_head(make_lane, submit, head) -> None:
    failing = False
    lane = make_lane(head=FailingPart(head, lambda *_: failing))
    results = []
    for number in range(2 * MAX_CONSECUTIVE_ERRORS):
        failing = number % 2 == 0
        results.append(submit(lane, "Count from 1 to 20."))
        run_until_idle(lane)

    assert lane.counters.report().head_healthy
    assert lane.counters.report().bypass_counts == {Bypass.HEAD_UNHEALTHY: MAX_CONSECUTIVE_ERRORS}
    assert [result.end.speculation.steps > 0 for result in results] == [
        False,
        True,
    ] * MAX_CONSECUTIVE_ERRORS
    assert len({tuple(result.row.answer) for result in results}) == 1


def test_steps_without_the_head_neither_reset_its_errors_nor_store_its_acceptance_for_good(
    make_lane, submit, ask, head
) -> None:
    lane = make_lane(
        head=FailingPart(head, lambda name, _: name == "draft"), clock=itertools.count().__next__
    )
    make_drafts_of_three_rows_costly(lane)
    lengths = lane._decoder._draft_length
    for _ in range(100):
        lengths.observe_acceptance(2, 0, [])
    promised = lengths.promised_tokens()[2]
    for _ in range(MAX_CONSECUTIVE_ERRORS):
        assert lane.counters.head_healthy
        ask(lane, "Count from 1 to 20.")
        plain = [submit(lane, "Hello", adaptive=True, max_tokens=8) for _ in range(3)]
        run_until_idle(lane)
        assert {result.end.speculation.drafted for result in plain} == {0}

    assert not lane.counters.head_healthy
    assert lengths.promised_tokens()[2] > promised, "a later answer may accept more"


def test_rows_continue_without_drafts_when_the_head_cannot_read_its_backlog(
    checkpoint, make_lane, submit, ask, head
) -> None:
    calls_to_error = 1 << 30

    def countdown(*_: object) -> bool:
        nonlocal calls_to_error
        calls_to_error -= 1
        return calls_to_error == 0

    lane = make_lane(head=FailingPart(head, countdown), clock=itertools.count().__next__)
    make_drafts_of_three_rows_costly(lane)
    early = [submit(lane, question, adaptive=True) for question in QUESTIONS[1:]]
    for _ in range(8):
        lane.step()
    calls_to_error = 2  # first the prefill of the new row, then the backlog of the earlier ones
    late = ask(lane, QUESTIONS[1])

    assert_matches_reference(checkpoint, *early, late)
    assert late.end.speculation.steps > 0
    assert lane.counters.report().bypass_counts[Bypass.HEAD_UNHEALTHY] == len(early)


def test_rows_admitted_before_the_head_was_disabled_are_counted(make_lane, submit, head) -> None:
    lane = make_lane(head=FailingPart(head, lambda name, _: name == "draft"), max_rows=1)
    results = [submit(lane, "Hello") for _ in range(MAX_CONSECUTIVE_ERRORS + 3)]
    run_until_idle(lane)

    assert lane.counters.report().bypass_counts == {Bypass.HEAD_UNHEALTHY: len(results)}


def test_a_prefix_is_not_cached_if_the_head_failed_on_its_prompt(
    make_lane, submit, head, checkpoint
) -> None:
    lane = make_lane(head=FailingPart(head, lambda name, n: (name, n) == ("forward", 1)))
    first, second, third = (submit(lane, "Hello", system=SYSTEM) for _ in range(3))
    run_until_idle(lane)

    assert [result.row.cached_tokens > 0 for result in (first, second, third)] == [
        False,
        False,
        True,
    ]
    assert first.row.answer == second.row.answer == third.row.answer
    assert third.end.speculation.steps > 0


def test_a_lane_with_an_unhealthy_head_still_shares_system_prompts(make_lane, submit) -> None:
    lane = make_lane()
    lane.counters.head_healthy = False
    plain = [submit(lane, "Hello", system=SYSTEM) for _ in range(2)]
    run_until_idle(lane)
    lane.counters.head_healthy = True
    drafting = [submit(lane, "Hello", system=SYSTEM) for _ in range(2)]
    run_until_idle(lane)

    cached = [result.row.cached_tokens > 0 for result in (*plain, *drafting)]
    assert cached == [False, True, False, True], (
        "a drafting row cannot use a prefix without the state of the head"
    )
    assert len({tuple(result.row.answer) for result in (*plain, *drafting)}) == 1
