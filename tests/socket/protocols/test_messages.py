"""Anthropic's routes of a gateway: messages, counts of tokens, models and errors."""

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

from tests.support.gateway_fixtures import Served
from tests.support.images import data_url, png_header
from tests.support.maker_types import read_message_events, read_strictly
from tests.support.policies import PolicyAdmin
from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import RunningGateway, chat_body, said
from tests.support.scripted_worker import DONE, ScriptedWorker, chunk, event, stream_events
from tests.support.sdk_routes import sdk_routes

_PLACE = re.compile(r"\{[^}]*\}")
VERSION = {"anthropic-version": "2023-06-01"}
MESSAGES, COUNT, EXPLAIN = "/v1/messages", "/v1/messages/count_tokens", "/v1/route/explain"
HI = said("Hi")["messages"]
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 20, "messages": HI}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "call00001", "content": "one"}
FETCHED = {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
PNG = {"type": "base64", "media_type": "image/png"}
PICTURE: dict[str, Any] = {
    "type": "image",
    "source": {**PNG, "data": data_url(png_header(8, 8)).partition(",")[2]},
}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def post(gateway: RunningGateway, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    """Send a message, or what else has its fields, with these changes."""
    return gateway.client.post(path, json={**BODY, **fields})


def count_tokens(gateway: RunningGateway) -> httpx.Response:
    return gateway.client.post(COUNT, json={"model": "demo", "messages": HI})


def test_a_message_is_answered_by_a_chat_of_a_worker(shared: Served) -> None:
    response = post(shared.gateway, "/v1/messages?beta=true")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    expected = {"type": "message", "role": "assistant", "stop_reason": "end_turn"}
    content = [{"type": "text", "text": "one two three"}]
    assert {**response.json(), **expected, "content": content} == response.json()
    assert shared.worker.requests[-1].path == "/v1/chat/completions"


def test_a_comment_of_the_worker_reaches_the_client_with_a_ping(served: Served) -> None:
    """Anthropic's clients count no comments, whether or not the served.worker tells its tokens."""
    comment = b": read 2048 of 9000 tokens of the prompt\n\n"
    served.worker.script.events = (comment, *stream_events(served.worker.script.tokens))
    for fingerprint in ("", "a" * 16):
        served.worker.fingerprint = fingerprint
        served.gateway.join(served.worker)
        received = post(served.gateway, stream=True).content
        assert received.startswith(comment + b"event: ping\n")
        assert ("x-paceline-progress" in served.worker.requests[-1].headers) is bool(fingerprint)


def test_tokens_are_counted_as_an_estimate_that_is_called_one(shared_gateway) -> None:
    client = shared_gateway.client
    short, long = (
        client.post(COUNT, json={"model": "demo", **said(text)}) for text in ("Hi", "Hi " * 1000)
    )
    assert short.headers["x-paceline-estimate"] == "true"
    assert 0 < short.json()["input_tokens"] < 100
    assert 1000 <= long.json()["input_tokens"] < 2000
    invalid = client.post(COUNT, json={"model": "demo"}, headers=VERSION)
    assert (invalid.status_code, invalid.json()["type"]) == (400, "error")


def test_a_message_is_explained_as_the_chat_that_it_becomes(shared: Served) -> None:
    for headers, fields in (
        ({}, {"system": "Be brief."}),
        ({}, {"stop_sequences": ["x"]}),
        ({}, {"thinking": {"type": "disabled"}}),
        ({}, {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}),
        ({}, {"tool_choice": {"type": "none"}}),
        ({}, {"messages": [{"role": "user", "content": [TOOL_RESULT]}]}),
        ({}, {"messages": [{"role": "user", "content": [PICTURE]}]}),
        ({}, {"messages": [{"role": "assistant", "content": [FETCHED]}, *HI]}),
        (VERSION, {}),
    ):
        body = {**BODY, "temperature": 0, **fields}
        shared.worker.reset()
        explained = shared.gateway.client.post(EXPLAIN, json=body, headers=headers).json()
        assert not shared.worker.requests
        answered = post(shared.gateway, **body)
        assert explained["servable"], fields
        for name in ("worker", "pool", "reason"):
            assert explained[name] == answered.headers[f"x-paceline-{name}"], fields
        sent = shared.worker.requests[0].body["messages"]
        assert explained["profile"]["messages"] == len(sent), fields


def test_what_no_message_may_have_is_no_explanation_either(shared_gateway: RunningGateway) -> None:
    """The version alone makes a body a message's; the error has Anthropic's shape.

    Whether it is a message or a chat is asked before either is read.
    """
    body = {**BODY, "n": 2}
    assert shared_gateway.client.post(EXPLAIN, json=body).status_code == 200
    refused = shared_gateway.client.post(EXPLAIN, json=body, headers=VERSION)
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    no_texts: tuple[dict[str, Any], ...] = (
        {"tool_choice": {"type": {}}},
        {"messages": [{"role": "user", "content": [{"type": []}]}]},
        {"tools": [{"type": {}}]},
    )
    for fields in no_texts:
        asked = chat_body(**fields)
        assert shared_gateway.client.post(EXPLAIN, json=asked).status_code == 400


@pytest.mark.parametrize("places", [3, pytest.param(99, marks=pytest.mark.proof)])
def test_a_route_of_the_makers_that_is_not_served_is_no_404(shared_gateway, places) -> None:
    """A LiteLLM proxy in front takes 404 for a model that is gone, and lets it rest.

    Of the routes that begin alike, one is asked; the proof asks all.
    """
    client = shared_gateway.client
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
        error = response.json()["error"]
        code = error.get("code") or error.get("details", {}).get("error_code", error["type"])
        found = (response.status_code, code)
        # A path that is served says which methods it has.
        refused_method = (
            "invalid_request_error" if path.startswith(MESSAGES) else "method_not_allowed"
        )
        expected = (405, refused_method) if path in served else (400, "endpoint_not_served")
        assert found == expected, (method, path)
    assert client.head("/").status_code == 200


def test_errors_have_anthropics_shape_by_the_path_or_by_any_header_of_its_clients(
    shared_gateway: RunningGateway,
) -> None:
    client, beta = shared_gateway.client, {"anthropic-beta": "files-api-2025-04-14"}
    unserved = {"error_code": "endpoint_not_served"}
    for method, path, headers in (
        ("POST", f"{MESSAGES}/batches", {}),
        ("GET", f"{MESSAGES}/batches/batch_1/results", {}),
        ("POST", "/v1/files", beta),
        ("GET", "/v1/skills", VERSION),
    ):
        refused = client.request(method, path, headers=headers).json()
        assert (refused["type"], refused["error"]["details"]) == ("error", unserved), path
    for body, status in ((b"x", 400), (b"{}", 400), (b'{"model": "no", "messages": []}', 400)):
        refused = client.post(COUNT, content=body)
        assert (refused.status_code, refused.json()["type"]) == (status, "error")
    assert client.get(COUNT).json()["type"] == "error"
    assert client.get("/v1/models/no", headers=beta).json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/models", headers=beta).json()["has_more"] is False
    assert "code" in client.post("/v1/files").json()["error"], "OpenAI has the path too"


def test_l11_an_answer_that_no_message_can_hold_is_an_error_of_the_worker(served: Served) -> None:
    texts = (chunk({"content": text}) for text in ("one", 7))
    served.worker.script.events = (*texts, chunk({}, "stop"), DONE)
    *_, name, last = post(served.gateway, stream=True).text.strip().splitlines()
    assert (name, json.loads(last[6:])["error"]["type"]) == ("event: error", "api_error")
    served.worker.script.body = json.dumps({"choices": [{"message": "one"}]}).encode()
    whole = post(served.gateway)
    assert (whole.status_code, whole.json()["error"]["type"]) == (502, "api_error")
    wait_for_outcomes(served.gateway, failed=2)


BROKEN_PICTURE = {**PICTURE, "source": {**PNG, "data": "AAAA"}}
RESULT_WITH_PICTURE = {
    **TOOL_RESULT,
    "content": [{"type": "text", "text": "one"}, PICTURE, BROKEN_PICTURE],
}
PICTURES = [*HI, {"role": "user", "content": [RESULT_WITH_PICTURE, PICTURE, BROKEN_PICTURE]}]
NO_SCHEMA = {"format": {"type": "json_schema", "schema": 7}}


def test_the_words_of_an_error_name_the_field_that_the_client_sent(shared_gateway) -> None:
    invalid: dict[str, dict[str, Any]] = {
        "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": -5}},
        "stop_sequences": {"stop_sequences": ["x"] * 40},
        "messages.1.content.2": {"messages": PICTURES},
        "tools.1.input_schema": {"tools": [WEB_SEARCH, {"name": "look", "input_schema": 7}]},
        "output_config.format.schema": {"output_config": NO_SCHEMA},
        "output_config.format.type": {"output_config": {"format": {"type": "xml"}}},
        "output_config.effort": {"output_config": {"effort": "huge"}},
    }
    for place, fields in invalid.items():
        for path in (MESSAGES, COUNT):
            refused = post(shared_gateway, path, system="Be brief.", **fields)
            assert refused.status_code == 400
            words = refused.json()["error"]["message"]
            assert words.startswith((f"{place}: ", f"'{place}' ")), words


