"""Anthropic's routes of a gateway: messages, counts of tokens, models and errors."""

from __future__ import annotations

import json
from typing import Any

from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import DONE, ScriptedWorker, chunk

VERSION = {"anthropic-version": "2023-06-01"}
BODY: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "Hi"}],
}


def test_a_message_is_answered_by_a_chat_of_a_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    response = gateway_with_worker.client.post("/v1/messages?beta=true", json=BODY)
    message = response.json()
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert (message["type"], message["role"], message["stop_reason"]) == (
        "message",
        "assistant",
        "end_turn",
    )
    assert message["content"] == [{"type": "text", "text": "one two three"}]
    assert worker.requests[-1].path == "/v1/chat/completions"


def test_a_stream_of_a_message_ends_with_its_last_event(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    client = gateway_with_worker.client
    with client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as response:
        text = response.read().decode()
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    pieces = [one["delta"]["text"] for one in data if one["type"] == "content_block_delta"]
    assert "".join(pieces) == "one two three"
    assert (data[0]["type"], data[-1]["type"]) == ("message_start", "message_stop")

    worker.script.cut_after = 3
    with client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as response:
        *_, name, event = response.read().decode().strip().splitlines()
    assert name == "event: error"
    assert json.loads(event[6:])["error"]["type"] == "api_error"


def test_errors_have_anthropics_shape_and_name_its_fields(
    gateway_with_worker: RunningGateway,
) -> None:
    client = gateway_with_worker.client
    invalid = client.post("/v1/messages", json={**BODY, "top_z": 1})
    assert (invalid.status_code, invalid.json()) == (
        400,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "top_z: Extra inputs are not permitted.",
            },
        },
    )
    unknown = client.post("/v1/messages", json={**BODY, "model": "claude"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def test_tokens_are_counted_as_an_estimate_that_is_called_one(
    gateway_with_worker: RunningGateway,
) -> None:
    path = "/v1/messages/count_tokens"
    short, long = (
        gateway_with_worker.client.post(
            path, json={"model": "demo", "messages": [{"role": "user", "content": text}]}
        )
        for text in ("Hi", "Hi " * 1000)
    )
    assert short.headers["x-paceline-estimate"] == "true"
    assert 0 < short.json()["input_tokens"] < 100
    assert 1000 <= long.json()["input_tokens"] < 2000
    invalid = gateway_with_worker.client.post(path, json={"model": "demo"}, headers=VERSION)
    assert (invalid.status_code, invalid.json()["type"]) == (400, "error")


def test_models_have_the_shape_of_the_client(gateway_with_worker: RunningGateway) -> None:
    client = gateway_with_worker.client
    listed = client.get("/v1/models", headers=VERSION).json()
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert [model["id"] for model in listed["data"]] == names
    assert {model["type"] for model in listed["data"]} == {"model"}
    assert (listed["first_id"], listed["last_id"]) == (names[0], names[-1])
    assert client.get("/v1/models/demo", headers=VERSION).json()["display_name"] == "demo"


def test_a_route_of_the_makers_that_is_not_served_is_no_404(
    gateway_with_worker: RunningGateway,
) -> None:
    """A LiteLLM proxy in front takes 404 for a model that is gone, and lets it rest."""
    for path in ("/v1/responses", "/v1/embeddings", "/v1/messages/batches"):
        response = gateway_with_worker.client.post(path, json={})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "endpoint_not_served"
    assert gateway_with_worker.client.head("/").status_code == 200


def test_l11_an_answer_that_no_message_can_hold_is_an_error_of_the_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    client = gateway_with_worker.client
    worker.script.events = (
        chunk({"content": "one"}),
        chunk({"content": 7}),
        chunk({}, "stop"),
        DONE,
    )
    with client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as response:
        *_, name, event = response.read().decode().strip().splitlines()
    assert (name, json.loads(event[6:])["error"]["type"]) == ("event: error", "api_error")
    worker.script.body = json.dumps({"choices": [{"message": "one"}]}).encode()
    whole = client.post("/v1/messages", json=BODY)
    assert (whole.status_code, whole.json()["error"]["type"]) == (502, "api_error")
    wait_for_outcomes(gateway_with_worker, failed=2)
