"""Each body and each event of `/v1/responses` follows the schemas of Open Responses.

The client of every gateway in the tests checks all that it reads to the end (`CheckingTransport`).
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from gateway.config.static_workers import StaticWorker
from tests.support.gateway_fixtures import Served, gateway_of_module
from tests.support.images import data_url, png_header
from tests.support.maker_types import read_event, read_response
from tests.support.open_responses import PATH, check_body, check_event, check_stream
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import DONE, Script, event

Json = dict[str, Any]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "c"}
TOOLS = {"tools": [FUNCTION, CUSTOM]}
LOGPROB = {"token": "é", "logprob": -0.5, "top_logprobs": [{"token": "e", "logprob": -1.0}]}
ENCRYPTED = {"include": ["reasoning.encrypted_content"]}


@pytest.fixture(scope="module")
def module_gateway(tmp_path_factory, module_worker) -> Iterator[RunningGateway]:
    """Run a gateway of an engine that is no worker of ours."""
    lanes = ("text-mtp", "vlm")
    entry = StaticWorker(
        id="mac", kind="openai", url=module_worker.url, models=("demo",), pools=lanes
    )
    with gateway_of_module(tmp_path_factory.mktemp("engine"), workers=(entry,)) as running:
        wait_until(lambda: running.client.get("/readyz").status_code == 200)
        yield running


def call(name: str, arguments: str, index: int = 0) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


class Answer(NamedTuple):
    """What an engine says, piece by piece, and what the client gets."""

    pieces: tuple[Json, ...]
    types: str = "message"
    """Of the items of the output."""
    reason: str = "stop"
    fields: Json | None = None
    """Of the request."""
    logprobs: Any = None

    def script(self, *, stream: bool) -> Script:
        """Return the script of an engine that says this."""
        if not stream:
            message: Json = {"role": "assistant", "content": None}
            for piece in self.pieces:
                message |= piece
            choice = {"message": message, "finish_reason": self.reason, "logprobs": self.logprobs}
            answer = {"choices": [{"index": 0, **choice}], "usage": USAGE}
            return Script(body=json.dumps(answer).encode())
        choices = [{"delta": piece, "logprobs": self.logprobs} for piece in self.pieces]
        choices.append({"delta": {}, "finish_reason": self.reason})
        frames: list[Json] = [{"choices": [{"index": 0, **one}]} for one in choices]
        frames.append({"choices": [], "usage": USAGE})
        return Script(events=(*map(event, frames), DONE))


TEXT, THOUGHT = {"content": "one"}, {"reasoning_content": "Hm"}
ANSWERS = {
    "text": Answer((TEXT,)),
    "nothing": Answer((), types=""),
    "a text that is cut": Answer((TEXT,), reason="length"),
    "a text that is filtered": Answer((TEXT,), reason="content_filter"),
    "log-probabilities": Answer(
        (TEXT,), fields={"top_logprobs": 1}, logprobs={"content": [LOGPROB]}
    ),
    "reasoning": Answer((THOUGHT, TEXT), types="reasoning message", fields=ENCRYPTED),
    "reasoning that is cut": Answer((THOUGHT,), types="reasoning", reason="length"),
    "a summary": Answer(
        (THOUGHT, TEXT), "reasoning message", fields={"reasoning": {"summary": "auto"}}
    ),
    "a refusal": Answer(({"refusal": "No."},)),
    "a refusal that is cut": Answer(({"refusal": "No"},), reason="length"),
    "a text and a refusal": Answer((TEXT, {"refusal": "No."}), "message message"),
    "a call": Answer(
        ({"tool_calls": [call("f", "{}")]},), "function_call", "tool_calls", fields=TOOLS
    ),
    "two calls behind a text": Answer(
        (TEXT, {"tool_calls": [call("f", '{"a":1}'), call("c", '{"input":"x"}', 1)]}),
        "message function_call custom_tool_call",
        "tool_calls",
        fields=TOOLS,
    ),
    "a call that is cut": Answer(
        ({"tool_calls": [call("f", '{"a')]},), "function_call", "length", fields=TOOLS
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_each_answer_of_an_engine_follows_the_schemas(shared: Served, name, *, stream) -> None:
    answer = ANSWERS[name]
    shared.worker.script = answer.script(stream=stream)
    body = {"model": "demo", "input": "Hi", "stream": stream, **(answer.fields or {})}
    received = shared.gateway.client.post(PATH, json=body)
    events = check_stream(received.text) if stream else []
    for one in events:
        read_event(one)
    response = events[-1]["response"] if stream else received.json()
    read_response(response)
    output = response["output"]
    assert [item["type"] for item in output] == answer.types.split()
    statuses = ["completed" for _ in output]
    if answer.reason in ("length", "content_filter"):
        statuses[-1] = "incomplete"
    assert response["status"] == (statuses or ["completed"])[-1]
    told = [item.get("status", status) for item, status in zip(output, statuses, strict=True)]
    assert told == statuses
    assert all("status" in item for item in output if item["type"] != "custom_tool_call")
    kept = shared.gateway.client.get(f"{PATH}/{response['id']}").json()
    assert [item["type"] for item in kept["output"]] == answer.types.split()


@pytest.mark.parametrize(
    "piece",
    [
        {"content": 7},
        {"content": "two", "tool_calls": [7]},
        {"refusal": ["No."]},
        {"reasoning_content": {}},
        {"tool_calls": "f"},
        {"tool_calls": {}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_disobeys_ends_in_an_error_of_the_schemas(served, piece, *, stream) -> None:
    """A stream that has begun has the text that was sent."""
    answer = Answer((TEXT, piece))
    served.worker.script = answer.script(stream=stream)
    body = {"model": "demo", "input": "Hi", "stream": stream}
    received = served.gateway.client.post(PATH, json=body)
    if not stream:
        assert (received.status_code, received.json()["error"]["code"]) == (502, "worker_failed")
        return
    *_, error, failed = check_stream(received.text)
    flat = {name: error[name] for name in ("code", "message", "param")}
    assert error["error"] == {"type": "server_error", **flat}
    kept = served.gateway.client.post(PATH, json={**body, "background": True, "stream": False})
    path = f"{PATH}/{kept.json()['id']}"
    wait_until(lambda: served.gateway.client.get(path).json()["status"] == "failed")
    for response in (failed["response"], served.gateway.client.get(path).json()):
        (message,) = response["output"]
        assert (message["status"], message["content"][0]["text"]) == ("incomplete", "one")
        assert response["status"] == "failed"


FIELDS: dict[str, tuple[Json, Json]] = {
    "a function": (
        {"tools": [FUNCTION]},
        {"tools": [{**FUNCTION, "description": None, "parameters": None, "strict": None}]},
    ),
    "all of a function": (
        {"tools": [{**FUNCTION, "description": "d", "parameters": {}, "strict": False}]},
        {"tools": [{**FUNCTION, "description": "d", "parameters": {}, "strict": False}]},
    ),
    "a custom tool": ({"tools": [CUSTOM], "tool_choice": CUSTOM}, {"tools": [CUSTOM]}),
    "a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]}]},
        {},
    ),
    "no choice": ({}, {"tool_choice": "auto", "tools": []}),
    "a choice": ({**TOOLS, "tool_choice": FUNCTION}, {"tool_choice": FUNCTION}),
    "allowed tools": (
        {**TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [FUNCTION]}},
        {"tool_choice": {"type": "allowed_tools", "tools": [FUNCTION], "mode": "auto"}},
    ),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": {}, "strict": None}}},
        {
            "text": {
                "format": {"type": "json_schema", "name": "s", "schema": {}}
                | {"description": None, "strict": False},
                "verbosity": "medium",
            }
        },
    ),
    "a strict schema": (
        {"text": {"format": {"type": "json_schema", "schema": {}, "strict": True}}},
        {
            "text": {
                "format": {"type": "json_schema", "name": "answer", "schema": {}}
                | {"description": None, "strict": True},
                "verbosity": "medium",
            }
        },
    ),
    "an object": (
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
    ),
    "no penalties": ({}, {"presence_penalty": 0, "frequency_penalty": 0}),
    "penalties": (
        {"presence_penalty": 0.5, "frequency_penalty": -1},
        {"presence_penalty": 0.5, "frequency_penalty": -1},
    ),
    "effort": (
        {"reasoning": {"effort": "minimal"}},
        {"reasoning": {"effort": "minimal", "summary": None}},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_a_response_repeats_its_request_with_all_that_the_schemas_require(
    shared: Served, name, *, stream
) -> None:
    """An engine that disobeys calls no tool."""
    asked, told = FIELDS[name]
    if asked.get("tool_choice") in (CUSTOM, FUNCTION):
        chosen = {"tool_calls": [call(asked["tool_choice"]["name"], "{}")]}
        shared.worker.script = Answer((chosen,)).script(stream=stream)
    body = {"model": "demo", "input": "Hi", "stream": stream, **asked}
    received = shared.gateway.client.post(PATH, json=body)
    if stream:
        events = check_stream(received.text)
        responses = [one["response"] for one in events if "response" in one]
    else:
        responses = [received.json()]
    for response in responses:
        read_response(response)
        assert {field: response[field] for field in told} == told


ITEMS: list[Json] = [
    {"role": "user", "content": "Hi"},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hi"}]},
    {
        "role": "user",
        "content": [{"type": "input_image", "image_url": data_url(png_header(64, 64))}],
    },
    {"role": "assistant", "content": "Hello."},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "one"},
    {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x"},
    {
        "type": "custom_tool_call_output",
        "call_id": "2",
        "output": [{"type": "input_text", "text": "two"}],
    },
    {"role": "user", "content": "And?"},
]


def test_the_items_of_an_input_follow_the_schemas(shared_gateway: RunningGateway) -> None:
    client = shared_gateway.client
    made = client.post(PATH, json={"model": "demo", "input": ITEMS}).json()
    path = f"{PATH}/{made['id']}/input_items"
    page = client.get(path, params={"order": "asc"}).json()
    assert len(page["data"]) == len(ITEMS)
    untyped = {"id": made["output"][0]["id"]}
    for reference in (untyped, {**untyped, "type": None}):
        assert client.post(PATH, json={"model": "demo", "input": [reference]}).status_code == 200
    for order in ("asc", "desc"):
        none = client.get(path, params={"limit": 0, "order": order}).json()
        assert (none["data"], none["has_more"]) == ([], True)
    assert client.get(path, params={"limit": -1}).status_code == 400


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
@pytest.mark.parametrize("more", [{}, {"input": None}, {"input": []}])
def test_a_request_that_goes_on_needs_no_input(shared: Served, field: str, more: Json) -> None:
    client, model = shared.gateway.client, {"model": "demo"}
    if field == "conversation":
        items = {"items": [{"role": "user", "content": "Hi"}]}
        name = client.post("/v1/conversations", json=items).json()["id"]
    else:
        name = client.post(PATH, json={**model, "input": "Hi"}).json()["id"]
    answer = client.post(PATH, json={**model, **more, field: name})
    assert answer.json()["status"] == "completed"
    texts = [message["content"] for message in shared.worker.requests[-1].body["messages"]]
    assert texts[0] == "Hi"
    alone = client.post(PATH, json={**model, **more})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("place", ["tools[0]", "tools[0].tools[0]"])
def test_the_error_of_an_unknown_kind_of_tool_names_it(shared_gateway, place: str) -> None:
    tool: Json = {"type": "acme:x"}
    if place != "tools[0]":
        tool = {"type": "namespace", "name": "n", "tools": [tool]}
    body = {"model": "demo", "input": "Hi", "tools": [tool]}
    error = shared_gateway.client.post(PATH, json=body).json()["error"]
    assert error["param"] == f"{place}.type"
    assert "'acme:x'" in error["message"]


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (check_body, {"object": "response"}),
        (check_body, {"error": {"message": "No."}}),
        (check_body, {"object": "list", "data": [{"type": "acme"}]}),
        (check_event, {"type": "error", "sequence_number": 1}),
        (check_event, {"type": "response.acme"}),
        (check_stream, ""),
    ],
)
def test_what_no_schema_allows_is_seen(check, value: Any) -> None:
    with pytest.raises((ValueError, AssertionError, KeyError)):
        check(value)
