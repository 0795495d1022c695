"""The usage that a stream of a worker reports on its way."""

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.protocol import RUNNING_USAGE_TOKENS
from tests.support.scripted_engine import ScriptedEngine, worker_client
from workers.engine.types import Delta, Event, Finished, FinishReason, Usage

TOKENS = 100
USAGE = Usage(prompt_tokens=7, completion_tokens=0, cached_tokens=3, written_tokens=4)
IN_EACH = {"include_usage": True, "continuous_usage_stats": True}
SPARSELY = {**IN_EACH, "usage_interval_tokens": RUNNING_USAGE_TOKENS}
"""As a gateway asks for its own accounts."""


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


async def read_chunks(
    script: list[Event] | None = None, path: str = "/v1/chat/completions", **fields: Any
) -> list[dict[str, Any]]:
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = {"model": "scripted", **asked, "stream": True}
    async with worker_client(ScriptedEngine(script or answer())) as client:
        response = await client.post(path, json={**body, **fields})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("choices", [1, 2])
async def test_c6_a_stream_reports_its_usage_so_far_if_the_request_asks_for_it(choices) -> None:
    chunks = await read_chunks(n=choices, stream_options=SPARSELY)
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
    for options, told in ((SPARSELY, [0, 32, 64, 96]), (IN_EACH, [0, 1, 33, 65])):
        chunks = await read_chunks(answer(""), stream_options=options)
        reported = [usage["completion_tokens"] for chunk in chunks if (usage := chunk.get("usage"))]
        assert reported[:4] == told


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_chunk_has_the_usage_so_far_if_the_request_asks_for_it(path) -> None:
    """With the prompt, and what of it was cached and stored; a chunk that is cut into parts too."""
    calls = [Delta(text="<tool_call>"), Delta(text="x" * 300_000)]
    usages = [replace(USAGE, completion_tokens=number) for number in (1, 2, 3, 4)]
    script: list[Event] = [Delta(text="x", reasoning="y"), Delta(text="z"), *calls]
    script = [
        replace(one, usage=usage) if isinstance(one, Delta) else one
        for one, usage in zip(script, usages, strict=True)
    ]
    script.append(Finished(reason=FinishReason.STOP, usage=usages[-1]))
    *chunks, last = await read_chunks(script, path=path, stream_options=IN_EACH)
    assert len(chunks) > 5
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], last["choices"]) == (4, [])
    details = last["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 3, "cache_write_tokens": 4}
    for chunk in (*chunks, last):
        usage = chunk["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (7, details)
        assert usage["total_tokens"] == 7 + usage["completion_tokens"]


@pytest.mark.parametrize("options", [{}, {"continuous_usage_stats": True}, {"include_usage": True}])
async def test_without_the_option_only_the_trailing_chunk_may_have_usage(options) -> None:
    *chunks, last = await read_chunks(stream_options=options)
    assert not any(chunk.get("usage") for chunk in chunks)
    assert bool(last.get("usage")) == ("include_usage" in options)
