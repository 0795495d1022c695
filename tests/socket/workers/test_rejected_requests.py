"""Requests that a worker rejects with an error that names the field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from policies.request.profile import Bypass
from tests.support.scripted_engine import (
    ScriptedEngine,
    StubPrompts,
    make_worker,
    serve_worker,
    text_events,
)
from workers.engine.types import LaneName
from workers.server import request

CHAT = "/v1/chat/completions"
CHAT_BODY: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "hello"}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
VIDEO = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}]
REMOTE = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(text_events("ok"))


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_worker(make_worker(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"api_base": "http://evil"}, "api_base"),
        ({"temperature": 3}, "temperature"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"metrics": {"per_step": True}}, "metrics"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"thinking": "{{7*7}}"}}, "chat_template_kwargs.thinking"),
        ({"messages": [{"role": "user", "content": VIDEO}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": REMOTE}]}, "messages[0].content[0].image_url"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "add", "arguments": 1}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_an_unsupported_field_returns_400_and_is_named(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json={**CHAT_BODY, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.generations == []


@pytest.mark.parametrize(
    ("keys", "status"),
    [
        ("", 400),
        ("k", 200),
        ("k" * 128, 200),
        ("k" * 129, 400),
        ("a,b,c,d,-", 200),
        ("a,,-", 400),
        ("a,b,c,d,e,-", 400),
    ],
)
async def test_a_prefix_key_that_fits_no_report_returns_400_and_names_its_header(
    client: httpx.AsyncClient, engine: ScriptedEngine, keys: str, status: int
) -> None:
    """Reports contain the keys, and gateways would reject each report."""
    headers = {"x-paceline-prefix-keys": keys}
    response = await client.post(CHAT, json=CHAT_BODY, headers=headers)
    assert response.status_code == status
    if status == 400:
        assert "'x-paceline-prefix-keys'" in response.json()["error"]["message"]
        assert engine.generations == []


async def test_every_prompt_of_a_completion_counts_for_the_limit_of_tokens(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    body = {"model": "scripted", "prompt": ["ab", [1, 2, 3]], "n": 2, "max_tokens": 5}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200
    # Each prompt has two answers of up to five tokens; the engine adds those of its own.
    first, second = 2 + 2 * 5, 3 + 2 * 5
    assert sorted(
        (generation.prompt.tokens, generation.further_tokens, generation.choices)
        for generation in engine.generations
    ) == sorted([((1, 2, 3), first, 2), ((97, 98), second, 2)] * 2)


async def test_another_model_returns_404(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={**CHAT_BODY, "model": "/etc"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_returns_400(
    client: httpx.AsyncClient, content: bytes
) -> None:
    response = await client.post(CHAT, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "[" * 500 + "]" * 500])
async def test_c11_a_worker_reads_json_as_strictly_as_a_gateway(
    client: httpx.AsyncClient, engine: ScriptedEngine, value: str
) -> None:
    """No tokenizer accepts half of a surrogate pair: it would be a failure of the worker."""
    body = f'{{"model":"scripted","messages":[{{"role":"user","content":"x"}}],"user":{value}}}'
    response = await client.post(CHAT, content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert engine.generations == []


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (
            {"function": {"name": "add", "arguments": ["a"]}},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"id": 5, "function": {"name": "add", "arguments": "{}"}},
            "messages[0].tool_calls[0].id",
        ),
    ],
)
async def test_c11_a_tool_call_that_no_template_can_render_returns_400_and_is_named(
    client: httpx.AsyncClient, engine: ScriptedEngine, call: dict[str, Any], param: str
) -> None:
    messages = [{"role": "assistant", "tool_calls": [call]}]
    response = await client.post(CHAT, json={**CHAT_BODY, "messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.generations == []


async def test_a_body_over_the_limit_returns_413(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "MAX_BODY_BYTES", 1000)
    response = await client.post(CHAT, content=b" " * 1001)
    assert response.status_code == 413


async def test_errors_of_method_and_path_have_openais_format(
    client: httpx.AsyncClient,
) -> None:
    wrong_method, unknown = await client.get(CHAT), await client.get("/v1/nothing")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert unknown.status_code == 404
    assert set(wrong_method.json()["error"]) == {"message", "type", "param", "code"}


async def test_the_lane_follows_eligibility_without_a_lane_header(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for temperature in (0, 1):
        await client.post(CHAT, json={**CHAT_BODY, "temperature": temperature})
    greedy, sampled = engine.generations
    assert (greedy.lane, greedy.bypass) == (LaneName.TEXT_MTP, ())
    assert (sampled.lane, sampled.bypass) == (LaneName.VLM, (Bypass.NON_GREEDY_SAMPLING,))


async def test_the_lane_header_of_the_gateway_selects_the_lane(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    headers = {"x-paceline-lane": "vlm"}
    await client.post(CHAT, json={**CHAT_BODY, "temperature": 0}, headers=headers)
    assert [generation.lane for generation in engine.generations] == [LaneName.VLM]


@pytest.mark.parametrize("lane", ["text-mtp", "nonsense", ""])
async def test_a_lane_that_the_worker_does_not_run_returns_400(
    client: httpx.AsyncClient, engine: ScriptedEngine, lane: str
) -> None:
    engine.card = replace(engine.card, lanes=(LaneName.VLM,))
    response = await client.post(CHAT, json=CHAT_BODY, headers={"x-paceline-lane": lane})
    assert response.status_code == 400


async def test_a_worker_without_mtp_records_it_as_the_bypass_reason(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.card = replace(engine.card, lanes=(LaneName.VLM,), mtp=False)
    await client.post(CHAT, json={**CHAT_BODY, "temperature": 0})
    assert engine.generations[0].bypass == (Bypass.NO_MTP_WORKER,)


async def test_a_model_without_a_format_of_calls_answers_tools_in_text(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.prompts = StubPrompts(tool_format=None)
    response = await client.post(CHAT, json={**CHAT_BODY, "tools": TOOLS})
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    assert "'name': 'add'" in engine.generations[0].prompt.text


@pytest.mark.parametrize("broken", ['{"a": 1', '{"a": "\\ud800"}', "[1]", "3"])
async def test_broken_arguments_of_an_old_call_are_passed_on_as_text(
    client: httpx.AsyncClient, engine: ScriptedEngine, broken: str
) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": broken}}]
    messages = [{"role": "assistant", "tool_calls": calls}, *CHAT_BODY["messages"]]
    response = await client.post(CHAT, json={**CHAT_BODY, "messages": messages})
    assert response.status_code == 200
    assert repr({"arguments": broken}) in engine.generations[0].prompt.text