def test_what_a_worker_refuses_is_named_as_the_client_sent_it(shared: Served) -> None:
    error = {"message": "It is no PNG.", "param": "messages[3].content[1].image_url"}
    shared.worker.script.status = 400
    shared.worker.script.body = json.dumps({"error": error}).encode()
    messages = [*HI, {"role": "user", "content": [TOOL_RESULT, PICTURE, PICTURE]}]
    for path in (MESSAGES, COUNT):
        refused = post(shared.gateway, path, system="Be brief.", messages=messages)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "messages.1.content.2: It is no PNG."
    error = {"message": "No such grammar.", "param": "guided_grammar"}
    shared.worker.script.body = json.dumps({"error": error}).encode()
    refused = post(shared.gateway, MESSAGES, guided_grammar='root ::= "a"')
    assert refused.json()["error"]["message"] == "guided_grammar: No such grammar."


def test_every_response_to_a_client_of_anthropics_has_an_id(shared_gateway: RunningGateway) -> None:
    client = shared_gateway.client
    for response, status in (
        (count_tokens(shared_gateway), 200),
        (client.post(COUNT, json={"model": "demo"}), 400),
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
    gateway_with_worker.use_key(gateway_with_worker.create_key(requests_a_minute=2)["secret"])
    found = [count_tokens(gateway_with_worker) for _ in range(3)]
    assert [response.status_code for response in found] == [200, 200, 429]
    remaining = "anthropic-ratelimit-requests-remaining"
    assert [response.headers[remaining] for response in found] == ["1", "0", "0"]
    asked = {"model": "demo", "input": "Hi"}
    counted = gateway_with_worker.client.post("/v1/responses/input_tokens", json=asked)
    assert (counted.status_code, counted.headers["x-ratelimit-limit-requests"]) == (429, "2")


def test_a_worker_counts_the_tokens_of_a_prompt_or_the_gateway_estimates_them(served) -> None:
    served.worker.script.body = b'{"count": 1234, "max_model_len": 4096}'
    counted = count_tokens(served.gateway)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 1234})
    assert "x-paceline-estimate" not in counted.headers
    assert served.worker.requests[-1].path == "/tokenize"
    assert served.worker.requests[-1].body["messages"] == HI
    for status, body in (
        (500, b"{}"),
        (503, b"{}"),
        (200, b'{"count": "many"}'),
        (200, b'{"count": -1}'),
        (200, b"["),
    ):
        served.worker.script.status, served.worker.script.body = status, body
        served.gateway.rejoin(served.worker)
        asked = len(served.worker.requests)
        counted = count_tokens(served.gateway)
        assert len(served.worker.requests) == asked + 1
        assert counted.status_code == 200
        assert counted.headers["x-paceline-estimate"] == "true"


