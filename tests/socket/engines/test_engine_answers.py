"""What engines answer has one form at each wire, or is a failure of theirs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from httpx import Response
from openai import OpenAI

from gateway.config.static_workers import StaticWorker
from tests.support.running_gateway import RunningGateway, said
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, event

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in "fg"
]
QUESTION = said("Hi")["messages"]
TEMPLATE_ERROR = b'{"error": "Error rendering prompt with jinja template: /Users/ann"}'


@pytest.fixture
def gateway(tmp_path, make_gateway, worker, second_worker) -> RunningGateway:
    """Run a gateway of two engines, the first of which is preferred."""
    policy = tmp_path / "policy.yaml"
    queue = "queue: {timeout_s: 0.5}"
    policy.write_text(
        "version: 1\nmodels: {demo: {aliases: [short]}}\n"
        "routes: [{name: all, to: [first, second]}]\n"
        f"pools: {{first: {{lanes: [first], {queue}}}, second: {{lanes: [second], {queue}}}}}\n"
    )
    entries = tuple(
        StaticWorker(id=f"mac-{pool}", kind="openai", url=one.url, models=("demo",), pools=(pool,))
        for pool, one in (("first", worker), ("second", second_worker))
    )
    return make_gateway(workers=entries, policy=policy)


def piece(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    name = more.pop("name", None)
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function, **more}


def stream(*deltas: dict[str, Any], reason: Any = "stop", **frame: Any) -> Script:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    return Script(events=(*(event({"choices": [one], **frame}) for one in choices), DONE))


def whole(reason: Any = "stop", **message: Any) -> Script:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return Script(body=json.dumps({"model": "/Users/ann/demo", "choices": [choice]}).encode())


ALTERNATING = (
    {"tool_calls": [piece(0, "", id="a", name="f")]},
    {"tool_calls": [piece(1, "", id="b", name="g")]},
    *({"tool_calls": [piece(index, '{"k"')]} for index in (0, 1)),
    *({"tool_calls": [piece(index, f":{index}}}")]} for index in (0, 1)),
)
CALLS = [("f", {"k": 0}), ("g", {"k": 1})]


def events_of(response: Response) -> list[Any]:
    lines = response.text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def calls_at_each_wire(gateway: RunningGateway, *, streamed: bool) -> Iterator[list[Any]]:
    """Yield the calls of one answer as chat, Messages and Responses have them."""
    asked: Any = {"model": "demo", "messages": QUESTION}
    functions = [one["function"] for one in TOOLS]
    chat = gateway.chat(tools=TOOLS, stream=streamed)
    chunks = events_of(chat) if streamed else [chat.json()]
    choices = [choice for one in chunks for choice in one["choices"]]
    calls: dict[int, Any] = {}
    for choice in choices:
        for place, one in enumerate(
            choice["delta" if streamed else "message"].get("tool_calls", ())
        ):
            kept = calls.setdefault(one.get("index", place), {"name": "", "arguments": ""})
            for name, text in one["function"].items():
                kept[name] += text
    assert choices[-1]["finish_reason"] == "tool_calls"
    yield [(one["name"], json.loads(one["arguments"])) for one in calls.values()]
    given = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    with Anthropic(base_url=gateway.url, api_key="none") as client:
        asked |= {"tools": given, "max_tokens": 99}
        if streamed:
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    yield [(one.name, one.input) for one in message.content if one.type == "tool_use"]
    body = {"model": "demo", "stream": streamed, "input": "Hi"}
    body["tools"] = [{"type": "function", **one} for one in functions]
    response = gateway.client.post("/v1/responses", json=body)
    answered = events_of(response)[-1]["response"] if streamed else response.json()
    yield [(one["name"], json.loads(one["arguments"])) for one in answered["output"]]


@pytest.mark.parametrize("streamed", [False, True])
def test_f68_calls_are_the_same_at_each_wire_however_an_engine_tells_them(
    gateway: RunningGateway, worker: ScriptedWorker, *, streamed: bool
) -> None:
    given = [piece(0, '{"k":0}', name="f"), {"function": {"name": "g", "arguments": {"k": 1}}}]
    worker.script = stream(*ALTERNATING) if streamed else whole(tool_calls=given, content=None)
    for calls in calls_at_each_wire(gateway, streamed=streamed):
        assert calls == CALLS


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reason", ["error", "", None, "abort"])
def test_f69_an_answer_without_a_known_end_is_a_failure_of_the_engine(
    gateway: RunningGateway, worker: ScriptedWorker, *, reason: Any, streamed: bool
) -> None:
    oops = "Traceback at /Users/ann"
    worker.script = stream(reason=reason) if streamed else whole(reason, content=oops)
    answer = gateway.chat(stream=streamed)
    assert answer.status_code == 200
    assert "ann" not in answer.text
    if streamed and not reason:  # the client had the first chunk when the end was missing
        assert '"worker_failed"' in answer.text
        assert "[DONE]" not in answer.text
    else:
        assert answer.headers["x-paceline-worker"] == "mac-second"


def test_an_end_by_an_error_after_text_ends_the_stream_with_one(gateway, worker) -> None:
    last = {"index": 0, "delta": {"content": "Traceback"}, "finish_reason": "error"}
    begun = {"index": 0, "delta": {"content": "one"}, "finish_reason": None}
    worker.script = Script(events=(*(event({"choices": [one]}) for one in (begun, last)), DONE))
    text = gateway.chat(stream=True).text
    assert '"worker_failed"' in text
    assert "Traceback" not in text
    assert "[DONE]" not in text


@pytest.mark.parametrize("streamed", [False, True])
def test_f70_a_prescribed_call_comes_from_an_engine_that_holds_to_it_or_is_an_error_with_its_field(
    gateway, worker, second_worker, *, streamed
) -> None:
    body = {"stream": streamed, "tools": TOOLS, "tool_choice": "required"}
    text = stream() if streamed else whole(content="I will not.")
    call = piece(0, "{}", id="a", name="f")
    worker.script = text
    second_worker.script = stream({"tool_calls": [call]}) if streamed else whole(tool_calls=[call])
    answer = gateway.chat(**body)
    assert answer.headers["x-paceline-worker"] == "mac-second"
    assert '"tool_calls":[{' in answer.text
    second_worker.script = text
    refused = gateway.chat(**body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    message = {"model": "demo", "messages": QUESTION, "tools": tools, "max_tokens": 9}
    message |= {"stream": streamed, "tool_choice": {"type": "any"}}
    named = gateway.client.post("/v1/messages", json=message)
    assert named.status_code == 400
    assert "tool_choice" in named.json()["error"]["message"]
    assert gateway.status()["workers"]["mac-first"]["state"] == "ready", "it answered"


def test_f71_what_a_template_refuses_is_the_clients_and_ejects_no_engine(gateway, worker) -> None:
    worker.script = Script(status=500, body=TEMPLATE_ERROR)
    for _ in range(6):
        refused = gateway.chat()
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert "ann" not in refused.text
    assert gateway.status()["workers"]["mac-first"]["state"] == "ready"


def test_an_engine_without_memory_is_busy(gateway, worker, second_worker) -> None:
    worker.script = second_worker.script = Script(status=507, body=b'{"error": "no memory"}')
    busy = gateway.chat()
    assert busy.status_code == 503
    assert "retry-after" in busy.headers


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_sees_the_name_that_it_asked_for_and_never_a_path(
    gateway: RunningGateway, worker: ScriptedWorker, *, streamed: bool
) -> None:
    text = {"content": "x"}
    script = stream(text, text, model="/Users/ann/demo") if streamed else whole(**text)
    worker.script = script
    for name in ("short", "demo"):
        answer = gateway.chat(model=name, stream=streamed)
        assert f'"model":"{name}"' in answer.text
        assert "ann" not in answer.text
        assert worker.requests[-1].body["model"] == "demo"


def test_reasoning_of_any_engine_reaches_each_wire(gateway, worker) -> None:
    worker.script = whole(content="x", reasoning="Hm")
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        response = client.responses.create(model="demo", input="Hi", reasoning={"effort": "high"})
    assert response.output[0].type == "reasoning"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 2048, "thinking": thinking}
    message = gateway.client.post("/v1/messages", json=body).json()
    assert message["content"][0]["thinking"] == "Hm"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_of_an_engine_reaches_each_wire(gateway, worker, *, streamed) -> None:
    said = {"content": None, "refusal": "No."}
    worker.script = stream(said) if streamed else whole(**said)
    chat = gateway.chat(stream=streamed)
    answer = events_of(chat)[0] if streamed else chat.json()
    assert answer["choices"][0]["delta" if streamed else "message"]["refusal"] == "No."
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        asked: Any = {"model": "demo", "input": "Hi"}
        if streamed:
            with client.responses.stream(**asked) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**asked)
    shown: Any = response.to_dict()
    assert shown["status"] == "completed"
    assert shown["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]
    with Anthropic(base_url=gateway.url, api_key="none") as client:
        asked = {"model": "demo", "messages": QUESTION, "max_tokens": 9}
        if streamed:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
    assert [one.to_dict() for one in message.content] == [{"type": "text", "text": "No."}]
    assert message.stop_reason == "refusal"
