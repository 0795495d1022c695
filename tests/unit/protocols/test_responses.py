"""OpenAI's Responses as chats, and the answers of chats as responses, by OpenAI's own types."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import FieldInvalid, GatewayError, LimitReached, RefusedByWorker, WorkerLost
from gateway.protocols.base import AnswerMalformed, encode_event
from gateway.protocols.documents import Document
from gateway.protocols.history import words_for
from gateway.protocols.openai import InspectionContext
from gateway.protocols.responses import DONE, ResponsesFormat
from gateway.protocols.responses.request import check_items
from gateway.protocols.sealing import Sealer
from gateway.routing.view import FleetView
from paceline.request.fields import FieldError
from policies.document import PolicyDocument
from tests.support.chat_bodies import user
from tests.support.chat_frames import call_delta, chat_chunk, named_events
from tests.support.images import data_url, png_header
from tests.support.json_values import with_odd_values
from tests.support.maker_types import read_event, read_response
from tests.support.open_responses import check_body, check_event
from tests.support.policies import single_pool_policy
from tests.support.tool_call_text import cut_at

SEALER = Sealer(b"secret")
STEM = "ab" * 24
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
}
CODE: dict[str, Any] = {
    "type": "custom",
    "name": "code",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"},
}
MAIL = {"type": "namespace", "name": "mail", "description": "Mail.", "tools": [LOOK, CODE]}

SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
SEARCH_CALL = {
    "type": "tool_search_call",
    "call_id": "c1",
    "execution": "client",
    "status": "completed",
    "arguments": {"query": "mail"},
}
SEARCH_OUTPUT = {
    "type": "tool_search_output",
    "call_id": "c1",
    "execution": "client",
    "status": "completed",
    "tools": [MAIL, {"type": "function"}, {"type": "web_search"}],
}
CALLED = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
REQUEST: Any = None
PICTURE = data_url(png_header(8, 8))
POLICY = PolicyDocument.model_validate(single_pool_policy())
CONTEXT = InspectionContext(POLICY, FleetView.of((), frozenset()))


def new_format() -> ResponsesFormat:
    return ResponsesFormat(f"resp_{STEM}", SEALER, lambda: 1000.0)


def body(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items) or "Hi", **fields}


def wire(*items: Any, **fields: Any) -> ResponsesFormat:
    """Return a request with these items that has been inspected."""
    exchange = new_format()
    exchange.inspect(body(*items, **fields), CONTEXT)
    return exchange


def chat(*items: Any, **fields: Any) -> dict[str, Any]:
    """Return the chat for a request with these items."""
    return dict(wire(*items, **fields).inspect({}, CONTEXT).body)


def whole(exchange: ResponsesFormat, message: dict[str, Any], reason: str = "stop") -> Any:
    """Return the response to a whole answer, read by OpenAI's types."""
    choice = {"index": 0, "message": message, "finish_reason": reason}
    answer = {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": USAGE}
    response = json.loads(exchange.encode(REQUEST, answer, b""))
    check_body(response)
    return response


def split(stream: bytes, *, valid: bool = True) -> list[dict[str, Any]]:
    """Return the numbered events of a stream; `valid`: check their types."""
    found = named_events(stream.removesuffix(DONE))
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    if valid:
        for one in found:
            read_event(one)
            check_event(one)
    return found


def streamed(
    exchange: ResponsesFormat, *frames: dict[str, Any], valid: bool = True
) -> list[dict[str, Any]]:
    encoder = exchange.encoder(REQUEST)
    stream = b"".join(encoder.event(b"", frame) for frame in frames) + encoder.done()
    return split(stream + encode_event(exchange.builder.final()) + DONE, valid=valid)


def test_a_plain_request_is_a_chat() -> None:
    sent = chat(instructions="Be brief.", temperature=0, max_output_tokens=5, truncation="auto")
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, user("Hi")]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("m", 0, 5)
    assert sent["truncate_prompt_tokens"] == -1


