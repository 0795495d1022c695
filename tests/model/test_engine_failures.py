"""Errors during decoding: the failed row ends, the others continue with the same answers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from paceline.request.profile import Sampling
from tests.support.engine_lane import run_until_idle
from tests.support.failing_model import FailingPart
from tests.support.reference_decoder import assert_matches_reference
from workers.engine.decode.prefill import Prefill, forward_chunk, start_prefill
from workers.engine.lane.thread import EngineThread
from workers.engine.prefix.cache import PrefixCache
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
def test_only_the_row_whose_request_raises_in_a_step_ends(
    checkpoint, make_lane, submit, draft_tokens
) -> None:
    lane = make_lane()
    early = [submit(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[:2]]
    for _ in range(4):
        lane.step()
    failing = submit(lane, "Tell me a story.", sampling=POISON, draft_tokens=draft_tokens)
    late = [submit(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[2:]]
    run_until_idle(lane)

    assert isinstance(failing.end, GenerationFailed)
    assert "much" not in str(failing.end), "the message of the library is only logged"
    assert_matches_reference(checkpoint, *early, *late)
    report = lane.counters.report()
    assert report.requests == len(early) + len(late) + 1
    assert (report.running, report.waiting) == (0, 0)


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_row_that_cannot_join_ends_and_the_batch_continues(
    checkpoint, make_lane, submit, draft_tokens
) -> None:
    lane = make_lane()
    early = [submit(lane, question, draft_tokens=draft_tokens) for question in QUESTIONS[1:3]]
    for _ in range(5):
        lane.step()
    failing = submit(lane, "Hello", draft_tokens=draft_tokens)
    failing.row.position_offset = "far"
    run_until_idle(lane)

    assert isinstance(failing.end, GenerationFailed)
    assert_matches_reference(checkpoint, *early)
    drafted = [result.end.speculation.steps > 0 for result in early]
    assert drafted == [draft_tokens > 0] * 2, "the error was none of the head"
    assert lane.counters.report().bypass_counts == {}


def test_a_prompt_whose_placeholders_do_not_match_its_pictures_is_rejected(
    make_lane, submit, prompt_renderer
) -> None:
    """The error is that of an invalid request, which a gateway does not count as a failure."""
    picture = Picture(width_px=64, height_px=64, rgb=bytes(64 * 64 * 3))
    message = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
    }
    prepared = prompt_renderer.prepare(
        Prompt(text=prompt_renderer.chat([message]), pictures=(picture,))
    )
    (placeholder,) = {
        token
        for token in prepared.tokens
        if prompt_renderer._tokenizer.decode([token]) == "<|image_pad|>"
    }
    lane = make_lane(LaneName.VLM)
    failing, healthy = submit(lane, "Hello"), submit(lane, "Hello")
    failing.row.prompt = replace(prepared, tokens=(*prepared.tokens, placeholder))
    run_until_idle(lane)

    assert isinstance(failing.end, InvalidGeneration)
    assert failing.end.param == "messages"
    assert isinstance(healthy.end, Finished)


def test_a_repeated_prefill_of_a_picture_uses_the_same_positions(
    make_lane, submit, prompt_renderer, checkpoint
) -> None:
    """Hidden states are compared: a short answer may be equal by chance at wrong positions."""
    picture = Picture(width_px=64, height_px=64, rgb=bytes([220, 30, 30]) * 64 * 64)
    message = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Hi"}]}
    prepared = prompt_renderer.prepare(
        Prompt(text=prompt_renderer.chat([message]), pictures=(picture,))
    )
    target, lane = checkpoint.target, make_lane(LaneName.VLM)

    def read(answer: list[int]) -> Prefill:
        row = submit(lane, [20]).row
        row.prompt, row.answer = prepared, answer
        prefill = start_prefill(row, target, None, PrefixCache(0))
        while not prefill.complete:
            forward_chunk(prefill, target, 64)
        return prefill

    answer = list(range(30, 42))
    again = read(answer)
    first = read([])
    hidden = None
    for at, token in enumerate(answer[:-1]):
        position = len(prepared.tokens) + at + first.row.position_offset
        hidden = target.forward(mx.array([[token]]), first.caches, mx.array([[position]]))

    assert first.row.position_offset < 0
    assert hidden is not None
    assert mx.allclose(again.last_hidden, hidden, atol=1e-3)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_only_the_row_whose_text_cannot_be_decoded_ends(checkpoint, make_lane, submit, at) -> None:
    lane = make_lane()
    healthy = [submit(lane, QUESTIONS[1]) for _ in range(3)]
    failing = healthy.pop(at)
    for _ in range(3):
        lane.step()
    failing.row.text = None
    run_until_idle(lane)

    assert isinstance(failing.end, GenerationFailed)
    assert_matches_reference(checkpoint, *healthy)
    assert lane.counters.report().speculation.errors == 0


def test_an_engine_whose_device_failed_ends_its_thread_and_every_answer(
    make_lane, submit, checkpoint
) -> None:
    failed = False
    lane = make_lane(target=FailingPart(checkpoint.target, lambda *_: failed), max_rows=1)
    # The rows are added before the thread starts, so that everything after happens on it.
    results = [submit(lane, "Tell me a story.", max_tokens=5) for _ in range(3)]
    failed = True
    thread = EngineThread()
    thread.start(lambda: (None, (lane,)))
    thread._thread.join(30)

    assert not thread.alive
    assert [type(result.end) for result in results] == [
        GenerationFailed,
        EngineStopped,
        EngineStopped,
    ]


def test_a_failing_engine_ends_new_requests_and_then_rejects_all(
    make_lane, submit, checkpoint
) -> None:
    late: list[Any] = []

    def fail_after_submitting(*_: Any) -> bool:
        late.append(submit(late_lane, "Hello"))
        return True

    lane = make_lane(target=FailingPart(checkpoint.target, fail_after_submitting), max_rows=1)
    submit(lane, "Tell me a story.", max_tokens=5)
    thread = EngineThread()
    late_lane = SimpleNamespace(
        ends=checkpoint.eos,
        has_head=lane.has_head,
        name=lane.name,
        add=lambda row: thread.submit(lambda: lane.add(row)),
    )
    thread.start(lambda: (None, (lane,)))
    thread._thread.join(30)

    assert not thread.alive
    assert late
    assert {type(result.end) for result in late} == {EngineStopped}
    with pytest.raises(EngineStopped):
        submit(late_lane, "Hello")
