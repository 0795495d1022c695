"""What engines answer has one form at each wire, or is a failure of theirs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from httpx import Response
from openai import OpenAI

from gateway.config.static_workers import StaticWorker
from tests.support.gateway_fixtures import MakeGateway
from tests.support.log_capture import LogCapture
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


def answered(gateway: RunningGateway, path: str, body: Any, *, streamed: bool) -> Any:
    """Return the text, the names of the calls and the end of an answer at any wire."""
    answer = gateway.client.post(path, json={"model": "demo", "stream": streamed, **body})
    assert answer.status_code == 200, answer.text
    events = events_of(answer) if streamed else [answer.json()]
    if path == "/v1/responses":
        response = events[-1]["response"] if streamed else events[0]
        message, *calls = sorted(response["output"], key=lambda one: one["type"] != "message")
        assert response["usage"]["output_tokens"] == 9
        return message["content"][0]["text"], [one["name"] for one in calls], response["status"]
    if path == "/v1/messages":
        blocks = [one["content_block"] for one in events if "content_block" in one]
        text = "".join(one["delta"].get("text", "") for one in events if "delta" in one)
        if not streamed:
            blocks = events[0]["content"]
            text = "".join(one.get("text", "") for one in blocks)
        calls = [one["name"] for one in blocks if one["type"] == "tool_use"]
        end = events[-2]["delta"] | events[-2] if streamed else events[0]
        assert end["usage"]["output_tokens"] == 9
        return text, calls, end["stop_reason"]
    text, names, ends = "", [], []
    for choice in (one for chunk in events for one in chunk["choices"]):
        message = choice.get("message") or choice.get("delta", {})
        text += message.get("content") or ""
        called = [one["function"] for one in message.get("tool_calls", ())]
        called += [message["function_call"]] if "function_call" in message else []
        names += [one["name"] for one in called if "name" in one]
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, names, "+".join(ends)


def allowed(*names: str, flat: bool = False) -> Any:
    if flat:
        tools = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": "auto", "tools": tools}
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": functions}}


FUNCTIONS = [one["function"] for one in TOOLS]
CHAT = {"messages": QUESTION, "tools": TOOLS}
RESPONSES = {"input": "Hi", "tools": [{"type": "function", **one} for one in FUNCTIONS]}
MESSAGES = {
    "messages": QUESTION,
    "max_tokens": 99,
    "tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
}
SINGLE = {"type": "auto", "disable_parallel_tool_use": True}
ADMITTED: list[Any] = [
    ("/v1/chat/completions", CHAT, "fg", "tool_calls"),
    ("/v1/chat/completions", CHAT | {"tool_choice": allowed("g")}, "g", "tool_calls"),
    ("/v1/chat/completions", CHAT | {"tool_choice": allowed()}, "", "stop"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "none"}, "", "stop"),
    ("/v1/chat/completions", CHAT | {"parallel_tool_calls": False}, "f", "tool_calls"),
    ("/v1/chat/completions", {"messages": QUESTION}, "", "stop"),
    ("/v1/chat/completions", CHAT | {"n": 2, "tool_choice": allowed("f")}, "ff",
     "tool_calls+tool_calls"),
    ("/v1/chat/completions", {"messages": QUESTION, "functions": FUNCTIONS[1:]}, "g",
     "function_call"),
    ("/v1/messages", MESSAGES, "fg", "tool_use"),
    ("/v1/messages", MESSAGES | {"tool_choice": SINGLE}, "f", "tool_use"),
    ("/v1/messages", MESSAGES | {"tool_choice": {"type": "none"}}, "", "end_turn"),
    ("/v1/messages", MESSAGES | {"tools": MESSAGES["tools"][:1]}, "f", "tool_use"),
    ("/v1/responses", RESPONSES, "fg", "completed"),
    ("/v1/responses", RESPONSES | {"tool_choice": allowed("g", flat=True)}, "g", "completed"),
    ("/v1/responses", RESPONSES | {"tool_choice": "none"}, "", "completed"),
    ("/v1/responses", RESPONSES | {"max_tool_calls": 1}, "f", "completed"),
    ("/v1/responses", RESPONSES | {"parallel_tool_calls": False}, "f", "completed"),
    ("/v1/responses", {"input": "Hi"}, "", "completed"),
]  # fmt: skip


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_f70_no_call_that_a_request_does_not_admit_reaches_a_client(
    make_gateway: MakeGateway,
    worker: ScriptedWorker,
    log_capture: LogCapture,
    *,
    streamed: bool,
    joins: bool,
) -> None:
    """An engine, or a worker of an earlier version, makes three calls beside its text.

    The first is of a function that none declared.
    """
    entry = StaticWorker(id="mac", kind="openai", url=worker.url, models=("demo",))
    gateway = make_gateway(workers=() if joins else (entry,))
    if joins:
        gateway.join(worker)
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
    for path, body, names, end in ADMITTED:
        choices: list[Any] = []
        for index in range(body.get("n", 1)):
            calls = [piece(at, '{"k":1}', id=f"c{at}", name=name) for at, name in enumerate("hfg")]
            said = {"role": "assistant", "content": "Hm"}
            if streamed:
                deltas = [said, *({"tool_calls": [one]} for one in calls)]
                choices += [{"index": index, "delta": one, "finish_reason": None} for one in deltas]
                choices.append({"index": index, "delta": {}, "finish_reason": "tool_calls"})
            else:
                message = {**said, "tool_calls": calls}
                choices.append({"index": index, "message": message, "finish_reason": "tool_calls"})
        frames = [{"choices": [one]} for one in choices] + [{"choices": [], "usage": usage}]
        whole_body = json.dumps({"choices": choices, "usage": usage}).encode()
        worker.script = Script(body=None if streamed else whole_body)
        if streamed:
            worker.script = Script(events=(*map(event, frames), DONE))
        text, called, ended = answered(gateway, path, body, streamed=streamed)
        assert ("".join(sorted(called)), ended) == (names, end), (path, body)
        assert text == "Hm" * body.get("n", 1)
        if "tools" in body:
            sent = [one["function"]["name"] for one in worker.requests[-1].body["tools"]]
            assert sent == [*"fg"][: len(body["tools"])], "the prompt has all of them"
    told = [one for one in log_capture.texts if one.startswith("calls.left_out")]
    assert len(told) == len(ADMITTED)


@pytest.mark.parametrize("arguments", ["", '{"k": "a', '{"k": 1}'])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_the_limit_cut_looks_whole_at_no_wire(
    gateway: RunningGateway, worker: ScriptedWorker, *, streamed: bool, arguments: str
) -> None:
    """The last of two calls has the pieces that came, or is left out, and the end is the limit."""
    calls = [piece(0, '{"k":0}', id="a", name="f"), piece(1, arguments, id="b", name="g")]
    worker.script = whole("length", tool_calls=calls)
    if streamed:
        worker.script = stream(*({"tool_calls": [one]} for one in calls), reason="length")
    is_whole = arguments.endswith("}")

    def ask(path: str, body: Any) -> list[Any]:
        answer = gateway.client.post(path, json={"model": "demo", "stream": streamed, **body})
        return events_of(answer) if streamed else [answer.json()]

    *_, response = ask("/v1/responses", RESPONSES)
    response = response.get("response", response)
    first, last = response["output"]
    assert (response["status"], first["status"]) == ("incomplete", "completed")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["arguments"] == arguments
    assert last["status"] == ("completed" if is_whole else "incomplete")
    custom = {"input": "Hi", "tools": [{"type": "custom", "name": name} for name in "fg"]}
    *_, response = ask("/v1/responses", custom)
    texts = [one["input"] for one in response.get("response", response)["output"]]
    assert texts[1] == ("" if not arguments else arguments if is_whole else "a")
    events = ask("/v1/messages", MESSAGES)
    blocks = [one["content_block"] for one in events if "content_block" in one]
    inputs = [one["delta"].get("partial_json") for one in events if "delta" in one][:-1]
    if streamed:
        assert inputs == ['{"k":0}', *([arguments] if arguments else [])]
    else:
        blocks = events[0]["content"]
        assert [one["input"] for one in blocks] == [{"k": 0}, *([{"k": 1}] if is_whole else [])]
    kept = is_whole or (streamed and arguments)
    assert [one["name"] for one in blocks] == ["f", "g"][: 2 if kept else 1]
    ends = [one.get("delta", one).get("stop_reason") for one in events]
    assert "max_tokens" in ends
    assert {*ends} <= {"max_tokens", None}


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
