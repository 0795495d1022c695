"""Chat completions of a real worker, read by the unmodified `openai` package."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.maker_types import read_whole_and_streamed
from tests.support.worker_process import SUPPRESS_END_TOKENS, byte_token

QUESTION: Any = [{"role": "user", "content": "What is two plus three?"}]
DRAFTED: Any = {"temperature": 0, "extra_body": {"draft_tokens": 2}}

Chat = Callable[..., Awaitable[Any]]


@pytest.fixture
def chat(worker_client: openai.AsyncOpenAI) -> Chat:
    """Return a function that requests an answer, to `QUESTION` unless told."""

    async def ask(**fields: Any) -> Any:
        fields = {"model": "demo", "messages": QUESTION, **fields}
        return await worker_client.chat.completions.create(**fields)

    return ask


@pytest.fixture
def stream(chat: Chat) -> Chat:
    """Return a function that requests a stream with its usage, and returns its chunks."""

    async def ask(**fields: Any) -> list[ChatCompletionChunk]:
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        return [chunk async for chunk in await chat(**fields)]

    return ask


def texts_of(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def speculation_of(answer: Any) -> dict[str, Any]:
    return answer.model_extra["metrics"]["speculative_decoding"]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2},
        {"n": 2},
        {"stop": ["e"], "temperature": 0},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
async def test_answers_and_chunks_are_of_openais_own_types(worker_url, fields) -> None:
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 40, **fields}
    completion, chunks = await read_whole_and_streamed(
        f"{worker_url}/v1/chat/completions", body, ChatCompletion, ChatCompletionChunk
    )
    assert len(completion.choices) == fields.get("n", 1)
    assert chunks[-1].usage is not None


async def test_an_exact_answer_says_so_and_has_no_drafts_and_no_cached_tokens(chat: Chat) -> None:
    question: Any = [{"role": "user", "content": "What is two plus three? " * 20}]
    plain = await chat(messages=question, max_tokens=8, **DRAFTED)
    exact = await chat(messages=question, max_tokens=8, temperature=0, extra_body={"exact": True})

    assert speculation_of(plain)["num_spec_steps"] > 0
    assert exact.model_extra["metrics"].keys() == {"exact", "generation_time_ms", "mean_itl_ms"}
    assert exact.usage.prompt_tokens_details.cached_tokens == 0
    assert texts_of(exact) == texts_of(plain)


async def test_a_greedy_answer_contains_usage_and_metrics_of_its_speculation(chat: Chat) -> None:
    answer = await chat(max_tokens=24, **DRAFTED)
    assert answer.model == "demo"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage, speculation = answer.usage, speculation_of(answer)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert speculation["num_spec_tokens"] == 2
    metrics, following = answer.model_extra["metrics"], usage.completion_tokens - 1
    assert metrics["generation_time_ms"] == pytest.approx(
        metrics["mean_itl_ms"] * following, rel=0.1
    )
    assert (await chat(max_tokens=1, **DRAFTED)).model_extra["metrics"]["mean_itl_ms"] is None
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]


@pytest.mark.parametrize("end", [{"max_tokens": 24}, {"max_tokens": 23, "stop": ["three"]}])
async def test_detailed_metrics_list_every_step_in_order(chat, stream, end) -> None:
    fields = {"temperature": 0, "extra_body": {"metrics": "detailed", "draft_tokens": 2}, **end}
    complete, chunks = await chat(**fields), await stream(**fields)
    metrics = speculation_of(complete)
    accepted, drafted = metrics["per_step_accepted"], metrics["per_step_drafted"]
    assert len(accepted) == len(drafted) == metrics["num_spec_steps"] > 0
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert sum(accepted) == metrics["num_accepted_draft_tokens"]
    assert sum(drafted) == metrics["num_draft_tokens"]
    assert [accepted.count(j) for j in range(3)] == metrics["acceptance_histogram"]
    assert speculation_of(chunks[-1]) == metrics


@pytest.mark.parametrize("metrics", [None, "summary"])
async def test_steps_are_included_only_on_request(chat: Chat, metrics: str | None) -> None:
    extra = {"metrics": metrics, "draft_tokens": 2}
    answer = await chat(temperature=0, max_tokens=8, extra_body=extra)
    assert not any(name.startswith("per_step") for name in speculation_of(answer))


async def test_a_stream_begins_with_the_role_and_ends_with_usage_and_no_choices(stream) -> None:
    chunks = await stream(max_tokens=12, **DRAFTED)
    first, last, before_last = chunks[0], chunks[-1], chunks[-2]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert before_last.choices[0].finish_reason in ("stop", "length")
    assert (last.choices, last.usage is None) == ([], False)
    assert speculation_of(last)
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(first.id, "chat.completion.chunk")}
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}])
async def test_a_stream_has_the_text_and_usage_of_a_complete_answer(chat, stream, sampling) -> None:
    complete = await chat(max_tokens=20, **sampling)
    chunks = await stream(max_tokens=20, **sampling)
    assert [text_of(chunks)] == texts_of(complete)
    assert chunks[-1].usage == complete.usage


async def test_each_of_several_choices_equals_a_single_choice_with_its_seed(chat, stream) -> None:
    combined = await chat(max_tokens=12, n=3, seed=40)
    single = [await chat(max_tokens=12, seed=40 + index) for index in range(3)]
    texts = [text for one in single for text in texts_of(one)]
    assert [choice.index for choice in combined.choices] == [0, 1, 2]
    assert texts_of(combined) == texts
    usages = [one.usage for one in single]
    assert combined.usage.prompt_tokens == usages[0].prompt_tokens
    assert combined.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)
    chunks = await stream(max_tokens=12, n=3, seed=40)
    assert [text_of(chunks, index) for index in range(3)] == texts


async def test_logprobs_cover_every_token_streamed_or_not(chat: Chat, stream: Chat) -> None:
    fields: Any = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    fields["logit_bias"] = SUPPRESS_END_TOKENS
    tokens = (await chat(**fields)).choices[0].logprobs.content
    choices = [choice for chunk in await stream(**fields) for choice in chunk.choices]
    logprobs = [choice.logprobs.content or [] for choice in choices if choice.logprobs]
    assert len(tokens) == 6
    assert [token for piece in logprobs for token in piece] == tokens
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    likeliest = [(token.top_logprobs[0].token, token.top_logprobs[0].logprob) for token in tokens]
    assert likeliest == [(token.token, token.logprob) for token in tokens], "it is greedy"
    assert all(token.logprob <= 0 for token in tokens)


async def test_logprobs_of_an_incomplete_character_contain_the_bytes_of_the_token(chat) -> None:
    """OpenAI returns bytes so that a client can join those of several tokens to a character."""
    bias = {str(byte_token(0xF0)): 100}
    answer = await chat(max_tokens=3, temperature=0, logprobs=True, logit_bias=bias)
    tokens = answer.choices[0].logprobs.content
    assert [(token.token, token.bytes) for token in tokens] == [("\\xf0", [0xF0])] * 3


async def test_the_request_id_of_the_caller_is_returned(worker_url: str) -> None:
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=worker_url, timeout=60) as client:
        response = await client.post(
            "/v1/chat/completions", json=body, headers={"x-request-id": "abc-1"}
        )
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "chatcmpl-abc-1"


async def test_c8_a_system_prompt_is_cached_within_its_isolation_scope_alone(chat: Chat) -> None:
    """The usage has what was found there, and what the request has stored for others."""
    system = {"role": "system", "content": "The code word of the red team is cormorant. " * 5}

    async def is_cached(scope: str) -> bool:
        answer = await chat(
            messages=[system, *QUESTION],
            max_tokens=1,
            extra_headers={"x-paceline-prefix-scope": scope},
        )
        found = answer.usage.prompt_tokens_details
        unread = answer.usage.prompt_tokens - found.cached_tokens
        assert found.cache_write_tokens == (0 if scope == "-" else unread)
        return bool(found.cached_tokens)

    cached = [await is_cached(scope) for scope in ("red", "red", "-", "-", "blue")]
    assert cached == [False, True, False, False, False]


async def test_a_refusal_in_the_history_reads_as_text(chat: Chat) -> None:
    async def prompt_tokens(**message: Any) -> int:
        messages = [*QUESTION, {"role": "assistant", **message}, *QUESTION]
        return (await chat(messages=messages, max_tokens=1)).usage.prompt_tokens

    text = "I cannot say that, because the sum is unknown to me."
    expected = await prompt_tokens(content=text)
    assert await prompt_tokens(content=[{"type": "refusal", "refusal": text}]) == expected
    assert await prompt_tokens(content=None, refusal=text) == expected


async def test_an_answer_goes_on_from_a_last_message_that_is_its_beginning(chat: Chat) -> None:
    """What a client has of an answer is what the model has: the rest is the same."""
    whole = await chat(temperature=0, max_tokens=12, logprobs=True)
    begun = "".join(one.token for one in whole.choices[0].logprobs.content[:4])
    fields: Any = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*QUESTION, {"role": "assistant", "content": begun}]
    rest = await chat(messages=messages, temperature=0, max_tokens=8, extra_body=fields)
    assert [begun + text for text in texts_of(rest)] == texts_of(whole)
    assert rest.usage.prompt_tokens == whole.usage.prompt_tokens + 4
    for mark in ("prefix", "partial"):
        marked = [*QUESTION, {"role": "assistant", "content": begun, mark: True}]
        assert texts_of(await chat(messages=marked, temperature=0, max_tokens=8)) == texts_of(rest)
    for invalid in ({**fields, "add_generation_prompt": True}, {"continue_final_message": True}):
        with pytest.raises(openai.BadRequestError, match="continue_final_message"):
            await chat(extra_body=invalid)