FUNCTION = {"name": "look", "arguments": '{"at": "a"}'}
CHAT = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
CHAT_USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4},
}
CHAT_EVENTS = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "Hm."}),
    chunk({"content": "I look."}),
    chunk({"tool_calls": [{"index": 0, "id": "call00001", "function": FUNCTION}]}),
    chunk({}, "tool_calls"),
    event({**CHAT, "choices": [], "usage": CHAT_USAGE}),
    DONE,
)
SAID = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
NONE: frozenset[str] = frozenset()
MODEL_OURS = frozenset(("endpoints", "max_model_len", "root", "sampling"))
"""Fields of a model that the types of `openai` lack."""


def chat_answer(finish_reason: str, **message: Any) -> bytes:
    """Return a whole answer that reasons."""
    choice = {"index": 0, "message": {**SAID, **message}, "finish_reason": finish_reason}
    usage = CHAT_USAGE | {"completion_tokens_details": {"reasoning_tokens": 1}}
    return json.dumps({**CHAT, "choices": [choice], "usage": usage}).encode()


@pytest.fixture
def anthropic_client(shared_gateway: RunningGateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=shared_gateway.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


ASKED: Any = BODY
CALLING: Any = {**BODY, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}


def test_a_message_and_its_events_are_of_anthropics_own_types(
    shared_gateway, anthropic_client, module_worker
) -> None:
    kinds = ["thinking", "text", "tool_use"]
    call = {"id": "call00001", "type": "function", "function": FUNCTION}
    module_worker.script.body = chat_answer("tool_calls", tool_calls=[call])
    raw = anthropic_client.messages.with_raw_response.create(**CALLING)
    response = read_strictly(Message, raw.read(), NONE)
    assert response == raw.parse()
    assert [block.type for block in response.content] == kinds
    assert response.stop_reason == "tool_use"

    module_worker.script.body = None
    module_worker.script.events = (b": read 2048 of 9000 tokens of the prompt\n\n", *CHAT_EVENTS)
    events = read_message_events(post(shared_gateway, stream=True, tools=CALLING["tools"]).content)
    assert [one.content_block.type for one in events if "block_start" in one.type] == kinds
    with anthropic_client.messages.stream(**CALLING) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == kinds
    assert final.content[2].model_dump()["input"] == {"at": "a"}
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (6, 4)


def test_reasoning_that_nobody_asked_for_is_left_out(anthropic_client, module_worker) -> None:
    """Engines of other kinds reason whatever a request says."""
    module_worker.script.events = CHAT_EVENTS
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        asked: Any = {**CALLING, "thinking": thinking}
        module_worker.script.body = chat_answer("stop")
        whole = anthropic_client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["text"]
        module_worker.script.body = None
        with anthropic_client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use"]


def test_what_was_cleared_is_listed_in_the_answer(shared_gateway, anthropic_client) -> None:
    edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    thought = {"type": "thinking", "thinking": "Hm. " * 20, "signature": "s"}
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}
    messages = [*HI, turn, *HI, turn, *HI]
    asked: Any = {**BODY, "messages": messages, "context_management": {"edits": [edit]}}
    whole = post(shared_gateway, "/v1/messages?beta=true", **asked)
    response = read_strictly(BetaMessage, whole.content, NONE)
    assert response.context_management is not None
    (applied,) = response.context_management.applied_edits
    assert applied.type == edit["type"]
    assert applied.cleared_input_tokens > 0
    streamed = post(shared_gateway, "/v1/messages?beta=true", **asked, stream=True)
    *_, last, _ = read_message_events(streamed.content, BetaRawMessageStreamEvent)
    assert last.context_management == response.context_management
    with anthropic_client.beta.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.context_management == response.context_management


