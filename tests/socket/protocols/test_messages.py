"""Anthropic's routes of a gateway: messages, counts of tokens, models and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import openai.pagination as openai_pagination
import pytest
from anthropic.pagination import SyncPage
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent

from tests.support.images import data_url, png_header
from tests.support.maker_types import read_message_events, read_strictly
from tests.support.policies import PolicyAdmin
from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import DONE, ScriptedWorker, chunk, stream_events
from tests.support.sdk_routes import sdk_routes

_PLACE = re.compile(r"\{[^}]*\}")
VERSION = {"anthropic-version": "2023-06-01"}
BODY: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "Hi"}],
}

TOOL_RESULT = {"type": "tool_result", "tool_use_id": "call00001", "content": "one"}
FETCHED = {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
PICTURE: dict[str, Any] = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": data_url(png_header(8, 8)).partition(",")[2],
    },
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


def test_a_comment_of_the_worker_reaches_the_client_with_a_ping(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """Anthropic's clients count no comments, whether or not the worker tells its tokens."""
    comment = b": read 2048 of 9000 tokens of the prompt\n\n"
    worker.script.events = (comment, *stream_events(worker.script.tokens))
    for fingerprint in ("", "a" * 16):
        worker.fingerprint = fingerprint
        gateway_with_worker.send_heartbeat(worker)
        client = gateway_with_worker.client
        with client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as response:
            received = response.read()
        assert received.startswith(comment + b"event: ping\n")
        assert ("x-paceline-progress" in worker.requests[-1].headers) is bool(fingerprint)


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


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"system": "Be brief."}),
        ({}, {"stop_sequences": ["x"]}),
        ({}, {"thinking": {"type": "disabled"}}),
        ({}, {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}),
        ({}, {"tool_choice": {"type": "none"}}),
        ({}, {"messages": [{"role": "user", "content": [TOOL_RESULT]}]}),
        ({}, {"messages": [{"role": "user", "content": [PICTURE]}]}),
        ({}, {"messages": [{"role": "assistant", "content": [FETCHED]}, *BODY["messages"]]}),
        (VERSION, {}),
    ],
)
def test_a_message_is_explained_as_the_chat_that_it_becomes(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    headers: dict[str, str],
    fields: dict[str, Any],
) -> None:
    client = gateway_with_worker.client
    body = {**BODY, "temperature": 0, **fields}
    explained = client.post("/v1/route/explain", json=body, headers=headers).json()
    assert not worker.requests
    answered = client.post("/v1/messages", json=body)
    assert explained["servable"]
    assert (explained["worker"], explained["pool"], explained["reason"]) == tuple(
        answered.headers[f"x-paceline-{name}"] for name in ("worker", "pool", "reason")
    )
    assert explained["profile"]["messages"] == len(worker.requests[0].body["messages"])