def test_items_become_messages_of_a_chat_in_their_order() -> None:
    picture = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
    sealed = SEALER.seal(b"Hm.", b"reasoning")
    said = {"type": "output_text", "text": "I look.", "annotations": []}
    custom = {"name": "code", "namespace": "mail", "input": "7"}
    two = [{"type": "input_text", "text": "two"}, picture]
    messages = chat(
        {"role": "developer", "content": "Be brief."},
        user([{"type": "input_text", "text": "Look"}, {"type": "input_text", "text": "here"}]),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [said]},
        CALLED,
        {"type": "custom_tool_call", "call_id": "c2", **custom},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": two},
        {"role": "developer", "content": "Now in French."},
    )["messages"]
    functions = [
        {"name": "look", "arguments": "{}"},
        {"name": "mail__code", "arguments": '{"input":"7"}'},
    ]
    calls = [
        {"id": f"c{index}", "type": "function", "function": function}
        for index, function in enumerate(functions, 1)
    ]
    reply = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        user("Look\n\nhere"),
        {**reply, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        user([{"type": "image_url", "image_url": {"url": PICTURE}}]),
        user("Now in French."),
    ]


PDF_URL = "data:application/pdf;base64,"
UNREADABLE = [
    {"type": "input_file", "file_id": "f"},
    {"type": "input_image", "image_url": "https://x/a.png"},
    {"type": "new, kind"},
]
WORDS = "\n\n".join(map(words_for, ("input_file", "input_image", "new, kind")))


def test_f64_no_item_of_a_history_ends_a_conversation() -> None:
    """A part that no model reads is refused once, where the user says it; then words stand."""
    output = [*UNREADABLE, 7]
    items: list[Any] = [
        user(UNREADABLE),
        {"type": "item_reference", "id": "msg_gone"},
        {"role": "assistant", "content": [{"type": "output_audio"}]},
        CALLED,
        {"type": "computer_call", "call_id": "c2"},
        {"type": "computer_call_output", "call_id": "c2", "output": {}},
        {"type": "function_call_output", "call_id": "c1", "output": output},
        user("And?"),
    ]
    inspected = wire(*items).inspect({}, CONTEXT)
    first, reply, told, behind = inspected.body["messages"]
    assert first["content"] == WORDS
    kinds = ("item_reference", "output_audio", "computer_call")
    assert reply["content"] == "".join(map(words_for, kinds))
    assert [one["id"] for one in reply["tool_calls"]] == ["c1"]
    assert (told["role"], told["content"]) == ("tool", f"{WORDS}\n\n{words_for('unknown')}")
    words = words_for("computer_call_output")
    assert behind == user(f"{words}\n\nAnd?"), "a result stands next to its call"
    unreadable = ("[0]:input_file", "[1]:input_image", "[2]:new%2C%20kind")
    assert inspected.profile.replaced == (
        *(f"input[0].content{part}" for part in unreadable),
        *("input[1]:item_reference", "input[2].content[0]:output_audio"),
        *("input[4]:computer_call", "input[5]:computer_call_output"),
        *(f"input[6].output{part}" for part in (*unreadable, "[3]:unknown")),
    )
    with pytest.raises(FieldInvalid) as refused:
        wire(*items, user(UNREADABLE))
    assert refused.value.param == "input[8].content[0].file_id"


def test_replies_and_what_stands_behind_them_keep_their_order_and_names() -> None:
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    messages = chat(*said, {"type": "computer_call_output", "output": {}}, user("And?"))["messages"]
    words = words_for("computer_call_output")
    assert messages == [{"role": "assistant", "content": "One.\n\nTwo."}, user(f"{words}\n\nAnd?")]
    picture = {"type": "input_image", "image_url": PICTURE}
    too_many = wire(user([picture] * 33), *said, user("And?")).inspect({}, CONTEXT)
    replaced = [f"input[0].content[{place}]:image_url" for place in range(8)]
    assert [*too_many.profile.replaced] == replaced, "as the client sent them"


def test_a_kept_item_was_new_once_and_is_not_refused() -> None:
    exchange = new_format()
    exchange.history = [{"type": "message", **user(UNREADABLE)}]
    inspected = exchange.inspect(body(conversation="conv_1"), CONTEXT)
    assert inspected.body["messages"] == [user(f"{WORDS}\n\nHi")]
    assert inspected.profile.replaced[0] == "conversation.content[0]:input_file"
    check_items([{"type": "shell_call"}], "items")
    with pytest.raises(FieldError, match="not follow links or ids"):
        check_items(exchange.history, "items")


