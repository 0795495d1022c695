"""Mixed requests, eight at a time: each gets the same answer as without load."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.openai_requests import ChatResult, picture_body, send_chat_async, text_body
from tests.support.served_engine import DemoGateway
from tools.demo_model.questions import draw_turn

CONCURRENCY = 8
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")
# Two tokens closer than this in log-probability are a tie that float noise may decide either way.
NEAR_TIE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    kind: str
    body: Mapping[str, Any]
    stream: bool


def mixed_requests(model: str, count: int) -> list[Request]:
    """Return the same requests every time: half greedy, a quarter sampled, the rest pictures."""
    random = Random(7)
    return [_request(random, number, model) for number in range(count)]


def _request(random: Random, number: int, model: str) -> Request:
    question = draw_turn(random).question
    limit = random.choice((8, 24, 48))
    body: dict[str, Any]
    match number % 4:
        case 0 | 1:
            kind = "greedy"
            body = text_body(model, question, temperature=0)
        case 2:
            kind = "sampled"
            temperature = random.choice((0.7, 1.0, 1.5))
            body = text_body(model, question, seed=number, temperature=temperature, top_p=0.95)
        case _:
            kind = "picture"
            body = picture_body(model, random.choice(COLOURS), size=random.choice((64, 128, 256)))
            body |= random.choice(({"temperature": 0}, {"temperature": 1, "seed": number}))
    return Request(kind=kind, body={**body, "max_tokens": limit}, stream=random.random() < 0.5)


async def answers_to(
    client: AsyncOpenAI, requests: list[Request], *, concurrency: int
) -> list[ChatResult]:
    semaphore = asyncio.Semaphore(concurrency)

    async def send(request: Request) -> ChatResult:
        async with semaphore:
            return await send_chat_async(client, request.body, stream=request.stream)

    return await asyncio.gather(*map(send, requests))


@pytest.mark.parametrize("count", [24, pytest.param(100, marks=pytest.mark.proof)])
async def test_every_answer_under_load_equals_the_answer_without_load(
    demo: DemoGateway, async_openai_client: AsyncOpenAI, count: int
) -> None:
    requests = mixed_requests(demo.model, count)
    sequential = await answers_to(async_openai_client, requests, concurrency=1)
    concurrent = await answers_to(async_openai_client, requests, concurrency=CONCURRENCY)

    for request, expected, found in zip(requests, sequential, concurrent, strict=True):
        pool = found.headers["x-paceline-pool"]
        assert pool == expected.headers["x-paceline-pool"]
        assert pool == {"greedy": "text-mtp", "sampled": "vlm"}.get(request.kind, pool)
        assert expected.prompt_tokens == found.prompt_tokens
        if expected.text != found.text:
            gap = await logprob_gap_at_difference(
                async_openai_client, request, expected.text, found.text
            )
            assert gap < NEAR_TIE, (request.kind, expected.text, found.text)
        else:
            assert expected.completion_tokens == found.completion_tokens
            assert expected.finish_reason == found.finish_reason


async def logprob_gap_at_difference(
    client: AsyncOpenAI, request: Request, expected: str, found: str
) -> float:
    """Return the gap between the two likeliest tokens at the first difference of two answers."""
    assert request.body.get("temperature") == 0, "a seeded answer has no ties: it must be equal"
    create: Any = client.chat.completions.create
    (choice,) = (await create(**request.body, logprobs=True, top_logprobs=2)).choices
    prefix = ""
    for token in choice.logprobs.content:
        prefix += token.token
        if not (expected.startswith(prefix) and found.startswith(prefix)):
            first, second = token.top_logprobs
            return float(first.logprob - second.logprob)
    raise AssertionError("the answers do not differ within the text of the model")
