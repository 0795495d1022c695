"""Model families with other caches or other batching."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from tests.support import model_families as families
from tests.support.engine_lane import run_until_idle
from tests.support.failing_model import FailingPart
from workers.demo import CHECKPOINT
from workers.engine import engine as assembly
from workers.engine.model.target import Target
from workers.engine.startup.probes import probe_shared_rows
from workers.engine.startup.self_test import warm_up
from workers.engine.types import EngineSettings, LaneName, ModelUnusable

QUESTIONS = ["Hello", "Count from 1 to 20.", "Tell me a story about a fox."]
ANSWER_TOKENS = 12


@pytest.fixture
def make_family_lane(make_lane, checkpoint):
    """Return a function that makes a lane for another family, with the vocabulary of the demo."""

    def make(target: Target, **parts: Any):
        return make_lane(
            LaneName.VLM, target=target, head=None, eos=frozenset(), draft_tokens=0, **parts
        )

    return make


def greedy(target: Target, prompt: list[int]) -> list[int]:
    """Decode with the caches of the family, without the engine."""
    answer: list[int] = []
    caches, unread, read = target.new_caches(), list(prompt), 0
    while len(answer) < ANSWER_TOKENS:
        positions = mx.arange(read, read + len(unread))[None]
        read += len(unread)
        scores = target.scores(target.forward(mx.array([unread]), caches, positions), last=1)
        unread = [int(mx.argmax(scores[0, -1]).item())]
        answer += unread
    return answer


def check_answers(lane: Any, submit: Any, target: Target) -> None:
    """Run all questions at once; compare each answer with that of `greedy`."""
    results = [submit(lane, question, max_tokens=ANSWER_TOKENS) for question in QUESTIONS]
    run_until_idle(lane)

    for result in results:
        assert result.row.answer == greedy(target, list(result.row.prompt.tokens))


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        (families.tiny_llama, True),
        (families.tiny_llama_sliding_window, True),
        (families.tiny_qwen2_5_vl, True),
        (families.tiny_unbatched, False),
    ],
)
def test_rows_share_a_forward_pass_only_if_that_changes_no_scores(family, shared: bool) -> None:
    assert probe_shared_rows(family(1000)) is shared


@pytest.mark.parametrize("family", [families.tiny_llama_sliding_window, families.tiny_unbatched])
def test_rows_get_the_answers_of_their_family(make_family_lane, submit, checkpoint, family) -> None:
    target = family(checkpoint.vocabulary)
    target.supports_batching = probe_shared_rows(target)
    check_answers(make_family_lane(target), submit, target)


def test_a_row_that_cannot_join_a_batch_is_answered_with_the_caches_of_its_family(
    make_family_lane, submit, checkpoint
) -> None:
    """A wrong probe result costs time, and no answer."""
    target = families.tiny_unbatched(checkpoint.vocabulary)
    assert target.supports_batching, "not probed yet"
    check_answers(make_family_lane(target), submit, target)


def test_a_model_that_stores_the_positions_of_one_row_has_one_slot(checkpoint, monkeypatch) -> None:
    target = families.tiny_llama(checkpoint.vocabulary)
    target.stores_positions = True
    other = replace(checkpoint, target=target, head=None, eos=frozenset())
    monkeypatch.setattr(assembly, "load_checkpoint", lambda *_, **__: other)
    settings = EngineSettings(model=CHECKPOINT, served_name="other", max_rows=4)
    lanes = assembly.load_engine(settings).lanes
    assert {lane.counters.report().slots for lane in lanes} == {1}


def test_a_model_that_answers_no_question_at_the_start_is_rejected_in_one_line(
    make_lane, prompt_renderer, checkpoint
) -> None:
    """Every prompt fails, but the device check succeeds, so that the engine does not end."""
    target = FailingPart(checkpoint.target, lambda _, number: number % 2 == 1)
    with pytest.raises(ModelUnusable, match="answer") as raised:
        warm_up(make_lane(target=target), prompt_renderer, 0)

    assert "\n" not in str(raised.value)
    assert "forward" not in str(raised.value), "the message of the library is only logged"
