"""Chat completions of a real worker, read by the unmodified `openai` package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.maker_types import CHAT_OURS, read_strictly
from tests.support.worker_process import SUPPRESS_END_TOKENS, RunningWorker, byte_token

QUESTION: Any = [{"role": "user", "content": "What is two plus three?"}]


@pytest.fixture
async def openai_client(real_worker: RunningWorker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{real_worker.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def model(real_worker: RunningWorker) -> str:
    return real_worker.model


async def stream_chunks(client: openai.AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    fields = {"messages": QUESTION, "stream_options": {"include_usage": True}, **fields}
    return [chunk async for chunk in await client.chat.completions.create(stream=True, **fields)]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2},
        {"n": 2},
        {"stop": ["e"], "temperature": 0},
        {
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "tool_choice": "required",
        },
    ],
)
async def test_answers_and_chunks_are_of_openais_own_types(
    real_worker: RunningWorker, fields: dict[str, Any]
) -> None:
    url = f"{real_worker.url}/v1/chat/completions"
    body = {"model": real_worker.model, "messages": QUESTION, "max_tokens": 40, **fields}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(timeout=60) as client:
        whole = await client.post(url, json=body)
        stream = await client.post(url, json=streamed)
    completion = read_strictly(ChatCompletion, whole.content, CHAT_OURS)
    assert len(completion.choices) == fields.get("n", 1)
    *events, done = stream.content.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    chunks = [
        read_strictly(ChatCompletionChunk, one.removeprefix(b"data: "), CHAT_OURS)
        for one in events
        if not one.startswith(b":")
    ]
    assert chunks[-1].usage is not None


async def test_an_exact_answer_says_so_and_has_no_drafts_and_no_cached_tokens(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    question: Any = [{"role": "user", "content": "What is two plus three? " * 20}]
    fields: Any = {"model": model, "messages": question, "temperature": 0, "max_tokens": 8}
    plain = await openai_client.chat.completions.create(**fields, extra_body={"draft_tokens": 2})
    exact = await openai_client.chat.completions.create(**fields, extra_body={"exact": True})

    assert plain.model_dump()["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert exact.model_dump()["metrics"] == {"exact": True}
    assert exact.usage is not None
    assert exact.usage.prompt_tokens_details is not None
    assert exact.usage.prompt_tokens_details.cached_tokens == 0
    assert exact.choices[0].message.content == plain.choices[0].message.content


async def test_a_greedy_answer_contains_usage_and_metrics_of_its_speculation(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    response = await openai_client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        extra_body={"draft_tokens": 2},
    )
    assert response.model == model
    assert response.id.startswith("chatcmpl-")
    assert response.object == "chat.completion"
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].finish_reason in ("stop", "length")
    usage = response.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert response.model_extra is not None
    speculation = response.model_extra["metrics"]["speculative_decoding"]
    assert speculation["num_spec_tokens"] == 2
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]


@pytest.mark.parametrize("end", [{"max_tokens": 24}, {"max_tokens": 23, "stop": ["three"]}])
async def test_detailed_metrics_list_every_step_in_order(
    openai_client: openai.AsyncOpenAI, model: str, end: dict[str, Any]
) -> None:
    fields = {"model": model, "temperature": 0, **end}
    detailed = {"metrics": "detailed", "draft_tokens": 2}
    complete = await openai_client.chat.completions.create(
        messages=QUESTION, extra_body=detailed, **fields
    )
    chunks = await stream_chunks(openai_client, extra_body=detailed, **fields)
    assert complete.model_extra is not None
    metrics = complete.model_extra["metrics"]["speculative_decoding"]
    accepted, drafted = metrics["per_step_accepted"], metrics["per_step_drafted"]
    assert len(accepted) == len(drafted) == metrics["num_spec_steps"] > 0
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert (sum(accepted), sum(drafted)) == (
        metrics["num_accepted_draft_tokens"],
        metrics["num_draft_tokens"],
    )
    assert [accepted.count(j) for j in range(3)] == metrics["acceptance_histogram"]
    assert chunks[-1].model_extra == {"metrics": complete.model_extra["metrics"]}


@pytest.mark.parametrize("metrics", [None, "summary"])
async def test_steps_are_included_only_on_request(
    openai_client: openai.AsyncOpenAI, model: str, metrics: str | None
) -> None:
    response = await openai_client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=8,
        extra_body={"metrics": metrics, "draft_tokens": 2},
    )
    assert response.model_extra is not None
    metrics = response.model_extra["metrics"]["speculative_decoding"]
    assert not any(name.startswith("per_step") for name in metrics)


async def test_a_stream_begins_with_the_role_and_ends_with_usage_and_no_choices(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    chunks = await stream_chunks(
        openai_client, model=model, temperature=0, max_tokens=12, extra_body={"draft_tokens": 2}
    )
    first, last, before_last = chunks[0], chunks[-1], chunks[-2]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert before_last.choices[0].finish_reason in ("stop", "length")
    assert (last.choices, last.usage is None) == ([], False)
    assert last.model_extra is not None
    assert "speculative_decoding" in last.model_extra["metrics"]
    assert {chunk.id for chunk in chunks} == {first.id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}])
async def test_a_stream_has_the_text_and_usage_of_a_complete_answer(
    openai_client: openai.AsyncOpenAI, model: str, sampling: dict[str, Any]
) -> None:
    complete = await openai_client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=20, **sampling
    )
    chunks = await stream_chunks(openai_client, model=model, max_tokens=20, **sampling)
    assert text_of(chunks) == complete.choices[0].message.content
    assert chunks[-1].usage == complete.usage


async def test_a_stream_without_include_usage_has_no_usage_chunk(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    stream = await openai_client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=4, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_an_answer_without_speculation_has_no_metrics(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    response = await openai_client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, extra_body={"draft_tokens": 0}
    )
    assert response.model_extra == {}


async def test_each_of_several_choices_equals_a_single_choice_with_its_seed(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    combined = await openai_client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=12, n=3, seed=40
    )
    single = [
        await openai_client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=12, seed=40 + index
        )
        for index in range(3)
    ]
    assert [choice.index for choice in combined.choices] == [0, 1, 2]
    assert [choice.message.content for choice in combined.choices] == [
        response.choices[0].message.content for response in single
    ]
    usages = [response.usage for response in single if response.usage]
    assert combined.usage is not None
    assert combined.usage.prompt_tokens == usages[0].prompt_tokens
    assert combined.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)
    chunks = await stream_chunks(openai_client, model=model, max_tokens=12, n=3, seed=40)
    assert [text_of(chunks, index) for index in range(3)] == [
        choice.message.content for choice in combined.choices
    ]


async def test_logprobs_cover_every_token_streamed_or_not(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    fields: Any = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    fields["logit_bias"] = SUPPRESS_END_TOKENS
    complete = await openai_client.chat.completions.create(model=model, messages=QUESTION, **fields)
    chunks = await stream_chunks(openai_client, model=model, **fields)
    assert complete.choices[0].logprobs is not None
    tokens = complete.choices[0].logprobs.content or []
    pieces = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    assert len(tokens) == 6
    assert pieces == tokens
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.top_logprobs[0].logprob >= token.logprob for token in tokens)


async def test_logprobs_of_an_incomplete_character_contain_the_bytes_of_the_token(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    """OpenAI returns bytes so that a client can join those of several tokens to a character."""
    response = await openai_client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        logit_bias={str(byte_token(0xF0)): 100},
    )
    assert response.choices[0].logprobs is not None
    tokens = response.choices[0].logprobs.content or []
    assert [(token.token, token.bytes) for token in tokens] == [("\\xf0", [0xF0])] * 3


async def test_a_stop_string_ends_the_answer_before_it(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    fields: Any = {"temperature": 0, "max_tokens": 40, "logit_bias": SUPPRESS_END_TOKENS}
    complete = await openai_client.chat.completions.create(model=model, messages=QUESTION, **fields)
    text = complete.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:4]
    stopped = await openai_client.chat.completions.create(
        model=model, messages=QUESTION, stop=stop, **fields
    )
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


async def test_the_request_id_of_the_caller_is_returned(real_worker: RunningWorker) -> None:
    body = {"model": real_worker.model, "messages": QUESTION, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        response = await client.post(
            "/v1/chat/completions", json=body, headers={"x-request-id": "abc-1"}
        )
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "chatcmpl-abc-1"


async def test_concurrent_requests_get_their_own_answers(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    questions: list[Any] = [[{"role": "user", "content": f"Count to {n}."}] for n in range(2, 10)]

    async def send(question: Any) -> str | None:
        response = await openai_client.chat.completions.create(
            model=model, messages=question, temperature=0, max_tokens=16
        )
        return response.choices[0].message.content

    single = [await send(question) for question in questions]
    assert await asyncio.gather(*map(send, questions)) == single


async def test_usage_has_the_tokens_that_the_prefix_cache_has_stored(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    system: Any = {"role": "system", "content": "The code word of the green team is heron. " * 5}

    async def details(scope: str) -> tuple[int, int, int]:
        answer = await openai_client.chat.completions.create(
            model=model,
            messages=[system, *QUESTION],
            max_tokens=1,
            extra_headers={"x-paceline-prefix-scope": scope},
        )
        assert answer.usage is not None
        found = answer.usage.prompt_tokens_details
        assert found is not None
        assert found.cached_tokens is not None
        assert found.cache_write_tokens is not None
        return answer.usage.prompt_tokens, found.cached_tokens, found.cache_write_tokens

    prompt, cached, written = await details("green")
    assert (cached, written) == (0, prompt)
    prompt, cached, written = await details("green")
    assert cached > 0
    assert written == prompt - cached
    assert (await details("-"))[1:] == (0, 0)


async def test_c8_a_system_prompt_is_cached_within_its_isolation_scope_alone(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    system: Any = {"role": "system", "content": "The code word of the red team is cormorant. " * 5}

    async def cached_tokens(scope: str) -> int:
        answer = await openai_client.chat.completions.create(
            model=model,
            messages=[system, *QUESTION],
            max_tokens=1,
            extra_headers={"x-paceline-prefix-scope": scope},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [await cached_tokens(scope) > 0 for scope in ("red", "red", "-", "-", "blue")] == [
        *(False, True, False, False, False)
    ]


async def test_a_refusal_in_the_history_reads_as_text(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    async def prompt_tokens(**message: Any) -> int:
        messages: Any = [*QUESTION, {"role": "assistant", **message}, *QUESTION]
        response = await openai_client.chat.completions.create(
            model=model, messages=messages, max_tokens=1
        )
        assert response.usage is not None
        return response.usage.prompt_tokens

    text = "I cannot say that, because the sum is unknown to me."
    parts = [{"type": "refusal", "refusal": text}]
    counts = [
        await prompt_tokens(content=text),
        await prompt_tokens(content=parts),
        await prompt_tokens(content=None, refusal=text),
    ]
    assert len(set(counts)) == 1


async def test_an_answer_goes_on_from_a_last_message_that_is_its_beginning(
    openai_client: openai.AsyncOpenAI, model: str
) -> None:
    """What a client has of an answer is what the model has: the rest is the same."""
    whole = await openai_client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=12, logprobs=True
    )
    scores = whole.choices[0].logprobs
    assert scores is not None
    tokens = [one.token for one in scores.content or ()]
    begun = "".join(tokens[:4])
    fields: Any = {"add_generation_prompt": False, "continue_final_message": True}
    rest = await openai_client.chat.completions.create(
        model=model,
        messages=[*QUESTION, {"role": "assistant", "content": begun}],
        temperature=0,
        max_tokens=8,
        extra_body=fields,
    )
    assert begun + (rest.choices[0].message.content or "") == whole.choices[0].message.content
    assert rest.usage is not None
    assert whole.usage is not None
    assert rest.usage.prompt_tokens == whole.usage.prompt_tokens + 4
    for invalid in ({**fields, "add_generation_prompt": True}, {"continue_final_message": True}):
        with pytest.raises(openai.BadRequestError, match="continue_final_message"):
            await openai_client.chat.completions.create(
                model=model, messages=QUESTION, extra_body=invalid
            )