def test_models_are_of_the_own_types_of_the_makers(shared_gateway, anthropic_client) -> None:
    """For OpenAI, they have no fields that its package does not know but those listed."""
    client = shared_gateway.client
    page = client.get("/v1/models").content
    listed = read_strictly(openai_pagination.SyncPage[openai.types.Model], page, MODEL_OURS)
    names = [model.id for model in listed.data]
    assert "demo" in names
    one = read_strictly(openai.types.Model, client.get("/v1/models/demo").content, MODEL_OURS)
    assert one in listed.data

    page = client.get("/v1/models", headers=VERSION).content
    listed = read_strictly(SyncPage[ModelInfo], page, frozenset(("first_id",)))
    assert listed.data == list(anthropic_client.models.list())
    assert [model.id for model in listed.data] == names
    shown = json.loads(page)
    assert (shown["first_id"], shown["last_id"]) == (names[0], names[-1])
    one = read_strictly(ModelInfo, client.get("/v1/models/demo", headers=VERSION).content, NONE)
    assert (one.display_name, one.lifecycle) == ("demo", "active")
    assert (one.max_input_tokens, one.max_tokens) == (4096, 4096)


def test_counts_and_errors_are_of_anthropics_own_types(served: Served) -> None:
    assert read_strictly(MessageTokensCount, count_tokens(served.gateway).content, NONE)
    unknown = post(served.gateway, model="claude")
    assert read_strictly(ErrorResponse, unknown.content, NONE).error.type == "not_found_error"
    served.worker.script.cut_after = 3
    streamed = post(served.gateway, stream=True).content
    *events, error = streamed.removesuffix(b"\n\n").split(b"\n\n")
    assert read_message_events(b"\n\n".join(events) + b"\n\n")
    name, data = error.split(b"\n")
    assert name == b"event: error"
    read = read_strictly(ErrorResponse, data.removeprefix(b"data: "), NONE)
    assert read.error.type == "api_error"