def test_what_no_message_may_have_is_no_explanation_either(
    gateway_with_worker: RunningGateway,
) -> None:
    """The version alone makes a body a message's; the error has Anthropic's shape."""
    body = {**BODY, "n": 1}
    path = "/v1/route/explain"
    assert gateway_with_worker.client.post(path, json=body).status_code == 200
    refused = gateway_with_worker.client.post(path, json=body, headers=VERSION)
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": {}}},
        {"messages": [{"role": "user", "content": [{"type": []}]}]},
        {"tools": [{"type": {}}]},
    ],
)
def test_a_type_that_is_no_text_is_the_fault_of_the_client_in_an_explanation_too(
    gateway_with_worker: RunningGateway, fields: dict[str, Any]
) -> None:
    """Whether it is a message or a chat is asked before either is read."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
    response = gateway_with_worker.client.post("/v1/route/explain", json=body)
    assert response.status_code == 400


@pytest.mark.parametrize("places", [3, pytest.param(99, marks=pytest.mark.proof)])
def test_a_route_of_the_makers_that_is_not_served_is_no_404(
    gateway_with_worker: RunningGateway, places: int
) -> None:
    """A LiteLLM proxy in front takes 404 for a model that is gone, and lets it rest.

    Of the routes that begin alike, one is asked; the proof asks all.
    """
    client = gateway_with_worker.client
    paths = client.get("/openapi.json").json()["paths"]
    served = {_PLACE.sub("x", path): {*map(str.upper, paths[path])} for path in paths}
    routes = sdk_routes(openai, "/v1") + sdk_routes(anthropic, "")
    assert len(routes) > 600
    unserved = [(method, _PLACE.sub("x", template)) for method, template in routes]
    unserved += [("POST", "/v2/embed"), ("GET", "/v1/realtime")]
    begins = {(method, *path.split("/")[:places]): (method, path) for method, path in unserved}
    for method, path in begins.values():
        if method in served.get(path, ()):
            continue
        response = client.request(method, path, json={})
        found = (response.status_code, response.json()["error"]["code"])
        # A path that is served says which methods it has.
        expected = (405, "method_not_allowed") if path in served else (400, "endpoint_not_served")
        assert found == expected, (method, path)
    assert gateway_with_worker.client.head("/").status_code == 200
    refused = gateway_with_worker.client.post("/v1/messages/batches", headers=VERSION)
    assert refused.json()["error"]["details"] == {"error_code": "endpoint_not_served"}


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


BROKEN_PICTURE = {**PICTURE, "source": {**PICTURE["source"], "data": "AAAA"}}
RESULT_WITH_PICTURE = {
    **TOOL_RESULT,
    "content": [{"type": "text", "text": "one"}, PICTURE, BROKEN_PICTURE],
}
PICTURES = [
    *BODY["messages"],
    {"role": "user", "content": [RESULT_WITH_PICTURE, PICTURE, BROKEN_PICTURE]},
]
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        ({"stop_sequences": ["x"] * 40}, "stop_sequences"),
        ({"messages": PICTURES}, "messages.1.content.2"),
        ({"tools": [WEB_SEARCH, {"name": "look", "input_schema": 7}]}, "tools.1.input_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 7}}},
            "output_config.format.schema",
        ),
    ],
)
def test_the_words_of_an_error_name_the_field_that_the_client_sent(
    gateway_with_worker: RunningGateway, fields: dict[str, Any], place: str
) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {**BODY, "system": "Be brief.", **fields}
        refused = gateway_with_worker.client.post(path, json=body, headers=VERSION)
        assert refused.status_code == 400
        words = refused.json()["error"]["message"]
        assert words.startswith((f"{place}: ", f"'{place}' ")), words


def test_what_a_worker_refuses_is_named_as_the_client_sent_it(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    error = {"message": "It is no PNG.", "param": "messages[3].content[1].image_url"}
    worker.script.status = 400
    worker.script.body = json.dumps({"error": error}).encode()
    messages = [*BODY["messages"], {"role": "user", "content": [TOOL_RESULT, PICTURE, PICTURE]}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {**BODY, "system": "Be brief.", "messages": messages}
        refused = gateway_with_worker.client.post(path, json=body, headers=VERSION)
        assert refused.json()["error"]["message"] == "messages.1.content.2: It is no PNG."


def test_every_response_to_a_client_of_anthropics_has_an_id(
    gateway_with_worker: RunningGateway,
) -> None:
    client = gateway_with_worker.client
    count = "/v1/messages/count_tokens"
    for response, status in (
        (client.post(count, json={"model": "demo", "messages": BODY["messages"]}), 200),
        (client.post(count, json={"model": "demo"}), 400),
        (client.get("/v1/models", headers=VERSION), 200),
        (client.get("/v1/models/other", headers=VERSION), 404),
        (client.get("/v1/agents", headers=VERSION), 400),
    ):
        assert response.status_code == status
        assert response.headers["request-id"] == response.headers["x-request-id"]
    models = client.get("/v1/models", headers={"x-request-id": "mine"})
    assert (models.headers["x-request-id"], "request-id" in models.headers) == ("mine", False)


def test_a_count_of_tokens_tells_what_remains_of_the_limit_that_it_spends(
    gateway_with_worker: RunningGateway,
) -> None:
    key = gateway_with_worker.create_key(requests_a_minute=2)
    gateway_with_worker.use_key(key["secret"])
    found = [count_tokens(gateway_with_worker) for _ in range(3)]
    assert [response.status_code for response in found] == [200, 200, 429]
    remaining = "anthropic-ratelimit-requests-remaining"
    assert [response.headers[remaining] for response in found] == ["1", "0", "0"]
    counted = gateway_with_worker.client.post(
        "/v1/responses/input_tokens", json={"model": "demo", "input": "Hi"}
    )
    assert (counted.status_code, counted.headers["x-ratelimit-limit-requests"]) == (429, "2")


def count_tokens(gateway: RunningGateway) -> httpx.Response:
    return gateway.client.post(
        "/v1/messages/count_tokens", json={"model": "demo", "messages": BODY["messages"]}
    )


def test_a_worker_counts_the_tokens_of_a_prompt(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.body = b'{"count": 1234, "max_model_len": 4096}'
    counted = count_tokens(gateway_with_worker)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 1234})
    assert "x-paceline-estimate" not in counted.headers
    assert worker.requests[-1].path == "/tokenize"
    assert worker.requests[-1].body["messages"] == BODY["messages"]


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, b"{}"), (503, b"{}"), (200, b'{"count": "many"}'), (200, b'{"count": -1}'), (200, b"[")],
)
def test_the_gateway_estimates_what_a_worker_cannot_count(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, status: int, body: bytes
) -> None:
    worker.script.status, worker.script.body = status, body
    counted = count_tokens(gateway_with_worker)
    assert counted.status_code == 200
    assert counted.headers["x-paceline-estimate"] == "true"


def test_what_a_worker_refuses_to_count_is_the_clients_error(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    error = {"message": "The picture is no PNG.", "type": "invalid_request_error", "param": "x"}
    worker.script.status = 400
    worker.script.body = json.dumps({"error": error}).encode()
    counted = count_tokens(gateway_with_worker)
    assert counted.status_code == 400
    assert "The picture is no PNG." in counted.text


def chat_chunk(delta: Any = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    if choices and "finish_reason" in fields:
        choices[0]["finish_reason"] = fields.pop("finish_reason")
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
    return b"data: " + json.dumps({**chunk, "choices": choices, **fields}).encode() + b"\n\n"


FUNCTION = {"name": "look", "arguments": '{"at": "a"}'}
CHAT_USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4},
}
CHAT_EVENTS = (
    chat_chunk({"role": "assistant", "content": ""}),
    chat_chunk({"reasoning_content": "Hm."}),
    chat_chunk({"content": "I look."}),
    chat_chunk({"tool_calls": [{"index": 0, "id": "call00001", "function": FUNCTION}]}),
    chat_chunk({}, finish_reason="tool_calls"),
    chat_chunk(usage=CHAT_USAGE),
    b"data: [DONE]\n\n",
)


@pytest.fixture
def anthropic_client(gateway_with_worker: RunningGateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=gateway_with_worker.url,
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


ASKED: Any = {"model": "demo", "max_tokens": 20, "messages": BODY["messages"]}


CHAT_ANSWER = {
    "id": "chatcmpl-1",
    "model": "demo",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "call00001", "type": "function", "function": FUNCTION}],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": CHAT_USAGE | {"completion_tokens_details": {"reasoning_tokens": 1}},
}
NONE: frozenset[str] = frozenset()
MODEL_OURS = frozenset(("endpoints", "max_model_len", "root", "sampling"))
"""Fields of a model that the types of `openai` lack."""


def test_a_message_is_one_of_anthropics_own_types(
    anthropic_client: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    worker.script.body = json.dumps(CHAT_ANSWER).encode()
    raw = anthropic_client.messages.with_raw_response.create(**ASKED)
    response = read_strictly(Message, raw.read(), NONE)
    assert response == raw.parse()
    assert [block.type for block in response.content] == ["thinking", "text", "tool_use"]
    assert response.stop_reason == "tool_use"


def test_the_events_of_a_message_are_of_anthropics_own_types(
    gateway_with_worker: RunningGateway,
    anthropic_client: anthropic.Anthropic,
    worker: ScriptedWorker,
) -> None:
    worker.script.events = (b": read 2048 of 9000 tokens of the prompt\n\n", *CHAT_EVENTS)
    streamed = gateway_with_worker.client.post("/v1/messages", json={**BODY, "stream": True})
    events = read_message_events(streamed.content)
    blocks = [event.content_block.type for event in events if "block_start" in event.type]
    assert blocks == ["thinking", "text", "tool_use"]
    with anthropic_client.messages.stream(**ASKED) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].model_dump()["input"] == {"at": "a"}
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (6, 4)


def test_reasoning_that_nobody_asked_for_is_left_out(
    anthropic_client: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    """Engines of other kinds reason whatever a request says."""
    message = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": "chatcmpl-1", "model": "demo", "choices": [choice], "usage": CHAT_USAGE}
    worker.script.events = CHAT_EVENTS
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        asked: Any = {**ASKED, "thinking": thinking}
        worker.script.body = json.dumps(answer).encode()
        whole = anthropic_client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["text"]
        worker.script.body = None
        with anthropic_client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use"]


def test_what_was_cleared_is_listed_in_the_answer(
    gateway_with_worker: RunningGateway, anthropic_client: anthropic.Anthropic
) -> None:
    edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    said = {"type": "thinking", "thinking": "Hm. " * 20, "signature": "s"}
    turn = {"role": "assistant", "content": [said, {"type": "text", "text": "Yes."}]}
    messages: Any = [*BODY["messages"], turn, *BODY["messages"], turn, *BODY["messages"]]
    asked: Any = {
        "model": "demo",
        "max_tokens": 20,
        "messages": messages,
        "context_management": {"edits": [edit]},
    }
    client = gateway_with_worker.client
    whole = client.post("/v1/messages?beta=true", json=asked)
    response = read_strictly(BetaMessage, whole.content, NONE)
    assert response.context_management is not None
    (applied,) = response.context_management.applied_edits
    assert applied.type == edit["type"]
    assert applied.cleared_input_tokens > 0
    streamed = client.post("/v1/messages?beta=true", json={**asked, "stream": True})
    *_, last, _ = read_message_events(streamed.content, BetaRawMessageStreamEvent)
    assert last.context_management == response.context_management
    with anthropic_client.beta.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.context_management == response.context_management


def test_models_are_of_openais_own_types(gateway_with_worker: RunningGateway) -> None:
    """They have no fields that the package `openai` does not know but those listed."""
    client = gateway_with_worker.client
    listed = read_strictly(
        openai_pagination.SyncPage[openai.types.Model], client.get("/v1/models").content, MODEL_OURS
    )
    assert "demo" in {model.id for model in listed.data}
    one = read_strictly(openai.types.Model, client.get("/v1/models/demo").content, MODEL_OURS)
    assert one in listed.data


def test_models_counts_and_errors_are_of_anthropics_own_types(
    gateway_with_worker: RunningGateway,
    anthropic_client: anthropic.Anthropic,
    worker: ScriptedWorker,
) -> None:
    client = gateway_with_worker.client
    page = client.get("/v1/models", headers=VERSION).content
    listed = read_strictly(SyncPage[ModelInfo], page, frozenset(("first_id",)))
    assert "demo" in {model.id for model in listed.data}
    assert listed.data == list(anthropic_client.models.list())
    one = read_strictly(ModelInfo, client.get("/v1/models/demo", headers=VERSION).content, NONE)
    assert one.lifecycle == "active"
    assert (one.max_input_tokens, one.max_tokens) == (4096, 4096)
    assert read_strictly(MessageTokensCount, count_tokens(gateway_with_worker).content, NONE)

    unknown = client.post("/v1/messages", json={**BODY, "model": "claude"})
    assert read_strictly(ErrorResponse, unknown.content, NONE).error.type == "not_found_error"
    worker.script.cut_after = 3
    streamed = client.post("/v1/messages", json={**BODY, "stream": True}).content
    *events, error = streamed.removesuffix(b"\n\n").split(b"\n\n")
    assert read_message_events(b"\n\n".join(events) + b"\n\n")
    name, data = error.split(b"\n")
    assert name == b"event: error"
    read = read_strictly(ErrorResponse, data.removeprefix(b"data: "), NONE)
    assert read.error.type == "api_error"


def test_anthropics_loop_of_tools_goes_on_without_the_thread_that_it_asks_for(
    anthropic_client: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    """Its tool runner lets the server keep the conversation, unless that says that it cannot."""
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.beta.messages.create(**ASKED, thread={"type": "create"})
    assert not worker.requests
    assert anthropic_client.beta.messages.create(**ASKED, thread=None).content
    runner = anthropic_client.beta.messages.tool_runner(**ASKED, tools=[])
    assert runner.until_done().content
    assert len(worker.requests) == 2


def test_a_tool_of_the_makers_servers_is_ignored_or_refused_by_the_policy(
    gateway_with_worker: RunningGateway,
) -> None:
    client = gateway_with_worker.client
    body = {**BODY, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    ignored = client.post("/v1/messages", json=body)
    assert ignored.status_code == 200
    assert ignored.headers["x-paceline-ignored"] == "tools.0:web_search_20250305"
    with PolicyAdmin(gateway_with_worker.url, gateway_with_worker.admin_key) as admin:
        assert admin.patch({"tools": {"hosted": "refuse"}}).status_code == 200
    refused = client.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert "web_search_20250305" in refused.json()["error"]["message"]
    asked = {"model": "demo", "input": "Hi", "tools": [{"type": "web_search"}]}
    refused = client.post("/v1/responses", json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[0].type"


def test_anthropics_package_raises_its_own_errors(
    anthropic_client: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        anthropic_client.messages.create(**{**ASKED, "model": "claude"})
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.messages.create(**ASKED, extra_body={"temperature": 7})
    worker.script.events = CHAT_EVENTS[:3]
    worker.script.end_after = 3
    with (
        pytest.raises(anthropic.APIStatusError, match="api_error"),
        anthropic_client.messages.stream(**ASKED) as stream,
    ):
        stream.get_final_message()
