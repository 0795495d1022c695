"""Errors while rows decode: the row at fault ends, the others continue with the same answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from policies.request.profile import Sampling
from tests.support.engine_lane import run_until_idle
from tests.support.failing_model import FailingPart, assert_matches_reference
from workers.engine.prefill import Prefill, prefill_chunk, start_prefill
from workers.engine.prefix_cache import PrefixCache
from workers.engine.thread import EngineThread
from workers.engine.types import (
    EngineStopped,
    Finished,
    GenerationFailed,
    InvalidGeneration,
    LaneName,
    Picture,
    Prompt,
)

QUESTIONS = ["Hello", "Count from 1 to 20.", "Tell me a story about a fox.", "Who are you?"]
# A bad value that raises at the first step after the prefill, when an answer exists to penalise.
POISON = Sampling(temperature=0, presence_penalty="much")  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_request_that_breaks_its_steps_ends_alone(
    checkpoint, make_lane, submit, draft_tokens
) -> None:
    lane = make_lane()
    early = [submit(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[:2]]
    for _ in range(4):
        lane.step()
    bad = submit(lane, "Tell me a story.", sampling=POISON, draft_tokens=draft_tokens)
    late = [submit(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[2:]]
    run_until_idle(lane)

    assert isinstance(bad.end, GenerationFailed)
    assert "much" not in str(bad.end), "the library's message stays in the log"
    for result in (*early, *late):
        assert isinstance(result.end, Finished)
        assert_matches_reference(checkpoint, result)
    report = lane.counters.report()
    assert report.requests == len(early) + len(late) + 1
    assert (report.running, report.waiting) == (0, 0)


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_row_that_cannot_join_ends_and_those_it_would_have_joined_go_on(
    checkpoint, make_lane, submit, draft_tokens
) -> None:
    lane = make_lane()
    early = [submit(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[1:3]]
    for _ in range(5):
        lane.step()
    bad = submit(lane, "Hello", draft_tokens=draft_tokens)
    bad.row.position_offset = "far"
    run_until_idle(lane)

    assert isinstance(bad.end, GenerationFailed)
    for result in early:
        assert isinstance(result.end, Finished)
        assert_matches_reference(checkpoint, result)
        assert (result.end.speculation.steps > 0) == (draft_tokens > 0), "it was not their head"
    assert lane.counters.report().bypass_counts == {}


def test_a_sampled_row_goes_on_as_if_nothing_had_failed_beside_it(make_lane, submit) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.95)
    alone_lane, lane = make_lane(LaneName.VLM), make_lane(LaneName.VLM)
    alone = submit(alone_lane, "Tell me a story.", sampling=sampling, seed=7)
    run_until_idle(alone_lane)
    beside = submit(lane, "Tell me a story.", sampling=sampling, seed=7)
    for _ in range(6):
        lane.step()
    bad = submit(lane, "Hello", sampling=POISON)
    run_until_idle(lane)

    assert isinstance(bad.end, GenerationFailed)
    assert beside.row.answer == alone.row.answer
    assert beside.text == alone.text


def test_a_prompt_with_other_marks_than_pictures_is_refused(
    make_lane, submit, prompt_renderer
) -> None:
    """It is an invalid request: a gateway must not count it against the worker."""
    picture = Picture(width_px=64, height_px=64, rgb=bytes(64 * 64 * 3))
    look = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    prepared = prompt_renderer.prepare(
        Prompt(text=prompt_renderer.chat([look]), pictures=(picture,))
    )
    (mark,) = {
        token for token in prepared.tokens if prompt_renderer.spell(token) == "<|image_pad|>"
    }
    lane = make_lane(LaneName.VLM)
    bad, good = submit(lane, "Hello"), submit(lane, "Hello")
    bad.row.prompt = replace(prepared, tokens=(*prepared.tokens, mark))
    run_until_idle(lane)

    assert isinstance(bad.end, InvalidGeneration)
    assert bad.end.param == "messages"
    assert isinstance(good.end, Finished)


def test_a_picture_and_its_answer_are_read_again_at_the_positions_they_had(
    make_lane, submit, prompt_renderer, checkpoint
) -> None:
    """Compared by hidden states: a short answer may survive wrong positions by luck."""
    picture = Picture(width_px=64, height_px=64, rgb=bytes([220, 30, 30]) * 64 * 64)
    look = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Hi"}]}
    prepared = prompt_renderer.prepare(
        Prompt(text=prompt_renderer.chat([look]), pictures=(picture,))
    )
    target, lane = checkpoint.target, make_lane(LaneName.VLM)

    def read(answer: list[int]) -> Prefill:
        row = submit(lane, [20]).row
        row.prompt, row.answer = prepared, answer
        prefill = start_prefill(row, target, None, PrefixCache(0))
        while not prefill.complete:
            prefill_chunk(prefill, target, 64)
        return prefill

    answer = list(range(30, 42))
    again = read(answer)
    first = read([])
    hidden = None
    for at, token in enumerate(answer[:-1]):
        position = len(prepared.tokens) + at + first.row.position_offset
        forward = target.forward(mx.array([[token]]), first.caches, mx.array([[position]]))
        hidden = forward.hidden

    assert first.row.position_offset < 0
    assert hidden is not None
    assert mx.allclose(again.last_hidden, hidden, atol=1e-3)


def test_an_answer_that_cannot_be_written_ends_alone(checkpoint, make_lane, submit) -> None:
    lane = make_lane()
    good, bad = submit(lane, QUESTIONS[1]), submit(lane, QUESTIONS[1])
    for _ in range(3):
        lane.step()
    bad.row.text = None
    run_until_idle(lane)

    assert isinstance(bad.end, GenerationFailed)
    assert_matches_reference(checkpoint, good)
    assert lane.counters.report().speculation.errors == 0


def test_a_lane_that_cannot_compute_one_token_raises(make_lane, submit, checkpoint) -> None:
    dead = False
    target = FailingPart(checkpoint.target, lambda *_: dead)
    lane = make_lane(target=target)
    running = submit(lane, "Count from 1 to 20.")
    for _ in range(3):
        lane.step()
    dead = True
    asked = submit(lane, "Hello")

    with pytest.raises(RuntimeError, match="forward"):
        run_until_idle(lane)
    assert isinstance(asked.end, GenerationFailed)
    assert running.end is None, "its end is that of the engine, which closes the lane"


def test_an_engine_that_can_compute_nothing_ends_its_thread_and_every_answer(
    make_lane, submit, checkpoint
) -> None:
    dead = False
    lane = make_lane(target=FailingPart(checkpoint.target, lambda *_: dead), max_rows=1)
    # The rows are added before the thread starts, so that everything after happens on it.
    results = [submit(lane, "Tell me a story.", max_tokens=5) for _ in range(3)]
    dead = True
    thread: EngineThread[None] = EngineThread(lambda: (None, (lane,)))
    thread.start()
    thread._thread.join(30)

    assert not thread.alive
    assert [type(result.end) for result in results] == [
        GenerationFailed,
        EngineStopped,
        EngineStopped,
    ]


def test_a_dying_engine_ends_new_requests_and_then_accepts_none(
    make_lane, submit, checkpoint
) -> None:
    late: list[Any] = []

    def die(*_: Any) -> bool:
        late.append(submit(late_lane, "Hello"))
        return True

    lane = make_lane(target=FailingPart(checkpoint.target, die), max_rows=1)
    submit(lane, "Tell me a story.", max_tokens=5)
    thread: EngineThread[None] = EngineThread(lambda: (None, (lane,)))
    late_lane = SimpleNamespace(
        has_head=lane.has_head, name=lane.name, add=lambda row: thread.submit(lane.name, row)
    )
    thread.start()
    thread._thread.join(30)

    assert not thread.alive
    assert late
    assert {type(result.end) for result in late} == {EngineStopped}
    with pytest.raises(EngineStopped):
        submit(late_lane, "Hello")