def test_anthropics_loop_of_tools_goes_on_without_the_thread_that_it_asks_for(
    anthropic_client: anthropic.Anthropic, module_worker: ScriptedWorker
) -> None:
    """Its tool runner lets the server keep the conversation, unless that says that it cannot."""
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.beta.messages.create(**ASKED, thread={"type": "create"})
    assert not module_worker.requests
    assert anthropic_client.beta.messages.create(**ASKED, thread=None).content
    runner = anthropic_client.beta.messages.tool_runner(**ASKED, tools=[])
    assert runner.until_done().content
    assert len(module_worker.requests) == 2


def test_a_tool_of_the_makers_servers_is_ignored_or_refused_by_the_policy(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    ignored = post(gateway_with_worker, tools=[WEB_SEARCH])
    assert ignored.status_code == 200
    assert ignored.headers["x-paceline-ignored"] == "tools.0:web_search_20250305"
    assert admin.patch({"tools": {"hosted": "refuse"}}).status_code == 200
    refused = post(gateway_with_worker, tools=[WEB_SEARCH])
    assert refused.status_code == 400
    assert "web_search_20250305" in refused.json()["error"]["message"]
    asked = {"model": "demo", "input": "Hi", "tools": [{"type": "web_search"}]}
    refused = gateway_with_worker.client.post("/v1/responses", json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[0].type"


def test_anthropics_package_raises_its_own_errors(anthropic_client, module_worker) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        anthropic_client.messages.create(**{**ASKED, "model": "claude"})
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.messages.create(**ASKED, extra_body={"temperature": 7})
    module_worker.script.events = CHAT_EVENTS[:3]
    with (
        pytest.raises(anthropic.APIStatusError, match="api_error"),
        anthropic_client.messages.stream(**ASKED) as stream,
    ):
        stream.get_final_message()
