"""Anthropic's Messages as chats, and the answers of chats as messages."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from anthropic.types.beta import BetaContentBlock
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.protocols.base import AnswerMalformed
from gateway.protocols.documents import Document, Readable
from gateway.protocols.history import words_for
from gateway.protocols.messages import MessagesFormat, error_body
from gateway.protocols.messages.request import MessagesChat, to_chat
from gateway.protocols.messages.response import MessageEncoder, message_of
from gateway.protocols.sealing import Sealer
from gateway.strict_json import encode_json
from paceline.request.fields import FieldError
from tests.support.chat_bodies import user
from tests.support.chat_frames import call_delta, chat_chunk, named_events
from tests.support.images import data_url, png_header
from tests.support.json_values import with_odd_values
from tests.support.tool_call_text import cut_at

SEALER = Sealer(b"secret")
MESSAGES = MessagesFormat(SEALER)
PICTURE = data_url(png_header(8, 8))
READABLE = Readable()
SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}


def sign(reasoning: str) -> str:
    return SEALER.seal(b"", b"thinking " + reasoning.encode())


def is_ours(reasoning: str, signature: str) -> bool:
    return sign(reasoning) == signature


CALL = {"type": "tool_use", "id": "call00001", "name": "look", "input": {"at": "a"}}
LOOK = {"name": "look", "input_schema": {"type": "object"}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
SINGLE = {"type": "auto", "disable_parallel_tool_use": "no"}
SEARCH = {"type": "tool", "name": "web_search"}
LINE = "x-anthropic-billing-header: cch=1a2b"
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5, "system_tokens": 7},
}
COUNTS = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 3,
}


def to_body(*messages: Any, readable: Readable = READABLE, **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages), **fields}
    return to_chat(body, is_ours, readable)


def chat(*messages: Any, **fields: Any) -> Any:
    return to_body(*messages, **fields).body


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(content: Any, index: int = 1) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"call{index:05}", "content": content}


def image(picture: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture}}


def events(*frames: dict[str, Any]) -> list[dict[str, Any]]:
    encoder = MessageEncoder(sign, MessagesChat({}, {}))
    return named_events(b"".join(encoder.event(b"", one) for one in frames) + encoder.done())


def whole(message: dict[str, Any], **fields: Any) -> Any:
    answer = {"id": "chatcmpl-1", "model": "m", "choices": [{"message": message, **fields}]}
    request: Any = None
    encoded = MESSAGES.encode(request, answer | {"usage": USAGE}, b"")
    return json.loads(encoded, parse_constant=pytest.fail)


def test_a_plain_request_is_a_chat() -> None:
    assert chat(user("Hi"), system="Be brief.", stop_sequences=["x"], temperature=0) == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "stop": ["x"],
        "messages": [{"role": "system", "content": "Be brief."}, user("Hi")],
    }


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([text(LINE), text("You are Claude."), text("Be brief.")], "You are Claude.\n\nBe brief."),
        (f"{LINE}\nBe brief.\n\nBe kind.", "Be brief.\n\nBe kind."),
        ([text(f"{LINE}\nBe brief.\n\nBe kind.")], "Be brief.\n\nBe kind."),
        (LINE, ""),
    ],
)
def test_a_line_that_changes_with_each_request_is_left_out_of_the_system_prompt(
    system: Any, expected: str
) -> None:
    before = [{"role": "system", "content": expected}] if expected else []
    assert chat(user("Hi"), system=system)["messages"] == [*before, user("Hi")]


def test_a_system_message_in_the_middle_keeps_its_place() -> None:
    given = [user("Hi"), {"role": "system", "content": "Now in French."}]
    assert chat(*given)["messages"] == [user("Hi"), user("Now in French.")]
    for content in ("Now in French.", [text("Now in French.")]):
        system = {"role": "system", "content": content}
        sent = chat(user("Hi"), system, readable=Readable(system_inside=True))
        assert sent["messages"] == given, "the worker renders it as its template takes it"


def test_calls_and_results_become_messages_of_a_chat_in_their_order() -> None:
    two = result([text("two"), {"type": "image", "source": SOURCE}], 2) | {"is_error": True}
    function = {"name": "look", "arguments": '{"at":"a"}'}
    call = {"id": "call00001", "type": "function", "function": function}
    turn = user([result("one"), two, text("Go on.")])
    assert chat(assistant(text("I look."), CALL), turn)["messages"] == [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "one"},
        {"role": "tool", "tool_call_id": "call00002", "content": "Error: two"},
        user([image(PICTURE), text("Go on.")]),
    ]


def test_words_stand_for_what_tools_of_anthropics_servers_did() -> None:
    blocks = get_args(get_args(BetaContentBlock)[0])
    kinds = [get_args(block.model_fields["type"].annotation)[0] for block in blocks]
    kinds = [kind for kind in kinds if "_tool_" in kind and kind != "mcp_tool_listing"]
    assert {"server_tool_use", "web_fetch_tool_result", "mcp_tool_result"} < {*kinds}
    content = [{"type": kind, "id": "a", "tool_use_id": "a"} for kind in kinds]
    translated = to_body(user("?"), assistant(*content, text("I have read it.")))
    (_, message) = translated.body["messages"]
    assert message["content"] == "".join(map(words_for, kinds)) + "I have read it."
    assert translated.replaced == tuple(
        f"messages.1.content.{index}:{kind}" for index, kind in enumerate(kinds)
    )


PDF: dict[str, Any] = {
    "type": "document",
    "title": "Terms",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x"},
}
PDF_TEXT = "[The text of the PDF document 'Terms', 1 pages:]\n[Page 1]\nOne"


def test_a_pdf_is_its_text_and_its_pages_wherever_it_stands() -> None:
    def read(*turn: Any, kinds: frozenset[str] | None = None, **document: Any) -> Any:
        documents = {"JVBERi0x": Document(**document)}
        readable = Readable(documents=documents) if kinds is None else Readable(kinds, documents)
        return to_body(*turn, readable=readable)

    turn = [user([PDF]), assistant(CALL), user([result([PDF])])]
    sent = read(*turn, text="[Page 1]\nOne", page_count=1, pages=(PICTURE,))
    first, _, told, behind = sent.body["messages"]
    assert first == user([text(PDF_TEXT), image(PICTURE)])
    assert (told["content"], behind) == (PDF_TEXT, user([image(PICTURE)]))
    assert not sent.replaced
    assert sent.param("messages[3].content[0].image_url") == "messages.2.content.0.content.0"
    sent = read(*turn[1:], problem="it is encrypted")
    assert "encrypted" in sent.body["messages"][1]["content"]
    assert sent.replaced == ("messages.1.content.0.content.0:document",)
    with pytest.raises(FieldError, match=r"messages\.0\.content\.0\.source: .*encrypted"):
        read(user([PDF]), problem="it is encrypted")
    scanned = read(*turn, kinds=frozenset(), page_count=3)
    assert "does not read pictures" in scanned.body["messages"][2]["content"]


def test_words_stand_for_pictures_of_a_history_that_no_worker_sees() -> None:
    picture = {"type": "image", "source": SOURCE}
    turn = [user([picture]), assistant(CALL), user([result([picture]), picture])]
    first, _, told, new = chat(*turn, readable=Readable(frozenset()))["messages"]
    assert (first["content"], told["content"]) == (words_for("image"),) * 2
    assert new["content"][0]["type"] == "image_url", "a new picture is refused by its own name"


def test_an_answer_goes_on_from_a_last_message_of_the_assistant() -> None:
    turn = [user("Sing"), assistant(text("La"))]
    sent = to_body(*turn)
    assert sent.body["continue_final_message"] is True
    assert sent.body["add_generation_prompt"] is False
    assert sent.param("continue_final_message") == "messages.1"
    assert "continue_final_message" not in chat(turn[0])
    with pytest.raises(FieldError, match="tool calls") as refused:
        chat(*turn, assistant(CALL))
    assert refused.value.param == "messages.2"


UNKNOWN = {"type": "container_upload", "file_id": "f"}
LINK = {"type": "image", "source": {"type": "url", "url": "https://x/a.png"}}


def test_f64_no_block_of_a_history_ends_a_conversation() -> None:
    """A block that no model reads is refused once, where the user says it; then words stand."""
    reply = assistant(CALL, {"type": "new, kind"})
    turn = [user([UNKNOWN, LINK]), reply, user([result([UNKNOWN, LINK])])]
    translated = to_body(*turn)
    first, called, last = translated.body["messages"]
    assert first["content"] == "\n\n".join((words_for("container_upload"), words_for("image")))
    assert called["content"] == words_for("new, kind")
    assert last["content"] == first["content"], "the client sends a result again until it goes on"
    assert translated.replaced == (
        "messages.0.content.0:container_upload",
        "messages.0.content.1:image",
        "messages.1.content.1:new%2C%20kind",
        "messages.2.content.0.content.0:container_upload",
        "messages.2.content.0.content.1:image",
    )
    with pytest.raises(FieldError, match="container_upload"):
        chat(*turn, user([UNKNOWN]))


def test_a_deferred_tool_is_none_until_a_search_finds_it() -> None:
    tools = [{"name": name, "input_schema": {}, "defer_loading": True} for name in "ab"]
    tools.append({"name": "search", "input_schema": {}})
    found = user([result([{"type": "tool_reference", "tool_name": "a"}])])

    def tools_of(*messages: Any, **fields: Any) -> list[str]:
        sent = chat(*messages, tools=tools, **fields)
        return [one["function"]["name"] for one in sent["tools"]]

    assert tools_of(user("?")) == ["search"]
    assert tools_of(user("?"), assistant(CALL), found) == ["search", "a"]
    assert tools_of(user("?"), tool_choice={"type": "tool", "name": "b"}) == ["b", "search"]
    assert chat(user("?"), assistant(CALL), found)["messages"][-1]["content"] == "Tool: a"


def test_tools_change_in_the_middle_of_a_conversation() -> None:
    """Claude Code adds the tools of a server that connects late."""

    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"type": f"tool_{kind}", "tool": tool}

    tools = [{"name": "a", "input_schema": {}, "defer_loading": True}, {"name": "b"}]
    text = {"type": "text", "text": "Tools have changed."}
    added = change("addition", type="tool_reference", name="a")
    removed = change("removal", type="tool_reference", name="b")
    defined = change("addition", type="tool_definition", definition={"name": "c"})
    for blocks, names in (
        ([added], ["b", "a"]),
        ([added, removed], ["a"]),
        ([added, removed, defined], ["a", "c"]),
        ([removed, change("addition", type="tool_reference", name="b")], ["b"]),
        ([defined, change("removal", type="tool_reference", name="c")], ["b"]),
        ([change("addition", type="tool_definition", definition={"name": "b"})], ["b"]),
    ):
        system = {"role": "system", "content": [text, *blocks]}
        translated = to_chat({"messages": [user("?"), system], "tools": tools}, is_ours)
        assert [one["function"]["name"] for one in translated.body["tools"]] == names
        assert translated.body["messages"] == [user("?"), user("Tools have changed.")]
        assert translated.replaced == ()
    unknown = {"role": "system", "content": [change("addition", type="mcp_toolset_reference")]}
    with pytest.raises(FieldError, match="tool_addition"):
        to_chat({"messages": [user("?"), unknown], "tools": tools}, is_ours)


def test_a_search_result_is_its_text_and_old_results_are_cleared_before() -> None:
    block = {"type": "search_result", "title": "T", "source": "s", "content": [text("found")]}
    assert chat(user([block]))["messages"] == [user("T\ns\nfound")]
    none = {"type": "tool_uses", "value": 0}
    edit = {"type": "clear_tool_uses_20250919", "trigger": none, "keep": none}
    edits = {"edits": [edit]}
    sent = chat(assistant(CALL), user([result("much")]), context_management=edits)
    assert sent["messages"][1]["content"].startswith("[The result of this tool call was cleared")


def test_tools_and_the_choice_among_them() -> None:
    """A tool of Anthropic's servers is left out and named."""
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    translated = to_body(user("Hi"), tools=[WEB_SEARCH, tool], tool_choice=choice)
    sent = translated.body
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert translated.left_out == ("tools.0:web_search_20250305",)
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
    named = chat(user("Hi"), tools=[tool], tool_choice={"type": "tool", "name": "look"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    alone = chat(user("Hi"), tools=[WEB_SEARCH], tool_choice={"type": "auto"})
    assert not {"tools", "tool_choice"} & alone.keys()


FORMAT = {"type": "json_schema", "schema": {"type": "null"}}
NULL = {"name": "answer", "strict": True, "schema": {"type": "null"}}


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "adaptive"}}, {"reasoning_effort": "high"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"reasoning_effort": "high", "thinking_budget": 9},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            {"reasoning_effort": "high", "include_reasoning": False},
        ),
        (
            {"output_config": {"format": FORMAT}},
            {"response_format": {"type": "json_schema", "json_schema": NULL}},
        ),
    ],
)
def test_reasoning_and_form(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    assert chat(user("Hi"), **fields) == chat(user("Hi")) | sent


def test_reasoning_comes_back_to_the_model_only_if_it_is_ours_and_unchanged() -> None:
    thinking, answer = whole({"reasoning_content": "Hm.", "content": "Yes."})["content"]
    ours = chat(user("?"), assistant(thinking, answer))["messages"][1]
    assert ours["reasoning_content"] == "Hm."
    signature = Sealer(b"other").seal(b"", b"thinking Hm.")
    for change in ({"thinking": "Hm!"}, {"signature": signature}):
        changed = chat(user("?"), assistant(thinking | change, answer))["messages"][1]
        assert "reasoning_content" not in changed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user(7)]}, "messages.0.content"),
        ({"messages": [user([{"type": "text"}])]}, "messages.0.content.0.text"),
        ({"messages": [user([{"type": "video"}])]}, "messages.0.content.0.type"),
        (
            {"messages": [user([{"type": "document", "source": {"type": "url", "url": "x"}}])]},
            "messages.0.content.0.source.type",
        ),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": [{}]}, "tools.0"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEB_SEARCH, LOOK], "tool_choice": SEARCH}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": SINGLE}, "tool_choice.disable_parallel_tool_use"),
        ({"tools": [{**LOOK, "defer_loading": "no"}]}, "tools.0.defer_loading"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
    ],
)
def test_an_invalid_field_is_named_as_anthropic_does(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as invalid:
        to_chat({"model": "m", "messages": [user("Hi")], **fields}, is_ours)
    assert invalid.value.param == param
    assert param in invalid.value.message


def test_an_answer_of_another_shape_is_malformed() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"at": "a"}'}}
    said = {"content": "Yes.", "reasoning_content": "Hm.", "reasoning": None, "tool_calls": [call]}
    choice = {"message": said, "delta": said, "finish_reason": "stop"}
    answer = {"id": "c", "model": "m", "choices": [choice], "usage": USAGE}
    request: Any = None
    malformed = 0
    for odd in with_odd_values(answer):
        encoder = MessageEncoder(sign, MessagesChat({}, {}))
        try:
            if isinstance(odd, dict):
                json.loads(MESSAGES.encode(request, odd, b""), parse_constant=pytest.fail)
                stream = encoder.event(b"", odd) + encoder.done()
                for line in stream.splitlines()[1::3]:
                    json.loads(line.removeprefix(b"data: "), parse_constant=pytest.fail)
        except AnswerMalformed:
            malformed += 1
    assert malformed > 80


