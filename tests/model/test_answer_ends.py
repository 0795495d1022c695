"""What ends an answer: the model, tokens of the request, and not before its fewest tokens."""

from __future__ import annotations

import pytest

from tests.support.engine_lane import run_until_idle
from workers.engine.types import FinishReason

QUESTION = "Count from 1 to 5."


@pytest.fixture
def answer_of(make_lane, submit):
    """Answer the question; with and without drafts the tokens must be the same."""

    def answer(*, max_tokens: int = 60, **options):
        rows = []
        for draft_tokens in (0, 3):
            lane = make_lane()
            result = submit(
                lane, QUESTION, max_tokens=max_tokens, draft_tokens=draft_tokens, **options
            )
            run_until_idle(lane)
            rows.append(result.row)
        plain, drafted = rows
        assert plain.answer == drafted.answer
        assert drafted.speculation.steps
        return drafted

    return answer


def test_an_answer_goes_on_after_the_end_of_the_model(answer_of, checkpoint) -> None:
    ended = answer_of()
    assert ended.finish_reason is FinishReason.STOP
    assert ended.answer[-1] in checkpoint.eos
    further = answer_of(ignore_eos=True, ends=frozenset())
    assert (further.finish_reason, len(further.answer)) == (FinishReason.LENGTH, 60)
    assert further.answer[: len(ended.answer)] == ended.answer


def test_no_end_comes_before_the_fewest_tokens(answer_of, checkpoint) -> None:
    shortest = len(answer_of().answer)
    fewest = shortest + 7
    longer = answer_of(min_tokens=fewest)
    assert len(longer.answer) > fewest or longer.finish_reason is FinishReason.STOP
    assert not checkpoint.eos.intersection(longer.answer[:fewest])
    assert len(longer.answer) >= fewest


def test_a_token_of_the_request_ends_the_answer(answer_of) -> None:
    whole = answer_of().answer
    stop = whole[len(whole) // 2]
    first = whole.index(stop)
    ended = answer_of(ends=frozenset({stop}))
    assert (ended.finish_reason, ended.answer) == (FinishReason.STOP, whole[: first + 1])
