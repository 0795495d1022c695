"""Successful responses: bodies, streams, headers and lists of models."""

from __future__ import annotations

import json

import openai
import pytest

from gateway.proxy import forward
from tests.support.images import data_url, png_header
from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import (
    DONE,
    JOIN_TOKEN,
    METRICS,
    ScriptedWorker,
    chunk,
    stream_events,
    usage_chunk,
)


def test_a_sampled_request_runs_on_vlm_with_its_reason(gateway_with_worker: RunningGateway) -> None:
    response = gateway_with_worker.chat()
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "one two three"
    assert {
        name: response.headers[f"x-paceline-{name}"] for name in ("pool", "worker", "reason")
    } == {
        "pool": "vlm",
        "worker": "fake-a",
        "reason": "non_greedy_sampling",
    }
    assert response.headers["x-paceline-prefix"] == "none"
    assert response.headers["x-paceline-attempts"] == "1"
    assert response.headers["x-request-id"].startswith("req-")


def test_a_greedy_text_request_runs_on_the_mtp_lane(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    response = gateway_with_worker.chat(temperature=0)
    assert response.headers["x-paceline-pool"] == "text-mtp"
    assert response.headers["x-paceline-reason"] == "eligible"
    assert response.json()["metrics"] == METRICS
    assert worker.requests[0].headers["x-paceline-lane"] == "text-mtp"


def test_a_request_with_an_image_runs_on_vlm(gateway_with_worker: RunningGateway) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(png_header(8, 8))}}
    messages = [{"role": "user", "content": [image]}]
    response = gateway_with_worker.chat(temperature=0, messages=messages)
    assert response.headers["x-paceline-pool"] == "vlm"
    assert response.headers["x-paceline-reason"] == "media"


def test_the_worker_gets_effective_values_and_no_client_headers(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    body = chat_body(model="gpt-4o-mini", top_k=None, seed=5, stream=True)
    headers = {
        "authorization": "Bearer secret-of-client",
        "cookie": "a=b",
        "x-request-id": "client-id",
    }
    gateway_with_worker.client.post("/v1/chat/completions", json=body, headers=headers)
    received = worker.requests[0]
    assert received.body == {
        "model": "demo",
        "messages": body["messages"],
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    assert received.headers["authorization"] == f"Bearer {JOIN_TOKEN}"
    assert received.headers["x-request-id"] == "client-id"
    assert "cookie" not in received.headers


def test_a_stream_is_relayed_byte_for_byte_without_unrequested_usage(
    gateway_with_worker: RunningGateway,
) -> None:
    with gateway_with_worker.stream() as response:
        received = response.read()
    expected = stream_events(("one", " two", " three"))
    assert received == b"".join(event for event in expected if event != usage_chunk())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-paceline-pool"] == "vlm"


def test_a_stream_with_include_usage_has_usage_and_metrics(
    gateway_with_worker: RunningGateway,
) -> None:
    with gateway_with_worker.stream(stream_options={"include_usage": True}) as response:
        received = response.read()
    assert received == b"".join(stream_events(("one", " two", " three")))


def test_the_first_event_arrives_before_the_last_is_generated(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with gateway_with_worker.stream() as response:
        chunks = response.iter_raw()
        received = next(chunks)
        while chunk({"content": "one"}) not in received:
            received += next(chunks)
        assert DONE not in received
        worker.resume.set()
        assert b"".join(chunks).endswith(DONE)


def test_a_large_image_is_relayed_unchanged(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    image = {"url": data_url(png_header(8, 8) + b"ABC" * 1_000_000)}
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]
    assert gateway_with_worker.chat(messages=messages).status_code == 200
    assert worker.requests[0].body["messages"] == messages


def test_completions_are_relayed(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    response = gateway_with_worker.client.post(
        "/v1/completions", json={"model": "demo", "prompt": "Say"}
    )
    assert response.status_code == 200
    assert worker.requests[0].path == "/v1/completions"
    assert worker.requests[0].body["prompt"] == "Say"


def test_models_lists_served_models_and_their_aliases(
    gateway_with_worker: RunningGateway,
) -> None:
    names = {entry["id"] for entry in gateway_with_worker.client.get("/v1/models").json()["data"]}
    assert names == {"demo", "default", "gpt-4o-mini"}
    assert gateway_with_worker.client.get("/v1/models/default").json()["root"] == "demo"
    assert gateway_with_worker.client.get("/v1/models/other").status_code == 404


def test_a_models_own_sampling_values_apply_where_neither_policy_nor_request_has_any(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    """They are part of the report, of `/v1/models` and of what the worker gets."""
    worker.model = "qwen"
    own = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    gateway.send_heartbeat(worker, sampling=own)
    assert gateway.chat(model="qwen", top_k=5).status_code == 200
    body = worker.requests[0].body
    sent = {"temperature": 0.6, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.1}
    assert sent.items() <= body.items()
    shown = gateway.client.get("/v1/models/qwen").json()
    assert shown["sampling"] == {**sent, "top_k": 20}
    assert shown["max_model_len"] == 4096


def test_default_is_an_alias_of_the_only_model(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.model = "Qwen/Qwen3.5-4B"
    gateway.send_heartbeat(worker)
    assert gateway.chat(model="default").status_code == 200
    assert worker.requests[0].body["model"] == "Qwen/Qwen3.5-4B"
    names = {entry["id"] for entry in gateway.client.get("/v1/models").json()["data"]}
    assert names == {"Qwen/Qwen3.5-4B", "default"}


def test_explain_returns_the_decision_without_running_the_request(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    explanation = gateway_with_worker.client.post(
        "/v1/route/explain", json=chat_body(temperature=0, n=2)
    ).json()
    assert explanation["bypass"] == ["multiple_choices"]
    assert explanation["route"] == "everything-else"
    assert (explanation["pool"], explanation["worker"], explanation["reason"]) == (
        "vlm",
        "fake-a",
        "multiple_choices",
    )
    assert explanation["candidates"][0]["load"] == 0.0
    assert explanation["profile"]["sampling"]["temperature"] == 0.0
    assert not worker.requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_openai_client_reads_responses_and_streams(
    gateway_with_worker: RunningGateway, temperature: float
) -> None:
    with openai.OpenAI(
        base_url=f"{gateway_with_worker.url}/v1", api_key="unused", max_retries=0
    ) as client:
        completion = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            temperature=temperature,
        )
        assert completion.choices[0].message.content == "one two three"
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            temperature=temperature,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == "one two three"
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10


def test_a_preflight_request_gets_no_cors_headers(
    gateway_with_worker: RunningGateway,
) -> None:
    response = gateway_with_worker.client.options(
        "/v1/chat/completions",
        headers={"origin": "http://evil.example", "access-control-request-method": "POST"},
    )
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_an_error_body_has_openais_format(gateway_with_worker: RunningGateway) -> None:
    response = gateway_with_worker.client.post("/v1/chat/completions", content=b"{")
    assert json.loads(response.content)["error"].keys() == {"message", "type", "param", "code"}


def test_an_oversized_response_becomes_a_502(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forward._WHOLE_LIMIT_BYTES == 64 * 1024 * 1024
    monkeypatch.setattr(forward, "_WHOLE_LIMIT_BYTES", 64 * 1024)
    body = b'{"choices": [{"message": {"content": "one"}}]}'
    worker.script.body = body + b" " * 64 * 1024
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "response_too_large")
    worker.script.body = body
    assert gateway_with_worker.chat().status_code == 200