def test_a_pdf_is_its_text_and_its_pages_wherever_it_stands() -> None:
    """In an output the pages follow as the user's; the places of later parts stay."""
    pdf = {"type": "input_file", "filename": "a\nb", "file_data": f"{PDF_URL}JVBERi0x"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [pdf]}
    items = [user([pdf, {"type": "input_image", "image_url": PICTURE}]), output]
    exchange, raw = new_format(), body(*items)
    assert exchange.pdfs(raw) == ("m", ("JVBERi0x",) * 2)
    read = {"JVBERi0x": Document("One", 1, (PICTURE,))}
    first, told, behind = exchange.inspect(raw, CONTEXT._replace(documents=read)).body["messages"]
    text = "[The text of the PDF document 'a b', 1 pages:]\nOne"
    assert [one.get("text") for one in first["content"]] == [text, None, None]
    assert told["content"] == text
    assert [one["type"] for one in behind["content"]] == ["image_url"]
    error = RefusedByWorker(400, "No.", param="messages[0].content[2].image_url", code="x")
    assert exchange.named(error).param == "input[0].content[1].image_url"
    with pytest.raises(FieldInvalid, match="was not read") as refused:
        exchange.inspect(raw, CONTEXT)
    assert refused.value.param == "input[0].content[0].file_data"
    check_items([{"type": "message", **user([pdf])}], "items")


PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PICTURE}]
OUTPUTS = [
    {"type": "function_call_output", "call_id": f"c{index}", "output": PARTS} for index in range(2)
]


def custom(**changes: Any) -> dict[str, Any]:
    return {**CODE, "format": {**CODE["format"], **changes}}


@pytest.mark.parametrize(
    ("param", "place"),
    [
        ("messages", "input"),
        ("messages[1].content", "input[1].content"),
        ("messages[2].content[1].image_url", "input[1].output[1].image_url"),
        ("tool_grammars.patch.definition", "tools[1].format.definition"),
        ("tool_grammars.mail__code.definition", "tools[2].tools[1].format.definition"),
        ("tool_grammars", "tools.format"),
    ],
)
def test_a_refused_part_is_named_as_the_client_knows_it(param: str, place: str) -> None:
    exchange = wire(*OUTPUTS, tools=[LOOK, PATCH, MAIL])
    raw = exchange.error_body(RefusedByWorker(400, "No.", param=param, code="too_long"))
    error = json.loads(raw)["error"]
    assert (error["param"], error["code"]) == (place, "too_long")


