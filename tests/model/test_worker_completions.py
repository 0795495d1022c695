"""Text completions of a real worker, read by the unmodified `openai` package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from tokenizers import Tokenizer

from tests.support.maker_types import CHAT_OURS, read_strictly
from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker, text_events
from tests.support.worker_process import SUPPRESS_END_TOKENS, RunningWorker, byte_token
from workers.demo import CHECKPOINT
from workers.engine.types import Delta, ScoredToken, TokenLogprob

UNFINISHED = b'"finish_reason":null'
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
        model=real_worker.model,
        prompt="Once upon a time",
        temperature=0,
        extra_body={"draft_tokens": 2},
    )
    assert response.object == "text_completion"
    assert response.id.startswith("cmpl-")
    assert response.usage is not None
    assert response.usage.completion_tokens <= 16
    assert response.model_extra is not None
    assert "speculative_decoding" in response.model_extra["metrics"]


@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"n": 2}, {"stop": ["e"], "echo": True}])
async def test_completions_and_chunks_are_of_openais_own_type(
    real_worker: RunningWorker, fields: dict[str, Any]
) -> None:
    url = f"{real_worker.url}/v1/completions"
    body = {"model": real_worker.model, "prompt": "Once upon a time", **fields}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(timeout=60) as client:
        whole = await client.post(url, json=body)
        stream = await client.post(url, json=streamed)
    completion = read_strictly(Completion, whole.content, CHAT_OURS)
    assert len(completion.choices) == fields.get("n", 1)
    *events, done = stream.content.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    chunks = [
        # OpenAI sends null before the end too, which the type of the package does not say.
        read_strictly(Completion, one[6:].replace(UNFINISHED, b'"finish_reason":"stop"'), CHAT_OURS)
        for one in events
        if not one.startswith(b":")
    ]
    assert chunks[-1].usage is not None


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


async def test_many_prompts_get_the_answers_that_each_gets_alone(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    """Choices come prompt by prompt, and a prompt counts once however many answers it has."""
    fields: Any = {"model": real_worker.model, "seed": 3, "max_tokens": 5, "n": 2}
    prompts = ["Once upon", "Two and two"]
    alone = [await openai_client.completions.create(prompt=one, **fields) for one in prompts]
    together = await openai_client.completions.create(prompt=prompts, **fields)
    stream = await openai_client.completions.create(prompt=prompts, stream=True, **fields)
    streamed = [""] * 4
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text

    texts = [choice.text for one in alone for choice in one.choices]
    assert [choice.text for choice in together.choices] == texts == streamed
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.usage is not None
    usages = [one.usage for one in alone if one.usage]
    assert together.usage.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert together.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)


async def test_the_log_probabilities_of_a_prompt_are_those_that_its_tokens_had_as_an_answer(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    """As `lm-eval` asks for them: a prompt in tokens, `echo`, `logprobs`, and no answer."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    fields: Any = {"model": real_worker.model, "temperature": 0, "logprobs": 1}
    prompt = tokenizer.encode("Once").ids
    answer = await openai_client.completions.create(prompt=prompt, **fields)
    written = answer.choices[0]
    assert written.logprobs is not None
    spelled = written.logprobs.tokens or []
    ids = [tokenizer.token_to_id(one) or tokenizer.encode(one).ids[0] for one in spelled]
    tokens = [*prompt, *ids]

    scoring: Any = {**fields, "prompt": tokens, "echo": True, "max_tokens": 0}
    scored = await openai_client.completions.create(**scoring)
    stream = await openai_client.completions.create(stream=True, **scoring)
    pieces = [chunk.choices[0] async for chunk in stream]

    (choice,) = scored.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert (choice.text, choice.finish_reason) == (tokenizer.decode(tokens, False), "length")
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(tokens), 0)
    values: Any = logprobs.token_logprobs
    tops: Any = logprobs.top_logprobs
    assert len(values) == len(tops) == len(tokens)
    assert (values[0], tops[0]) == (None, None)
    assert values[len(prompt) :] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)
    assert all(max(top.values()) >= value for top, value in zip(tops[1:], values[1:], strict=True))
    places = zip(logprobs.text_offset or [], logprobs.tokens or [], strict=True)
    assert all(choice.text.startswith(token, at) for at, token in places)
    assert "".join(piece.text for piece in pieces) == choice.text
    assert pieces[0].logprobs == logprobs


async def test_a_completion_of_no_tokens_has_no_text(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    answer = await openai_client.completions.create(
        model=real_worker.model, prompt="Once", max_tokens=0
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")


async def test_a_token_outside_the_vocabulary_is_a_400_that_names_the_prompt(
    openai_client: openai.AsyncOpenAI, real_worker: RunningWorker
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client.completions.create(model=real_worker.model, prompt=[1, 10_000_000])
    assert refused.value.param == "prompt"


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
    async with (
        serve_worker(make_worker(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        response = await http.post("/v1/completions", json=body)
    (choice,) = response.json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\\xf0": 0.0, "\\xe2": -1.0}]
