"""What raises in the middle of serving: who ends by it, who goes on, and what is counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from policies.profile import Bypass, Sampling
from tests.engine.conftest import run
from tests.engine.reference import greedy_alone, near_tie
from workers.engine.draft_length import SAMPLES
from workers.engine.drafting_head import ERRORS_IN_A_ROW
from workers.engine.loop import EngineThread
from workers.engine.requests import EngineStopped, Finished, GenerationFailed, LaneName
from workers.engine.seam import MtpHead

QUESTIONS = ["Hello", "Count from 1 to 20.", "Tell me a story about a fox.", "Who are you?"]
SYSTEM = "You are the help desk of a small shop. " + "The red fox sees the old tree. " * 20
# A bad value that is found out once there is an answer to punish: not in the prefill.
POISON = Sampling(temperature=0, presence_penalty="much")  # type: ignore[arg-type]


class Failing:
    """A part of a checkpoint that raises in the calls that `when` names by method and number."""

    def __init__(self, part: Any, when: Callable[[str, int], bool]) -> None:
        self._part = part
        self._when = when
        self._calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        got = getattr(self._part, name)
        if name not in ("forward", "draft"):
            return got

        def call(*arguments: Any, **named: Any) -> Any:
            number = self._calls[name] = self._calls.get(name, 0) + 1
            if self._when(name, number):
                raise RuntimeError(f"{name} number {number}")
            return got(*arguments, **named)

        return call


@pytest.fixture
def head(checkpoint) -> MtpHead | None:
    return checkpoint.head  # type: ignore[no-any-return]


def assert_right(checkpoint, one) -> None:
    prompt, answer = one.row.prompt.tokens, one.row.answer
    alone = greedy_alone(checkpoint, prompt, one.row.max_tokens)
    assert answer == alone or near_tie(checkpoint, prompt, answer, alone)


@pytest.mark.parametrize(
    ("method", "first"),
    [("draft", 1), ("draft", 2), *(("forward", first) for first in (1, 2, 5, 6, 7, 11))],
)
def test_rows_go_on_plainly_and_exactly_when_the_head_raises(
    checkpoint, make_lane, ask, method, first
) -> None:
    lane = make_lane(head=Failing(checkpoint.head, lambda name, n: name == method and n >= first))
    heard = [ask(lane, question) for question in QUESTIONS]
    run(lane)

    for one in heard:
        assert isinstance(one.end, Finished)
        assert_right(checkpoint, one)
        counts = one.end.speculation
        assert counts.drafted == counts.accepted + counts.rejected + counts.errors
    report = lane.counters.report()
    assert 1 <= report.bypass_counts[Bypass.HEAD_UNHEALTHY] <= len(heard)
    if method == "draft":
        assert report.speculation.errors > 0


def test_a_head_that_goes_on_raising_is_used_no_more_and_the_gateway_hears_of_it(
    checkpoint, make_lane, ask, head
) -> None:
    calls: list[str] = []

    def drafting(name: str, _: int) -> bool:
        calls.append(name)
        return name == "draft"

    lane = make_lane(head=Failing(head, drafting))
    heard = []
    while lane.counters.head_healthy:
        heard.append(ask(lane, "Count from 1 to 20."))
        run(lane)
    before = len(calls)
    last = ask(lane, "Count from 1 to 20.", bypass=lane.bypasses(heard[0].row.generation))
    run(lane)
    report = lane.counters.report()

    assert len(heard) == ERRORS_IN_A_ROW
    assert len(calls) == before, "neither drafted with nor read along with prompts"
    assert last.row.answer == heard[0].row.answer
    assert (report.head_healthy, report.effective_draft_tokens) == (False, 0)
    assert report.bypass_counts == {Bypass.HEAD_UNHEALTHY: len(heard) + 1}
    assert report.speculation.errors == report.speculation.drafted == 2 * len(heard)


def test_errors_far_apart_leave_the_head_in_use(make_lane, ask, head) -> None:
    troubled = False
    lane = make_lane(head=Failing(head, lambda *_: troubled))
    heard = []
    for number in range(2 * ERRORS_IN_A_ROW):
        troubled = number % 2 == 0
        heard.append(ask(lane, "Count from 1 to 20."))
        run(lane)

    assert lane.counters.report().head_healthy
    assert lane.counters.report().bypass_counts == {Bypass.HEAD_UNHEALTHY: ERRORS_IN_A_ROW}
    assert [one.end.speculation.steps > 0 for one in heard] == [False, True] * ERRORS_IN_A_ROW
    assert len({tuple(one.row.answer) for one in heard}) == 1


def test_rows_left_behind_go_on_plainly_when_the_head_cannot_catch_up(
    checkpoint, make_lane, ask, head
) -> None:
    calls_to_error = 1 << 30

    def counted(*_: object) -> bool:
        nonlocal calls_to_error
        calls_to_error -= 1
        return calls_to_error == 0

    lane = make_lane(head=Failing(head, counted), clock=itertools.count().__next__)
    for k, cost_s in ((0, 1.0), (1, 9.0), (2, 9.0)):  # drafting does not pay for three rows
        for _ in range(SAMPLES):
            lane._decoding._draft_length.observe(3, k, cost_s)
    early = [ask(lane, question, adaptive=True) for question in QUESTIONS[1:]]
    for _ in range(8):
        lane.step()
    calls_to_error = 2  # the newcomer's prompt is read, then the head catches up with the others
    late = ask(lane, QUESTIONS[1])
    run(lane)

    for one in (*early, late):
        assert isinstance(one.end, Finished)
        assert_right(checkpoint, one)
    assert late.end.speculation.steps > 0
    assert lane.counters.report().bypass_counts[Bypass.HEAD_UNHEALTHY] == len(early)


def test_rows_admitted_before_the_head_was_given_up_are_counted(make_lane, ask, head) -> None:
    lane = make_lane(head=Failing(head, lambda name, _: name == "draft"), max_rows=1)
    heard = [ask(lane, "Hello") for _ in range(ERRORS_IN_A_ROW + 3)]
    run(lane)

    assert lane.counters.report().bypass_counts == {Bypass.HEAD_UNHEALTHY: len(heard)}


def test_a_head_that_fails_on_a_prompt_keeps_nothing_of_it_for_others(
    make_lane, ask, head, checkpoint
) -> None:
    lane = make_lane(head=Failing(head, lambda name, n: (name, n) == ("forward", 1)))
    first, second, third = (ask(lane, "Hello", system=SYSTEM) for _ in range(3))
    run(lane)

    assert [one.row.cached_tokens > 0 for one in (first, second, third)] == [False, False, True]
    assert first.row.answer == second.row.answer == third.row.answer
    assert third.end.speculation.steps > 0


def test_a_lane_whose_head_is_unhealthy_still_shares_system_prompts(make_lane, ask) -> None:
    lane = make_lane()
    lane.counters.head_healthy = False
    plain = [ask(lane, "Hello", system=SYSTEM) for _ in range(2)]
    run(lane)
    lane.counters.head_healthy = True
    drafting = [ask(lane, "Hello", system=SYSTEM) for _ in range(2)]
    run(lane)

    cached = [one.row.cached_tokens > 0 for one in (*plain, *drafting)]
    assert cached == [False, True, False, True], "one without the head is of no use to a draft"
    assert len({tuple(one.row.answer) for one in (*plain, *drafting)}) == 1


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_request_that_breaks_its_rounds_ends_alone(
    checkpoint, make_lane, ask, draft_tokens
) -> None:
    lane = make_lane()
    early = [ask(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[:2]]
    for _ in range(4):
        lane.step()
    bad = ask(lane, "Tell me a story.", sampling=POISON, draft_tokens=draft_tokens)
    late = [ask(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[2:]]
    run(lane)

    assert isinstance(bad.end, GenerationFailed)
    assert "much" not in str(bad.end), "the library's words stay in the log"
    for one in (*early, *late):
        assert isinstance(one.end, Finished)
        assert_right(checkpoint, one)
    report = lane.counters.report()
    assert report.requests == len(early) + len(late) + 1
    assert (report.running, report.waiting) == (0, 0)


def test_a_sampled_row_goes_on_as_if_nothing_had_failed_beside_it(make_lane, ask) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.95)
    alone_lane, lane = make_lane(LaneName.VLM), make_lane(LaneName.VLM)
    alone = ask(alone_lane, "Tell me a story.", sampling=sampling, seed=7)
    run(alone_lane)
    beside = ask(lane, "Tell me a story.", sampling=sampling, seed=7)
    for _ in range(6):
        lane.step()
    bad = ask(lane, "Hello", sampling=POISON)
    run(lane)

    assert isinstance(bad.end, GenerationFailed)
    assert beside.row.answer == alone.row.answer
    assert beside.text == alone.text


def test_an_answer_that_cannot_be_written_ends_alone(checkpoint, make_lane, ask) -> None:
    lane = make_lane()
    good, bad = ask(lane, QUESTIONS[1]), ask(lane, QUESTIONS[1])
    for _ in range(3):
        lane.step()
    bad.row.text = None
    run(lane)

    assert isinstance(bad.end, GenerationFailed)
    assert_right(checkpoint, good)
    assert lane.counters.report().speculation.errors == 0


def test_a_lane_that_cannot_compute_one_token_raises_instead_of_failing_everybody(
    make_lane, ask, checkpoint
) -> None:
    dead = False
    target = Failing(checkpoint.target, lambda *_: dead)
    lane = make_lane(target=target)
    running = ask(lane, "Count from 1 to 20.")
    for _ in range(3):
        lane.step()
    dead = True
    asked = ask(lane, "Hello")

    with pytest.raises(RuntimeError, match="forward"):
        run(lane)
    assert isinstance(asked.end, GenerationFailed)
    assert running.end is None, "its end is that of the engine, which closes the lane"


def test_an_engine_that_can_compute_nothing_ends_its_thread_and_every_answer(
    make_lane, ask, checkpoint
) -> None:
    dead = False
    lane = make_lane(target=Failing(checkpoint.target, lambda *_: dead), max_rows=1)
    # Asked before the thread runs: all that follows happens on it.
    heard = [ask(lane, "Tell me a story.", max_tokens=5) for _ in range(3)]
    dead = True
    thread: EngineThread[None] = EngineThread(lambda: (None, (lane,)))
    thread.start()
    thread._thread.join(30)

    assert not thread.alive
    assert [type(one.end) for one in heard] == [GenerationFailed, EngineStopped, EngineStopped]
