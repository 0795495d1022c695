"""Error responses, before and after the first token."""

import json
from typing import Any

import httpx
import pytest

from tests.support.scripted_engine import (
    ScriptedEngine,
    worker_client,
)
from workers.engine.types import (
    Delta,
    EngineBusy,
    EngineStopped,
    GenerationFailed,
    InvalidGeneration,
    MemoryShort,
)

CHAT_BODY = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}


async def post(engine: ScriptedEngine, **fields: Any) -> httpx.Response:
    async with worker_client(engine) as client:
        return await client.post("/v1/chat/completions", json={**CHAT_BODY, **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidGeneration("max_tokens", "Too many."), 400, "invalid_value"),
        (EngineBusy(retry_after_s=1.5), 429, "queue_full"),
        (MemoryShort(47_500_000_000, 48_000_000_000), 503, "memory_short"),
        (EngineStopped("the thread is gone"), 503, "engine_stopped"),
        (GenerationFailed("0xdeadbeef in /private/weights"), 500, "generation_failed"),
        (RuntimeError("0xdeadbeef in /private/weights"), 500, "generation_failed"),
    ],
)
async def test_an_error_before_the_first_token_has_its_own_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    response = await post(ScriptedEngine([error]), stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["x-request-id"]
    assert "0x" not in response.text


async def test_a_busy_engine_and_a_refusal_for_lack_of_memory_have_a_retry_after() -> None:
    response = await post(ScriptedEngine([EngineBusy(retry_after_s=1.5)]))
    assert response.headers["retry-after"] == "2"
    response = await post(ScriptedEngine([MemoryShort(47_500_000_000, 48_000_000_000)]))
    assert response.headers["retry-after"] == "5"
    assert "47.5 GB, of 48.0 GB" in response.json()["error"]["message"]


async def test_an_invalid_generation_names_the_field() -> None:
    response = await post(ScriptedEngine([InvalidGeneration("logit_bias", "No such token.")]))
    assert response.json() == {
        "error": {
            "message": "No such token.",
            "type": "invalid_request_error",
            "param": "logit_bias",
            "code": "invalid_value",
        }
    }


async def test_a_too_long_prompt_is_named_by_the_endpoints_field() -> None:
    too_long = InvalidGeneration("messages", "Too long.", code="context_length_exceeded")
    body = {"model": "scripted", "prompt": "x"}
    async with worker_client(ScriptedEngine([too_long])) as client:
        completion = (await client.post("/v1/completions", json=body)).json()["error"]
        chat = (await client.post("/v1/chat/completions", json=CHAT_BODY)).json()["error"]
    assert (completion["param"], chat["param"]) == ("prompt", "messages")
    assert completion["code"] == "context_length_exceeded"


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_broken_stream_ends_in_an_error_event_without_done(choices: int) -> None:
    engine = ScriptedEngine([Delta(text="Once"), GenerationFailed("/private/weights")])
    response = await post(engine, stream=True, n=choices)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert json.loads(events[-1])["error"]["code"] == "generation_failed"
    assert "[DONE]" not in response.text
    assert "/private" not in response.text
    assert engine.all_closed.is_set()


async def test_a_generation_without_an_end_is_an_error() -> None:
    response = await post(ScriptedEngine([Delta(text="Once")]))
    assert response.status_code == 500
    response = await post(ScriptedEngine([Delta(text="Once")]), stream=True)
    assert "[DONE]" not in response.text


async def test_with_a_dead_engine_the_worker_is_alive_but_not_ready() -> None:
    async with worker_client(ScriptedEngine(alive=False)) as client:
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/v1/status")).json()["ready"] is False
