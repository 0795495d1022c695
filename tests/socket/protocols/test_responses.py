"""OpenAI's Responses of a gateway, read by the `openai` package's own types."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.support.openai_types import read_event, read_response
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import ScriptedWorker

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "Hi"}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, each valid, under its own name, and numbered."""
    found = []
    for event in response.read().decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        read_event(found[-1])
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def test_a_response_is_answered_by_a_chat_of_a_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    answer = gateway_with_worker.client.post(PATH, json=BODY)
    response = read_response(answer.json())
    assert (response.status, response.output_text) == ("completed", "one two three")
    assert answer.headers["x-paceline-worker"] == worker.worker_id
    assert worker.requests[-1].path == "/v1/chat/completions"


def test_a_stream_of_a_response_ends_with_its_last_event(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    client = gateway_with_worker.client
    with client.stream("POST", PATH, json={**BODY, "stream": True}) as stream:
        events = events_of(stream)
    pieces = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert "".join(pieces) == "one two three"
    assert events[-1]["type"] == "response.completed"

    worker.script.cut_after = 3
    with client.stream("POST", PATH, json={**BODY, "stream": True}) as stream:
        events = events_of(stream)
    assert [one["type"] for one in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["output"][0]["content"] == []


def test_errors_have_openais_shape_and_name_the_field(gateway_with_worker: RunningGateway) -> None:
    client = gateway_with_worker.client
    invalid = client.post(PATH, json={**BODY, "top_z": 1})
    assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "top_z")
    unknown = client.post(PATH, json={**BODY, "model": "gpt"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    hosted = client.post(PATH, json={**BODY, "tools": [{"type": "web_search"}]})
    assert hosted.headers["x-paceline-ignored"] == "tools[0]:web_search"
