"""The usage that a stream of a worker reports on its way."""

import json
from typing import Any

import pytest

from paceline.protocol import RUNNING_USAGE_TOKENS
from tests.support.scripted_engine import ScriptedEngine, worker_client
from workers.engine.types import Delta, Event, Finished, FinishReason, Usage

TOKENS = 100


def answer(text: str = "x") -> list[Event]:
    """Return an answer of 100 tokens, each in a delta of its own; `text` is of those after one."""
    deltas: list[Event] = [
        Delta(
            text=text if number > 1 else "x", usage=Usage(prompt_tokens=7, completion_tokens=number)
        )
        for number in range(1, TOKENS + 1)
    ]
    usage = Usage(prompt_tokens=7, completion_tokens=TOKENS)
    return [*deltas, Finished(reason=FinishReason.STOP, usage=usage)]


async def read_chunks(script: list[Event] | None = None, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with worker_client(ScriptedEngine(script or answer())) as client:
        response = await client.post("/v1/chat/completions", json={**body, **fields})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("choices", [1, 2])
async def test_c6_a_stream_reports_its_usage_so_far_if_the_request_asks_for_it(choices) -> None:
    chunks = await read_chunks(n=choices, stream_options={"continuous_usage_stats": True})
    seen, unreported, most_unreported, prompts = 0, 0, 0, set()
    for chunk in chunks:
        seen += sum(bool(choice["delta"].get("content")) for choice in chunk["choices"])
        if usage := chunk.get("usage"):
            unreported = usage["completion_tokens"]
            prompts.add(usage["prompt_tokens"])
        most_unreported = max(most_unreported, seen - unreported)
    assert seen == choices * TOKENS
    assert most_unreported < RUNNING_USAGE_TOKENS
    assert prompts == {7}


async def test_c6_a_stream_reports_its_usage_while_it_holds_back_text() -> None:
    chunks = await read_chunks(answer(""), stream_options={"continuous_usage_stats": True})
    reported = [usage["completion_tokens"] for chunk in chunks if (usage := chunk.get("usage"))]
    assert reported[:4] == [1, 33, 65, 97]


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
async def test_without_the_option_only_the_trailing_chunk_may_have_usage(options) -> None:
    *chunks, last = await read_chunks(stream_options=options)
    assert not any(chunk.get("usage") for chunk in chunks)
    assert bool(last.get("usage")) == bool(options)