def test_tools_become_functions_and_hosted_ones_are_left_out() -> None:
    fields = {"tools": [LOOK, PATCH, MAIL, {"type": "web_search"}]}
    sent = chat(**fields, parallel_tool_calls=False)
    functions = {one["function"]["name"]: one["function"] for one in sent["tools"]}
    assert list(functions) == ["look", "patch", "mail__look", "mail__code"]
    assert 'start: "a"' in functions["patch"]["description"]
    assert functions["mail__code"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"
    assert sent["tool_grammars"] == {
        "patch": {"syntax": "lark", "definition": 'start: "a"'},
        "mail__code": {"syntax": "regex", "definition": "[0-9]+"},
    }
    assert sent["parallel_tool_calls"] is False
    exchange = wire(**fields)
    assert exchange.request is not None
    assert exchange.request.tools.left_out == ("tools[3]:web_search",)
    assert len(read_response(whole(exchange, {"content": "Hi"})).tools) == 3


def test_tools_that_the_client_finds_are_tools_of_the_chat() -> None:
    sent = chat(user("Hi"), SEARCH_CALL, SEARCH_OUTPUT, SEARCH_OUTPUT, tools=[LOOK, SEARCH])
    functions = [one["function"] for one in sent["tools"]]
    assert [one["name"] for one in functions] == ["look", "tool_search", "mail__look", "mail__code"]
    assert functions[1]["parameters"] == SEARCH["parameters"]
    _, asked, found, again = sent["messages"]
    assert asked["tool_calls"][0]["function"] == {
        "name": "tool_search",
        "arguments": '{"query":"mail"}',
    }
    text = "Tool: mail__look\n\nTool: mail__code"
    assert found == again == {"role": "tool", "tool_call_id": "c1", "content": text}
    assert "tools" not in chat(user("Summarise."), SEARCH_CALL, SEARCH_OUTPUT)
    odd = [{**LOOK, **one} for one in ({"name": "["}, {"strict": "x"}, {"parameters": 7})]
    output = {**SEARCH_OUTPUT, "tools": [*odd, custom(syntax="ebnf")]}
    assert len(chat(user("Hi"), SEARCH_CALL, output, tools=[SEARCH])["tools"]) == 1
    later = new_format()
    later.history = [SEARCH_CALL, SEARCH_OUTPUT]
    sent = dict(later.inspect(body(tools=[SEARCH]), CONTEXT).body)
    names = [one["function"]["name"] for one in sent["tools"]]
    assert names == ["tool_search", "mail__look", "mail__code"]
    call = {"id": "c2", "function": {"name": "mail__look", "arguments": "{}"}}
    item = whole(later, {"tool_calls": [call]})["output"][0]
    assert (item["name"], item["namespace"]) == ("look", "mail")


def test_a_search_for_tools_is_a_call_that_the_client_answers() -> None:
    calls = [{"id": "c1", "function": {"name": "tool_search", "arguments": '{"query": "mail"}'}}]
    exchange = wire(tools=[SEARCH])
    assert exchange.request is not None
    assert exchange.request.ignored == ()
    response = whole(exchange, {"tool_calls": calls}, "tool_calls")
    read_response(response)
    item = response["output"][0]
    assert {**item, "id": ""} == {**SEARCH_CALL, "id": ""}
    events = streamed(
        wire(tools=[SEARCH]),
        chat_chunk(call_delta(name="tool_search", arguments='{"query":')),
        chat_chunk(call_delta(arguments=' "mail"}')),
        chat_chunk({}, finish_reason="tool_calls"),
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "output_item.done", "completed")
    ]
    assert events[3]["item"] == {**item, "call_id": "call0"}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("required", "required"),
        ({"type": "function", "name": "look"}, {"name": "look"}),
        ({"type": "custom", "name": "patch"}, {"name": "patch"}),
    ],
)
def test_the_choice_among_tools(choice: Any, sent: Any) -> None:
    found = chat(tools=[LOOK, PATCH], tool_choice=choice)["tool_choice"]
    assert found == sent or found["function"] == sent
    response = whole(wire(tools=[LOOK, PATCH], tool_choice=choice), {"content": "Hi"})
    read_response(response)
    assert response["tool_choice"] == choice


def test_strict_tools_are_strict_in_the_chat_and_only_the_choice_is_restricted() -> None:
    tools = chat(tools=[{**LOOK, "strict": True}, {**LOOK, "name": "see", "strict": None}, PATCH])
    functions = [one["function"] for one in tools["tools"]]
    assert [one.get("strict") for one in functions] == [True, None, None]
    allowed = [{"type": "function", "name": "look"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    sent = chat(tools=[LOOK, PATCH], tool_choice=choice)
    look = {"type": "function", "function": {"name": "look"}}
    assert [one["function"]["name"] for one in sent["tools"]] == ["look", "patch"]
    assert sent["tool_choice"]["allowed_tools"] == {"mode": "required", "tools": [look]}
    hosted = {**choice, "tools": [{"type": "web_search"}]}
    assert chat(tools=[LOOK], tool_choice=hosted)["tool_choice"] == "none"
    assert chat(tools=[LOOK], max_tool_calls=3)["max_tool_calls"] == 3


def test_form_reasoning_and_logprobs() -> None:
    schema: Any = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "null"}}
    sent = chat(
        text={"format": schema, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert sent["response_format"] == {"type": schema.pop("type"), "json_schema": schema}
    assert (sent["reasoning_effort"], sent["logprobs"], sent["top_logprobs"]) == ("low", True, 2)
    plain = {"type": "json_object"}
    assert chat(text={"format": plain})["response_format"] == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [user(7)]}, "input[0].content"),
        ({"input": [user([{"type": "input_text"}])]}, "input[0].content[0].text"),
        *(
            ({"input": [user([{"type": "input_file", name: "x"}])]}, f"input[0].content[0].{field}")
            for name, field in (
                ("file_url", "file_url"),
                ("file_id", "file_id"),
                ("x", "x"),
                ("filename", "file_data"),
                ("file_data", "file_data"),
            )
        ),
        *(
            ({"input": [user([{"type": "input_image", **image}])]}, "input[0].content[0].image_url")
            for image in ({"image_url": "https://x/y.png"}, {"file_id": "f"})
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"instructions": 7}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"include": ["x"]}, "include[0]"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "x"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "x"}}, "text.verbosity"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "magic", "name": "x"}]}, "tools[0].type"),
        ({"tools": [LOOK, {**LOOK, "strict": True}]}, "tools[1].name"),
        ({"tools": [{**LOOK, "parameters": 7}]}, "tools[0].parameters"),
        ({"tools": [custom(definition=None)]}, "tools[0].format.definition"),
        ({"tools": [custom(syntax="ebnf")]}, "tools[0].format.syntax"),
        ({"tools": [custom(type="json")]}, "tools[0].format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"truncation": "x"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
        ({"conversation": {}}, "conversation.id"),
        ({"prompt": {"id": "x"}}, "prompt"),
    ],
)
def test_an_invalid_field_is_named_as_clients_know_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldInvalid) as invalid:
        wire(**fields)
    assert invalid.value.param == param