TEXTS = st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(("look", "mail")), st.dictionaries(TEXTS, VALUES, max_size=3)),
    max_size=3,
)
CUTS = st.lists(st.integers(1, 40), max_size=4)


def content_of(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that a client puts together from the events of a message."""
    blocks: list[dict[str, Any]] = []
    inputs: defaultdict[int, str] = defaultdict(str)
    for event in stream:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            index, delta = event["index"], dict(event["delta"])
            if delta.pop("type") == "input_json_delta":
                inputs[index] += delta["partial_json"]
            else:
                for name, piece in delta.items():
                    blocks[index][name] += piece
    for index, written in inputs.items():
        blocks[index]["input"] = json.loads(written or "{}")
    return blocks


@settings(deadline=None)
@given(reasoning=TEXTS, text=TEXTS, calls=CALLS, cuts=CUTS)
def test_an_answer_that_comes_back_is_the_message_that_it_was(reasoning, text, calls, cuts) -> None:
    """Nothing is lost on the way, whole or streamed in any pieces."""
    functions = [{"name": name, "arguments": encode_json(given).decode()} for name, given in calls]
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    if functions:
        message["tool_calls"] = [
            {"id": f"call{index}", "type": "function", "function": function}
            for index, function in enumerate(functions)
        ]
    content = whole(message)["content"]
    frames = [chat_chunk({"role": "assistant", "content": ""})]
    frames += [chat_chunk({"reasoning_content": one}) for one in cut_at(reasoning, cuts)]
    frames += [chat_chunk({"content": one}) for one in cut_at(text, cuts)]
    for index, function in enumerate(functions):
        frames.append(chat_chunk(call_delta(index, name=function["name"], arguments="")))
        for one in cut_at(function["arguments"], cuts):
            frames.append(chat_chunk(call_delta(index, arguments=one)))
    assert content_of(events(*frames, chat_chunk({}, finish_reason="stop"))) == content

    back = chat(user("?"), assistant(*content), user("And?"))["messages"][1:-1]
    assert back == ([message] if text or calls or reasoning else [])


@given(system=TEXTS, asked=TEXTS, results=st.lists(TEXTS, min_size=1, max_size=3), then=TEXTS)
def test_what_a_user_and_the_tools_say_is_in_the_chat(system, asked, results, then) -> None:
    blocks = [result(content, index) for index, content in enumerate(results)]
    sent = chat(user(asked), user([*blocks, text(then)]), system=system)
    tools = [
        {"role": "tool", "tool_call_id": f"call{index:05}", "content": content}
        for index, content in enumerate(results)
    ]
    before = [{"role": "system", "content": system}] if system else []
    assert sent["messages"] == [*before, user(asked), *tools, user(then)]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        *((one, {"arguments": one}) for one in ('{"a": NaN}', "[1]", '{"a":')),
        ('{"a": 1e999}', {"a": None}),
    ],
)
def test_arguments_of_a_call_that_are_no_strict_json_stay_text(arguments: str, read: Any) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    (block,) = whole({"tool_calls": [call]})["content"]
    assert block["input"] == read


def test_an_answer_is_a_message() -> None:
    call = {"id": "call00001", "function": {"name": "look", "arguments": '{"at": "a"}'}}
    message = {"content": "I look.", "tool_calls": [call]}
    assert whole(message, finish_reason="tool_calls") == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [text("I look."), CALL],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": COUNTS,
    }


def test_a_stop_sequence_is_named_and_usage_tells_the_tokens_of_reasoning() -> None:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}
    usage = USAGE | {"completion_tokens_details": {"reasoning_tokens": 2}}
    frame = {"id": "chatcmpl-1", "choices": [choice], "usage": usage}
    end = events(chat_chunk({"content": "a"}), frame)[-2]
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert end["usage"] == COUNTS | {"output_tokens_details": {"thinking_tokens": 2}}
    for reason, expected in (("END", ("stop_sequence", "END")), (7, ("end_turn", None))):
        message = whole({"content": "a"}, finish_reason="stop", stop_reason=reason)
        assert (message["stop_reason"], message["stop_sequence"]) == expected
    filtered = whole({"content": "a"}, finish_reason="content_filter")
    assert filtered["stop_reason"] == "refusal", "no end of the model's own"


def test_the_events_of_a_stream_come_in_anthropics_order() -> None:
    found = events(
        chat_chunk({"role": "assistant", "content": ""}),
        chat_chunk({"reasoning_content": "Hm."}, usage=USAGE | {"completion_tokens": 1}),
        chat_chunk({"content": "I "}),
        chat_chunk({"content": "look."}),
        chat_chunk(call_delta(name="look", arguments="")),
        chat_chunk(call_delta(arguments='{"at": ')),
        chat_chunk(call_delta(arguments='"a"}')),
        chat_chunk({}, finish_reason="tool_calls"),
        {"id": "chatcmpl-1", "model": "m", "choices": [], "usage": USAGE},
    )
    kinds = [event["type"].removeprefix("content_block_") for event in found]
    block = ["start", "delta", "delta", "stop"]
    assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert found[0]["message"]["usage"]["input_tokens"] == COUNTS["input_tokens"]
    blocks = [event["content_block"]["type"] for event in found if "content_block" in event]
    assert blocks == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in found[1:-2]] == [0] * 4 + [1] * 4 + [2] * 4
    pieces = [event["delta"].get("partial_json", "") for event in found[1:-2] if "delta" in event]
    assert json.loads("".join(pieces)) == CALL["input"]
    assert found[3]["delta"]["type"] == "signature_delta"
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == COUNTS


EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
MARKED = {**text("Be brief."), **EPHEMERAL}
PARTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@pytest.mark.parametrize(
    ("fields", "content", "counts"),
    [
        ({"system": "Be brief.", "tools": [LOOK]}, [text("Hi")], (6, 0, 4)),
        ({"cache_control": None, "tools": [LOOK | {"cache_control": None}]}, "Hi", (6, 0, 4)),
        ({"system": [MARKED]}, "Hi", (3, 3, 4)),
        ({"tools": [LOOK | EPHEMERAL]}, "Hi", (3, 3, 4)),
        ({"system": [MARKED]}, [MARKED], (1, 5, 4)),
        ({}, [result("4") | EPHEMERAL], (1, 5, 4)),
        ({**EPHEMERAL}, "Hi", (1, 5, 4)),
    ],
)
def test_tokens_up_to_the_last_breakpoint_are_counted_as_stored(fields, content, counts) -> None:
    """As Anthropic documents it; whole, and the same at the begin and at the end of a stream."""
    sent = to_body(user(content), **fields)
    found = [tuple(usage[part] for part in PARTS) for usage in usages_of(sent.breakpoint_in)]
    assert found == [counts] * 3


def usages_of(place: str) -> Iterator[dict[str, Any]]:
    frame = {"id": "chatcmpl-1", "model": "m", "usage": USAGE}
    yield message_of(frame, [], place)["usage"]
    encoder = MessageEncoder(None, MessagesChat({}, {}, breakpoint_in=place))
    begin = named_events(encoder.event(b"", chat_chunk({"content": "a"}, usage=USAGE)))
    yield begin[0]["message"]["usage"]
    # A worker may find no room to store the prompt, and an engine may count otherwise at the end.
    others = {"cached_tokens": 10, "cache_write_tokens": 0}
    encoder.event(b"", {"choices": [], "usage": USAGE | {"prompt_tokens_details": others}})
    yield named_events(encoder.done())[-2]["usage"]


@pytest.mark.parametrize("first", [None, {"prompt_tokens": 0, "completion_tokens": 1}])
def test_an_engine_that_tells_its_usage_at_the_end_alone_has_it_there(first) -> None:
    found = events(
        chat_chunk({"content": "a"}, usage=first),
        chat_chunk({}, finish_reason="stop"),
        {"choices": [], "usage": USAGE},
    )
    begin, end = found[0]["message"]["usage"], found[-2]["usage"]
    assert (begin.keys(), end) == (end.keys(), COUNTS)
    assert not any(begin[part] for part in PARTS), "clients add no number twice"


def test_an_error_without_a_fault_of_the_client_is_one_of_the_api() -> None:
    assert b'"api_error"' in error_body(GatewayError())
