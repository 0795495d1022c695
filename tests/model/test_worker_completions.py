"""Text completions of a real worker, read by the unmodified `openai` package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker, text_events
from tests.support.worker_process import SUPPRESS_END_TOKENS, RunningWorker, byte_token
from workers.engine.types import Delta, ScoredToken, TokenLogprob

ENDLESS: Any = {"temperature": 0, "max_tokens": 6, "logit_bias": SUPPRESS_END_TOKENS}


@pytest.fixture
async def openai_client(real_worker: RunningWorker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{real_worker.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_a_completion_defaults_to_sixteen_tokens_and_speculates_if_greedy(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    response = await openai_client.completions.create(
        model=real_worker.model, prompt="Once upon a time", temperature=0
    )
    assert response.object == "text_completion"
    assert response.id.startswith("cmpl-")
    assert response.usage is not None
    assert response.usage.completion_tokens <= 16
    assert response.model_extra is not None
    assert "speculative_decoding" in response.model_extra["metrics"]


async def test_a_completion_stream_has_the_text_and_usage_of_a_complete_answer(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    fields: Any = {"model": real_worker.model, "prompt": "Once", "seed": 5, "max_tokens": 12}
    complete = await openai_client.completions.create(**fields)
    stream = await openai_client.completions.create(
        stream=True, stream_options={"include_usage": True}, **fields
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == complete.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == complete.usage
    assert chunks[-2].choices[0].finish_reason == complete.choices[0].finish_reason


async def test_echo_prepends_the_prompt(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    fields: Any = {"model": real_worker.model, "prompt": "Once", "temperature": 0, "max_tokens": 4}
    plain = await openai_client.completions.create(**fields)
    echoed = await openai_client.completions.create(echo=True, **fields)
    stream = await openai_client.completions.create(echo=True, stream=True, **fields)
    text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert echoed.choices[0].text == "Once" + plain.choices[0].text == text


async def test_logprobs_have_the_completions_shape_and_equal_offsets_in_a_stream(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    fields: Any = {"model": real_worker.model, "prompt": "Once", "logprobs": 2, **ENDLESS}
    complete = (await openai_client.completions.create(**fields)).choices[0].logprobs
    stream = await openai_client.completions.create(stream=True, **fields)
    pieces = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
    assert complete is not None
    assert len(complete.tokens or []) == 6
    assert [len(top) for top in complete.top_logprobs or []] == [2] * 6
    assert [token for piece in pieces for token in piece.tokens or []] == complete.tokens
    assert [at for piece in pieces for at in piece.text_offset or []] == complete.text_offset


async def test_the_offset_does_not_advance_within_an_incomplete_character(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    response = await openai_client.completions.create(
        model=real_worker.model,
        prompt="Once",
        max_tokens=3,
        temperature=0,
        logprobs=1,
        logit_bias={str(byte_token(0xF0)): 100},
    )
    assert response.choices[0].text == "\ufffd" * 3
    assert response.choices[0].logprobs is not None
    assert response.choices[0].logprobs.text_offset == [0, 0, 0]
    assert response.choices[0].logprobs.tokens == ["\\xf0"] * 3


async def test_alternatives_that_are_incomplete_characters_have_distinct_names() -> None:
    likeliest = tuple(
        ScoredToken(token_id=byte, raw=bytes([byte]), logprob=-float(at))
        for at, byte in enumerate((0xF0, 0xE2))
    )
    token = TokenLogprob(token_id=0xF0, raw=b"\xf0", logprob=0.0, top=likeliest)
    engine = ScriptedEngine([Delta(text="", logprobs=(token,)), *text_events("\U0001f642")])
    body = {"model": "scripted", "prompt": "x", "logprobs": 2}
    async with serve_worker(make_worker(engine)) as url, httpx.AsyncClient(base_url=url) as http:
        response = await http.post("/v1/completions", json=body)
    (choice,) = response.json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\\xf0": 0.0, "\\xe2": -1.0}]
