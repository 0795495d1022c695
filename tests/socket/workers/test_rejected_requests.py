"""Requests that a worker rejects with an error that names the field."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from backports import zstd

from paceline.request.profile import Bypass
from tests.support.scripted_engine import ScriptedEngine, StubPrompts, text_events, worker_client
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
    async with worker_client(engine) as client:
        yield client


async def error_of(client: httpx.AsyncClient, **fields: Any) -> tuple[int, str]:
    """Return the status of a refused chat, and the field that its error names."""
    response = await client.post(CHAT, json={**CHAT_BODY, **fields})
    return response.status_code, response.json()["error"]["param"]


def with_call(**call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, *CHAT_BODY["messages"]]}


async def test_c11_an_unsupported_field_returns_400_and_is_named(client, engine) -> None:
    """No template can render the last three."""
    arguments = "messages[0].tool_calls[0].function.arguments"
    cases: tuple[tuple[dict[str, Any], str], ...] = (
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
        (with_call(function={"name": "add", "arguments": 1}), arguments),
        (with_call(function={"name": "add", "arguments": ["a"]}), arguments),
        (
            with_call(id=5, function={"name": "add", "arguments": "{}"}),
            "messages[0].tool_calls[0].id",
        ),
    )
    for fields, param in cases:
        assert await error_of(client, **fields) == (400, param)
    assert engine.generations == []


async def test_a_prefix_key_that_fits_no_report_returns_400_and_names_its_header(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Reports contain the keys, and gateways would reject each report."""
    for keys in ("", "k" * 129, "a,,-", "a,b,c,d,e,-"):
        headers = {"x-paceline-prefix-keys": keys}
        refused = await client.post(CHAT, json=CHAT_BODY, headers=headers)
        assert refused.status_code == 400, keys
        assert "'x-paceline-prefix-keys'" in refused.json()["error"]["message"]
    assert engine.generations == []
    for keys in ("k", "k" * 128, "a,b,c,d,-"):
        headers = {"x-paceline-prefix-keys": keys}
        assert (await client.post(CHAT, json=CHAT_BODY, headers=headers)).is_success, keys


async def test_every_prompt_of_a_completion_counts_for_the_limit_of_tokens(engine, client) -> None:
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


async def test_c11_a_worker_reads_json_as_strictly_as_a_gateway(client, engine) -> None:
    """No tokenizer accepts half of a surrogate pair: it would be a failure of the worker."""
    body = '{"model":"scripted","messages":[{"role":"user","content":"x"}],"user":%s}'
    values = ('"\\ud800"', "NaN", "[" * 500 + "]" * 500)
    invalid = [(body % value).encode() for value in values]
    for content in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, *invalid):
        response = await client.post(CHAT, content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert engine.generations == []


async def test_a_body_over_the_limit_returns_413(client, monkeypatch) -> None:
    monkeypatch.setattr(request, "MAX_BODY_BYTES", 1000)
    for content, headers in (
        (b" " * 1001, {}),
        (gzip.compress(b" " * 500_000), {"content-encoding": "gzip"}),
    ):
        assert (await client.post(CHAT, content=content, headers=headers)).status_code == 413


async def test_a_worker_decodes_bodies_as_a_gateway_does(client, engine) -> None:
    body = json.dumps(CHAT_BODY).encode()
    coded = {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}
    for coding, content in {**coded, "zstd": zstd.compress(body), "identity": body}.items():
        headers = {"content-encoding": coding}
        assert (await client.post(CHAT, content=content, headers=headers)).is_success, coding
        cut = await client.post(CHAT, content=content[:-1], headers=headers)
        assert (cut.status_code, cut.json()["error"]["code"]) == (400, "invalid_json")
    assert len(engine.generations) == 4
    refused = await client.post(CHAT, content=body, headers={"content-encoding": "br"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (415, "content-encoding")
    assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"


async def test_errors_of_method_and_path_have_openais_format(client: httpx.AsyncClient) -> None:
    wrong_method, unknown = await client.get(CHAT), await client.get("/v1/nothing")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert unknown.status_code == 404
    assert set(wrong_method.json()["error"]) == {"message", "type", "param", "code"}


async def test_the_lane_follows_the_header_of_the_gateway_or_else_eligibility(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for temperature in (0, 1):
        await client.post(CHAT, json={**CHAT_BODY, "temperature": temperature})
    headers = {"x-paceline-lane": "vlm"}
    await client.post(CHAT, json={**CHAT_BODY, "temperature": 0}, headers=headers)
    greedy, sampled, selected = engine.generations
    assert (greedy.lane, greedy.bypass) == (LaneName.TEXT_MTP, ())
    assert (sampled.lane, sampled.bypass) == (LaneName.VLM, (Bypass.NON_GREEDY_SAMPLING,))
    assert selected.lane == LaneName.VLM


async def test_a_worker_without_mtp_records_it_as_a_reason_and_rejects_lanes_that_it_lacks(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.card = replace(engine.card, lanes=(LaneName.VLM,), mtp=False)
    await client.post(CHAT, json={**CHAT_BODY, "temperature": 0})
    assert engine.generations[0].bypass == (Bypass.NO_MTP_WORKER,)
    for lane in ("text-mtp", "nonsense", ""):
        refused = await client.post(CHAT, json=CHAT_BODY, headers={"x-paceline-lane": lane})
        assert refused.status_code == 400


async def test_a_model_without_a_format_of_calls_answers_tools_in_text(client, engine) -> None:
    engine.prompts = StubPrompts(tool_format=None)
    response = await client.post(CHAT, json={**CHAT_BODY, "tools": TOOLS})
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    assert "'name': 'add'" in engine.generations[0].prompt.text


async def test_broken_arguments_of_an_old_call_are_passed_on_as_text(client, engine) -> None:
    for broken in ('{"a": 1', '{"a": "\\ud800"}', "[1]", "3"):
        messages = with_call(function={"name": "add", "arguments": broken})
        assert (await client.post(CHAT, json={**CHAT_BODY, **messages})).status_code == 200
        assert repr({"arguments": broken}) in engine.generations[-1].prompt.text