def test_a_whole_answer_is_a_response() -> None:
    arguments = '{"at": "a"}'
    calls = [{"id": "c1", "function": {"name": "look", "arguments": arguments}}]
    message = {"reasoning_content": "Hm.", "content": "I look.", "tool_calls": calls}
    response = read_response(whole(wire(tools=[LOOK], metadata={"a": "b"}), message, "tool_calls"))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert (response.id, response.status) == (f"resp_{STEM}", "completed")
    assert response.output_text == "I look."
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.input_tokens_details.cache_write_tokens == 5
    assert response.usage.output_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize(
    ("reason", "detail"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_a_cut_answer_has_its_reason_and_its_last_call_what_came(reason: str, detail: str) -> None:
    assert whole(wire(), {"content": "I lo"}, reason)["incomplete_details"] == {"reason": detail}
    for arguments, text in (('{"input": "a\\nb', "a\nb"), ('{"input', ""), ("", ""), ("{x", "{x")):
        calls = [{"id": "c1", "function": {"name": "patch", "arguments": arguments}}]
        custom_call = whole(wire(tools=[PATCH]), {"tool_calls": calls}, reason)["output"][-1]
        assert custom_call["input"] == text, "what the model wrote of it"


def test_the_events_of_a_stream_come_in_openais_order() -> None:
    events = streamed(
        wire(tools=[LOOK, PATCH], reasoning={"summary": "auto"}),
        chat_chunk({"role": "assistant", "content": ""}),
        chat_chunk({"reasoning_content": "Hm."}, usage={**USAGE, "completion_tokens": 1}),
        chat_chunk({"content": "I "}),
        chat_chunk({"content": "look."}),
        chat_chunk(call_delta(0, name="look", arguments="")),
        chat_chunk(call_delta(0, arguments='{"at": ')),
        chat_chunk(call_delta(0, arguments='"a"}')),
        chat_chunk(call_delta(1, name="patch", arguments='{"input": "a"}')),
        chat_chunk({}, finish_reason="tool_calls"),
        {"id": "chatcmpl-1", "model": "m", "choices": [], "usage": USAGE},
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done"),
        *("output_item.done", "completed"),
    ]
    output = events[-1]["response"]["output"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert output[0]["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert (output[2]["arguments"], output[3]["input"]) == ('{"at": "a"}', "a")


def test_an_error_ends_a_stream_as_a_failed_response() -> None:
    exchange = wire()
    begun = exchange.encoder(REQUEST).event(b"", chat_chunk({"content": "I "}))
    events = split(begun + exchange.error_event(WorkerLost()))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "worker_lost"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    for error, code in (
        (FieldInvalid("No.", param="input"), "invalid_prompt"),
        (GatewayError(), "server_error"),
    ):
        assert split(wire().error_event(error))[-1]["response"]["error"]["code"] == code
    limited = split(wire().error_event(LimitReached("tokens_per_minute", 5, 1.0)))
    kinds = [event["type"].removeprefix("response.") for event in limited]
    assert kinds == ["created", "in_progress", "error", "failed"]
    assert limited[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_sealed_reasoning_comes_back_to_the_model_only_if_it_is_ours() -> None:
    response = whole(
        wire(store=False, include=["reasoning.encrypted_content"]),
        {"reasoning_content": "Hm.", "content": "Yes."},
    )
    reasoning, message = response["output"]
    assert "Hm." not in reasoning["encrypted_content"]
    del reasoning["content"]  # some clients send only what they were told to keep
    assert chat(reasoning, message)["messages"][0]["reasoning_content"] == "Hm."
    changed = {**reasoning, "encrypted_content": reasoning["encrypted_content"][:-4] + "AAA="}
    assert "reasoning_content" not in chat(changed, message)["messages"][0]


NAMES = st.sampled_from([("look", ""), ("look", "mail"), ("code", "mail"), ("patch", "")])
TEXTS = st.text(max_size=20)
CALLS = st.lists(st.tuples(NAMES, TEXTS), max_size=3)
CUTS = st.lists(st.integers(min_value=0, max_value=20), max_size=3)


@settings(max_examples=60)
@given(reasoning=TEXTS, text=TEXTS, calls=CALLS, cuts=CUTS, summarised=st.booleans())
def test_an_answer_that_comes_back_is_the_message_that_it_was(
    reasoning: str, text: str, calls: list[Any], cuts: list[int], summarised: bool
) -> None:
    """Nothing is lost on the way, whole or streamed in any pieces."""
    functions = []
    for (name, namespace), argument in calls:
        key = "input" if name in ("code", "patch") else "at"
        flat = f"{namespace}__{name}" if namespace else name
        arguments = json.dumps({key: argument}, separators=(",", ":"), ensure_ascii=False)
        functions.append({"name": flat, "arguments": arguments})
    tool_calls = [
        {"id": f"call{index}", "type": "function", "function": function}
        for index, function in enumerate(functions)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": tool_calls} if tool_calls else {}
    fields: dict[str, Any] = {
        "tools": [LOOK, PATCH, MAIL],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"} if summarised else None,
    }
    response = whole(wire(**fields), message)
    frames = [chat_chunk({"reasoning_content": one}) for one in cut_at(reasoning, cuts)]
    frames += [chat_chunk({"content": one}) for one in cut_at(text, cuts)]
    for index, function in enumerate(functions):
        named = {"name": function["name"]}
        for one in cut_at(function["arguments"], cuts):
            frames.append(chat_chunk(call_delta(index, arguments=one, **named)))
            named = {}
    frames.append(chat_chunk({}, finish_reason="stop", usage=USAGE))
    events = streamed(wire(**fields), *frames, valid=False)
    assert events[-1]["response"] == response

    if text or calls or reasoning:
        came_back = message if text or calls else {**message, "content": ""}
        assert chat(*response["output"], **fields)["messages"] == [came_back]


def test_an_answer_of_another_shape_is_malformed() -> None:
    scored = {"token": "x", "logprob": -0.5, "bytes": [120]}
    calls = call_delta(0, name="f")["tool_calls"]
    said = {"content": "Yes.", "reasoning_content": "Hm.", "tool_calls": calls}
    choice = {"message": said, "delta": said, "finish_reason": "stop"}
    choice["logprobs"] = {"content": [scored | {"top_logprobs": [scored]}]}
    malformed = 0
    for odd in with_odd_values({"id": "c", "model": "m", "choices": [choice], "usage": USAGE}):
        for whole_answer in (True, False) if isinstance(odd, dict) else ():
            try:
                if whole_answer:
                    wire().encode(REQUEST, odd, b"")
                else:
                    wire().encoder(REQUEST).event(b"", odd)
            except AnswerMalformed:
                malformed += 1
    assert malformed > 100


def test_a_silent_stream_gets_an_event_behind_each_comment_unless_in_the_background() -> None:
    """Clients such as Codex end a stream without events, and count no comments."""
    in_background = wire(background=True)
    assert in_background.keep_alive(b": keepalive\n\n") == b": keepalive\n\n"
    comment = b": queued 3, about 12 s\n\n"
    exchange = wire(stream=True)
    encoder = exchange.encoder(REQUEST)
    pieces = [
        exchange.keep_alive(comment),
        exchange.keep_alive(comment),
        encoder.event(b"", chat_chunk({"content": "Hi"}, finish_reason="stop")),
        exchange.keep_alive(comment),
        encoder.done(),
    ]
    assert all(pieces[place].startswith(comment) for place in (0, 1, 3))
    end = encode_event(exchange.builder.final()) + DONE
    found = split(b"".join(pieces).replace(comment, b"") + end)
    names = [one["type"] for one in found]
    assert names[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert names.count("response.created") == 1
    assert names.count("response.in_progress") == 3
    assert names[-1] == "response.completed"
