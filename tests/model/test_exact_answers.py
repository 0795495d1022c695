"""Exact answers: the same in every bit, alone and beside other rows, of a real engine."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from paceline.request.profile import Sampling
from tests.support.engine_answers import generation_for
from tests.support.engine_lane import run_until_idle
from tests.support.worker_process import SUPPRESS_END_TOKENS
from workers.engine.decode.row import Row
from workers.engine.engine import Engine
from workers.engine.lane.memory import MemoryEstimate
from workers.engine.lane.scheduler import EXACT_CHUNK_TOKENS
from workers.engine.types import (
    Delta,
    Event,
    Finished,
    Generation,
    LaneName,
    Picture,
    Prompt,
    TokenLogprob,
)

GREEDY = Sampling(temperature=0)
ENDLESS = tuple((int(token), float(bias)) for token, bias in SUPPRESS_END_TOKENS.items())
LONG = "The fox ran over the hill, and the dog slept in the sun. " * 22
RED = Picture(width_px=64, height_px=64, rgb=bytes([220, 30, 30]) * 64 * 64)


@dataclass(frozen=True)
class Bits:
    """All of an answer that arithmetic decides."""

    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]
    """Of each token and of its alternatives, as hexadecimal floats."""
    cached_tokens: int
    drafted: int


def generation(engine: Engine, question: str, **changes: Any) -> Generation:
    fields = {"lane": LaneName.VLM, "max_tokens": 12, "top_logprobs": 5, "exact": True, **changes}
    return generation_for(engine, question, **fields)


async def bits(engine: Engine, wanted: Generation) -> Bits:
    logprobs: list[TokenLogprob] = []
    end: Event | None = None
    async with aclosing(engine.generate(wanted)) as events:
        async for event in events:
            if isinstance(event, Delta):
                logprobs += event.logprobs
            end = event
    assert isinstance(end, Finished)
    return Bits(
        tokens=tuple(one.token_id for one in logprobs),
        logprobs=tuple(each.logprob.hex() for one in logprobs for each in (one, *one.top)),
        cached_tokens=end.usage.cached_tokens,
        drafted=end.speculation.drafted,
    )


async def bits_in_company(engine: Engine, wanted: Generation, company: list[Generation]) -> Bits:
    """Return the answer to one generation while others decode, which outlive it."""
    async with AsyncExitStack() as stack:
        begun = []
        for other in company:
            events = await stack.enter_async_context(aclosing(engine.generate(other)))
            begun.append(asyncio.create_task(_first_delta(events)))
        await asyncio.gather(*begun)
        answer = await bits(engine, wanted)
        assert sum(lane.running for lane in engine.lane_reports()) >= len(company)
    return answer


async def _first_delta(events: object) -> None:
    async for event in events:  # type: ignore[attr-defined]
        if isinstance(event, Delta):
            return


def company_of(engine: Engine, rows: int, **changes: object) -> list[Generation]:
    """Return endless generations for both lanes, some of which draft and read long prompts."""
    endless = GREEDY._replace(logit_bias=ENDLESS)
    questions = (LONG, "Tell me a story.", "Count from 1 to 40.")
    return [
        generation(
            engine,
            questions[number % len(questions)],
            lane=tuple(LaneName)[number % 2],
            sampling=endless,
            max_tokens=20_000,
            top_logprobs=None,
            **{"exact": False, **changes},
        )
        for number in range(rows)
    ]


@pytest.mark.parametrize(
    ("question", "sampling"),
    [
        (LONG + "Tell me a story.", GREEDY),
        ("Tell me a story.", Sampling(temperature=1.2, top_p=0.9, seed=7)),
    ],
    ids=["greedy, of several chunks", "sampled"],
)
async def test_an_exact_answer_has_the_same_bits_alone_and_beside_seven_others(
    engine: Engine, question: str, sampling: Sampling
) -> None:
    wanted = generation(engine, question, sampling=sampling)
    alone = await bits(engine, wanted)
    assert len(alone.tokens) > 4
    # The prefix cache now has the prompt, and the measured pace of reading has changed.
    await bits(engine, replace(wanted, exact=False))

    company = [*company_of(engine, 5), *company_of(engine, 2, exact=True)]

    assert await bits_in_company(engine, wanted, company) == alone
    assert (alone.cached_tokens, alone.drafted) == (0, 0)


async def test_an_exact_answer_to_a_picture_has_the_same_bits_in_company(engine: Engine) -> None:
    message = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Hi"}]}
    prompt = Prompt(text=engine.prompts.chat([message]), pictures=(RED,), scope=None)
    wanted = generation(engine, "", prompt=prompt)

    alone = await bits(engine, wanted)

    assert await bits_in_company(engine, wanted, company_of(engine, 2)) == alone


@pytest.mark.parametrize(
    ("chunk_tokens", "read"), [(2048, [EXACT_CHUNK_TOKENS] * 2 + [88]), (200, [200] * 3)]
)
def test_a_prompt_of_an_exact_answer_is_read_in_chunks_of_one_size(
    make_lane, ask, monkeypatch, chunk_tokens: int, read: list[int]
) -> None:
    chunks: list[int] = []
    lane = make_lane(chunk_tokens=chunk_tokens)
    observe = lane._prefill_budget.observe

    def record(tokens: int, duration_s: float, **context: object) -> None:
        chunks.append(tokens)
        observe(tokens, duration_s, **context)

    monkeypatch.setattr(lane._prefill_budget, "observe", record)
    ask(lane, list(range(40, 640)), max_tokens=4, draft_tokens=0, exact=True)

    assert chunks == read


def test_memory_preempts_exact_answers_last_and_decodes_them_again(
    make_lane, submit, ask, monkeypatch
) -> None:
    lane, replayed = make_lane(), list[bool]()
    options = {"max_tokens": 24, "draft_tokens": 0, "top_logprobs": 2}
    alone = ask(lane, "Tell me a story.", exact=True, **options)
    rows = [
        submit(lane, "Tell me a story.", exact=exact, **options) for exact in (True, True, False)
    ]
    while lane.running_rows < len(rows) or len(rows[1].row.answer) < 5:
        lane.step()
    replay = Row.replay

    def record(row: Row) -> None:
        replayed.append(len(row.answer) > 1)
        replay(row)

    monkeypatch.setattr(Row, "replay", record)
    lane._admission.memory = MemoryEstimate(
        token_bytes=1, row_bytes=1, room_bytes=400
    )  # for one row
    run_until_idle(lane)

    assert [isinstance(row.end, Finished) for row in rows] == [True] * 3
    for row in rows[:2]:
        assert row.row.answer == alone.row.answer
        assert row.logprobs == alone.logprobs
    assert any(replayed), "a row lost its caches in the middle of its answer"
