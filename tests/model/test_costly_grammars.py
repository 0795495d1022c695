"""Grammars whose masks cost more than their share: they end their own row, and nobody else's."""

import itertools
import json

import httpx
import pytest

from paceline.request.constraint import Constraint, ConstraintKind
from paceline.request.profile import Sampling
from tests.support import engine_answers
from tests.support.worker_process import SUPPRESS_END_TOKENS, RunningWorker
from workers.engine.engine import Engine
from workers.engine.text import grammar
from workers.engine.text.grammar_source import LIMITS
from workers.engine.types import Finished, FinishReason, InvalidGeneration

AMBIGUOUS = "start: s\ns: s s | A\nA: /[a-z ]/"
"""Each letter may end or begin any number of its rules: the masks become dearer with each token."""
LETTERS = "start: l*\nl: /[a-z ]/"


async def answer(engine: Engine, rules: str, tokens: int = 60) -> Finished:
    _, end = await engine_answers.answer(
        engine,
        "Tell me a story.",
        sampling=Sampling(logit_bias=tuple((end, -100.0) for end in engine.checkpoint.eos)),
        max_tokens=tokens,
        constraint=Constraint(ConstraintKind.GRAMMAR, rules, "guided_grammar"),
    )
    return end


async def test_c22_a_costly_grammar_ends_its_row_with_an_error_that_names_the_field(engine) -> None:
    with pytest.raises(InvalidGeneration, match="too costly") as refused:
        await answer(engine, AMBIGUOUS, 400)
    assert (refused.value.param, refused.value.code) == ("guided_grammar", "constraint_too_costly")
    assert (await answer(engine, LETTERS)).reason is FinishReason.LENGTH
    assert LIMITS.step_max_items < 5000


async def test_c22_a_row_ends_once_its_masks_have_taken_more_than_their_share(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the threads that compute them."""
    times_s = itertools.count(step=grammar._SHARE_S / 4)
    monkeypatch.setattr(grammar, "thread_time", lambda: next(times_s))
    assert (await answer(engine, LETTERS)).reason is FinishReason.LENGTH
    times_s = itertools.count(step=1.0)
    with pytest.raises(InvalidGeneration, match="too costly"):
        await answer(engine, LETTERS)


@pytest.mark.parametrize("stream", [False, True])
def test_c22_a_costly_grammar_is_the_fault_of_its_request(demo, *, stream) -> None:
    """Its worker is not ejected, also after an answer that has begun."""
    body = {
        "model": demo.model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "guided_grammar": AMBIGUOUS,
        "max_tokens": 400,
        "temperature": 0,
        "logit_bias": SUPPRESS_END_TOKENS,
        "stream": stream,
    }
    for _ in range(6):
        response = demo.gateway.client.post("/v1/chat/completions", json=body)
        if stream:
            *_, last = response.text.removesuffix("\n\n").split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert response.status_code == 400, response.text
            error = response.json()["error"]
        assert (error["param"], error["code"]) == ("guided_grammar", "constraint_too_costly")
    assert demo.gateway.status()["workers"]["demo"]["state"] == "ready"


def test_constraints_of_many_rows_are_computed_at_once(real_worker: RunningWorker) -> None:
    """A request with several choices has a matcher of its own for each."""
    body = {
        "model": real_worker.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "guided_choice": ["red fox", "old tree"],
        "n": 4,
        "seed": 1,
    }
    answer = httpx.post(f"{real_worker.url}/v1/chat/completions", json=body, timeout=60).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert set(texts) <= {"red fox", "old tree"}
    assert len(texts) == 4
