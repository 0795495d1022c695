"""Anthropic's Messages as chats, and the answers of chats as messages."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args

import pytest
from anthropic.types.beta import BetaContentBlock
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engines.refusals import read_refusal
from gateway.errors import GatewayError, RefusedByWorker
from gateway.protocols.base import AnswerMalformed
from gateway.protocols.documents import Document, Readable
from gateway.protocols.event_stream import StreamScanner
from gateway.protocols.history import words_for
from gateway.protocols.messages import MessagesFormat, error_body
from gateway.protocols.messages.request import to_chat
from gateway.protocols.messages.response import MessageEncoder
from gateway.protocols.openai import encode_json
from gateway.protocols.sealing import Sealer
from policies.request.fields import FieldError
from tests.support.images import data_url, png_header
from tests.support.json_values import with_odd_values

SEALER = Sealer(b"secret")
MESSAGES = MessagesFormat(SEALER)
PICTURE = data_url(png_header(8, 8))


def sign(reasoning: str) -> str:
    return SEALER.seal(b"", b"thinking " + reasoning.encode())


def is_ours(reasoning: str, signature: str) -> bool:
    return sign(reasoning) == signature


CALL = {"type": "tool_use", "id": "call00001", "name": "look", "input": {"at": "a"}}
LOOK = {"name": "look", "input_schema": {"type": "object"}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
SEARCH = {"type": "tool", "name": "web_search"}
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5},
}
COUNTS = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 5,
    "cache_read_input_tokens": 4,
    "output_tokens": 3,
}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages), **fields}
    return to_chat(body, is_ours).body


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chunk(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": fields.pop("finish_reason", None)}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], **fields}


def events(*frames: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream; each has its type as the name too."""
    encoder = MessageEncoder(sign, {})
    stream = b"".join(encoder.event(b"", frame) for frame in frames) + encoder.done()
    found = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_plain_request_is_a_chat() -> None:
    assert chat(user("Hi"), system="Be brief.", stop_sequences=["x"], temperature=0) == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "stop": ["x"],
        "messages": [{"role": "system", "content": "Be brief."}, user("Hi")],
    }


def test_a_text_that_changes_with_each_request_is_left_out_of_the_system_prompt() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b"},
        {"type": "text", "text": "You are Claude.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    system = chat(user("Hi"), system=blocks)["messages"][0]
    assert system == {"role": "system", "content": "You are Claude.\n\nBe brief."}


def test_only_the_line_that_changes_with_each_request_is_left_out_of_a_text() -> None:
    text = "x-anthropic-billing-header: cch=1;\nBe brief.\n\nBe kind."
    for system in (text, [{"type": "text", "text": text}]):
        assert chat(user("Hi"), system=system)["messages"][0] == {
            "role": "system",
            "content": "Be brief.\n\nBe kind.",
        }
    assert chat(user("Hi"), system=text.partition("\n")[0])["messages"] == [user("Hi")]


def test_a_system_message_in_the_middle_keeps_its_place() -> None:
    given = [user("Hi"), {"role": "system", "content": "Now in French."}]
    assert chat(*given)["messages"] == [user("Hi"), user("Now in French.")]
    in_blocks = {"role": "system", "content": [{"type": "text", "text": "Now in French."}]}
    for one in (given, [user("Hi"), in_blocks]):
        sent = to_chat({"messages": one}, is_ours, Readable(system_inside=True)).body
        assert sent["messages"] == given, "the worker renders it as its template takes it"


def test_calls_and_results_become_messages_of_a_chat_in_their_order() -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    results = [
        {"type": "tool_result", "tool_use_id": "call00001", "content": "one"},
        {
            "type": "tool_result",
            "tool_use_id": "call00002",
            "is_error": True,
            "content": [{"type": "text", "text": "two"}, {"type": "image", "source": picture}],
        },
        {"type": "text", "text": "Go on."},
    ]
    function = {"name": "look", "arguments": '{"at":"a"}'}
    assert chat(
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]}, user(results)
    )["messages"] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call00001", "content": "one"},
        {"role": "tool", "tool_call_id": "call00002", "content": "Error: two"},
        user(
            [
                {"type": "image_url", "image_url": {"url": PICTURE}},
                {"type": "text", "text": "Go on."},
            ]
        ),
    ]


def test_words_stand_for_what_tools_of_anthropics_servers_did() -> None:
    blocks = get_args(get_args(BetaContentBlock)[0])
    kinds = [get_args(block.model_fields["type"].annotation)[0] for block in blocks]
    kinds = [kind for kind in kinds if "_tool_" in kind and kind != "mcp_tool_listing"]
    assert {"server_tool_use", "web_fetch_tool_result", "mcp_tool_result"} < {*kinds}
    content = [*({"type": kind, "id": "a", "tool_use_id": "a"} for kind in kinds)]
    text = {"type": "text", "text": "I have read it."}
    reply = {"role": "assistant", "content": [*content, text]}
    translated = to_chat({"messages": [user("?"), reply]}, is_ours)
    (_, message) = translated.body["messages"]
    assert message["content"] == "".join(map(words_for, kinds)) + "I have read it."
    assert translated.replaced == tuple(
        f"messages.1.content.{index}:{kind}" for index, kind in enumerate(kinds)
    )


PDF = {
    "type": "document",
    "title": "Terms",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x"},
}
PAGES = {"JVBERi0x": Document("[Page 1]\nOne", 1, (PICTURE,))}
PDF_TEXT = "[The text of the PDF document 'Terms', 1 pages:]\n[Page 1]\nOne"


def test_a_pdf_is_its_text_and_its_pages_wherever_it_stands() -> None:
    call = {"role": "assistant", "content": [CALL]}
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": [PDF]}
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    turn = [user([PDF]), call, user([result])]
    sent = to_chat({"messages": turn}, is_ours, Readable(documents=PAGES))
    first, _, told, behind = sent.body["messages"]
    assert first == user([{"type": "text", "text": PDF_TEXT}, image])
    assert (told["content"], behind) == (PDF_TEXT, user([image]))
    assert not sent.replaced
    assert sent.param("messages[3].content[0].image_url") == "messages.2.content.0.content.0"

    secret = {"JVBERi0x": Document(problem="it is encrypted")}
    sent = to_chat({"messages": turn[1:]}, is_ours, Readable(documents=secret))
    assert "encrypted" in sent.body["messages"][1]["content"]
    assert sent.replaced == ("messages.1.content.0.content.0:document",)
    with pytest.raises(FieldError, match=r"messages\.0\.content\.0\.source: .*encrypted"):
        to_chat({"messages": [user([PDF])]}, is_ours, Readable(documents=secret))
    scanned = Readable(frozenset(), {"JVBERi0x": Document(page_count=3)})
    assert (
        "sees no pictures"
        in to_chat({"messages": turn}, is_ours, scanned).body["messages"][2]["content"]
    )


def test_words_stand_for_pictures_of_a_history_that_no_worker_sees() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    image["source"]["data"] = PICTURE.partition(",")[2]  # type: ignore[index]
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": [image]}
    turn = [user([image]), {"role": "assistant", "content": [CALL]}, user([result, image])]
    sent = to_chat({"messages": turn}, is_ours, Readable(frozenset()))
    first, _, told, new = sent.body["messages"]
    assert (first["content"], told["content"]) == (words_for("image"),) * 2
    assert new["content"][0]["type"] == "image_url", "a new picture is refused by its own name"


def test_an_answer_goes_on_from_a_last_message_of_the_assistant() -> None:
    turn = [user("Sing"), {"role": "assistant", "content": [{"type": "text", "text": "La"}]}]
    sent = to_chat({"messages": turn}, is_ours)
    assert sent.body["continue_final_message"] is True
    assert sent.body["add_generation_prompt"] is False
    assert sent.param("continue_final_message") == "messages.1"
    assert "continue_final_message" not in to_chat({"messages": turn[:1]}, is_ours).body
    with pytest.raises(FieldError, match="tool calls") as refused:
        to_chat({"messages": [*turn, {"role": "assistant", "content": [CALL]}]}, is_ours)
    assert refused.value.param == "messages.2"


UNKNOWN = {"type": "container_upload", "file_id": "f"}
LINK = {"type": "image", "source": {"type": "url", "url": "https://x/a.png"}}


def test_f64_no_block_of_a_history_ends_a_conversation() -> None:
    """A block that no model reads is refused once, where the user says it; then words stand."""
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": [UNKNOWN, LINK]}
    reply = {"role": "assistant", "content": [CALL, {"type": "new, kind"}]}
    turn = [user([UNKNOWN, LINK]), reply, user([result])]
    translated = to_chat({"messages": turn}, is_ours)
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
        to_chat({"messages": [*turn, user([UNKNOWN])]}, is_ours)


def test_a_deferred_tool_is_none_until_a_search_finds_it() -> None:
    tools = [{"name": name, "input_schema": {}, "defer_loading": True} for name in "ab"]
    tools.append({"name": "search", "input_schema": {}})
    found = {"type": "tool_reference", "tool_name": "a"}
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": [found]}
    turns = [[user("?")], [user("?"), {"role": "assistant", "content": [CALL]}, user([result])]]
    for messages, names in zip(turns, (["search"], ["a", "search"]), strict=True):
        sent = to_chat({"messages": messages, "tools": tools}, is_ours).body
        assert [one["function"]["name"] for one in sent["tools"]] == names
    assert sent["messages"][-1]["content"] == "Tool: a"
    choice = {"type": "tool", "name": "b"}
    sent = to_chat({"messages": turns[0], "tools": tools, "tool_choice": choice}, is_ours).body
    assert [one["function"]["name"] for one in sent["tools"]] == ["b", "search"]


def test_a_search_result_is_its_text() -> None:
    block = {"type": "search_result", "title": "T", "source": "s", "content": [
        {"type": "text", "text": "found"}]}  # fmt: skip
    assert chat(user([block]))["messages"] == [user("T\ns\nfound")]


def test_tools_and_the_choice_among_them() -> None:
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    sent = chat(
        user("Hi"), tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
    named = chat(user("Hi"), tools=[tool], tool_choice={"type": "tool", "name": "look"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "look"}}


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
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "null"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "strict": True, "schema": {"type": "null"}},
                }
            },
        ),
    ],
)
def test_reasoning_and_form(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    plain = chat(user("Hi"))
    assert chat(user("Hi"), **fields) == plain | sent


def test_reasoning_comes_back_to_the_model_only_if_it_is_ours_and_unchanged() -> None:
    answer = {
        "choices": [
            {"message": {"reasoning_content": "Hm.", "content": "Yes."}, "finish_reason": "stop"}
        ]
    }
    request: Any = None
    thinking, text = json.loads(MESSAGES.encode(request, answer, b""))["content"]
    ours = chat(user("?"), {"role": "assistant", "content": [thinking, text]})["messages"][1]
    assert ours["reasoning_content"] == "Hm."
    changed = thinking | {"thinking": "Hm!"}
    assert (
        "reasoning_content"
        not in chat(user("?"), {"role": "assistant", "content": [changed, text]})["messages"][1]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user(7)]}, "messages.0.content"),
        ({"messages": [user([{"type": "text"}])]}, "messages.0.content.0.text"),
        ({"messages": [user([{"type": "video"}])]}, "messages.0.content.0.type"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": [{}]}, "tools.0"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEB_SEARCH, LOOK], "tool_choice": SEARCH}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
    ],
)
def test_an_invalid_field_is_named_as_anthropic_names_it(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(FieldError) as invalid:
        to_chat({"model": "m", "messages": [user("Hi")], **fields}, is_ours)
    assert invalid.value.param == param
    assert invalid.value.message.startswith(f"{param}: ")


def test_an_answer_of_another_shape_is_malformed() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"at": "a"}'}}
    said = {"content": "Yes.", "reasoning_content": "Hm.", "reasoning": None, "tool_calls": [call]}
    choice = {"message": said, "delta": said, "finish_reason": "stop"}
    answer = {"id": "c", "model": "m", "choices": [choice], "usage": USAGE}
    request: Any = None
    malformed = 0
    for odd in with_odd_values(answer):
        encoder = MessageEncoder(sign, {})
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


def pieces(text: str, cuts: list[int]) -> list[str]:
    """Return a text in pieces, cut at these places."""
    edges = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def content_of(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that a client puts together from the events of a message."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in stream:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type")
            if kind == "input_json_delta":
                index = event["index"]
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            else:
                for name, piece in delta.items():
                    blocks[event["index"]][name] += piece
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text or "{}")
    return blocks


@settings(deadline=None)
@given(reasoning=TEXTS, text=TEXTS, calls=CALLS, cuts=CUTS)
def test_an_answer_that_comes_back_is_the_message_that_it_was(
    reasoning: str, text: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    """Nothing is lost on the way, whole or streamed in any pieces."""
    functions = [{"name": name, "arguments": encode_json(given).decode()} for name, given in calls]
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    if functions:
        message["tool_calls"] = [
            {"id": f"call{index}", "type": "function", "function": function}
            for index, function in enumerate(functions)
        ]
    request: Any = None
    answer = {"id": "c", "model": "m", "choices": [{"message": message}]}
    content = json.loads(MESSAGES.encode(request, answer, b""))["content"]

    frames = [chunk({"role": "assistant", "content": ""})]
    frames += [chunk({"reasoning_content": one}) for one in pieces(reasoning, cuts)]
    frames += [chunk({"content": one}) for one in pieces(text, cuts)]
    for index, function in enumerate(functions):
        first, *rest = pieces(function["arguments"], cuts)
        call = {"index": index, "id": f"call{index}", "function": function | {"arguments": first}}
        frames.append(chunk({"tool_calls": [call]}))
        for one in rest:
            rest_of_call = {"index": index, "function": {"arguments": one}}
            frames.append(chunk({"tool_calls": [rest_of_call]}))
    assert content_of(events(*frames, chunk({}, finish_reason="stop"))) == content

    turn = [user("?"), {"role": "assistant", "content": content}, user("And?")]
    back = chat(*turn)["messages"][1:-1]
    assert back == ([message] if text or calls or reasoning else [])


@settings(deadline=None)
@given(system=TEXTS, asked=TEXTS, results=st.lists(TEXTS, min_size=1, max_size=3), then=TEXTS)
def test_what_a_user_and_the_tools_say_is_in_the_chat(
    system: str, asked: str, results: list[str], then: str
) -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": f"call{index}", "content": result}
        for index, result in enumerate(results)
    ]
    sent = chat(user(asked), user([*blocks, {"type": "text", "text": then}]), system=system)
    assert sent["messages"] == [
        *([{"role": "system", "content": system}] if system else []),
        user(asked),
        *(
            {"role": "tool", "tool_call_id": f"call{index}", "content": result}
            for index, result in enumerate(results)
        ),
        user(then),
    ]


def test_arguments_of_a_call_that_are_no_strict_json_stay_text() -> None:
    for arguments in ('{"a": NaN}', "[1]", '{"a":'):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        answer = {"choices": [{"message": {"tool_calls": [call]}}]}
        request: Any = None
        (block,) = json.loads(MESSAGES.encode(request, answer, b""))["content"]
        assert block["input"] == {"arguments": arguments}
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1e999}'}}
    whole = MESSAGES.encode(request, {"choices": [{"message": {"tool_calls": [call]}}]}, b"")
    assert json.loads(whole, parse_constant=pytest.fail)["content"][0]["input"] == {"a": None}


def test_an_answer_is_a_message() -> None:
    call = {"id": "call00001", "function": {"name": "look", "arguments": '{"at": "a"}'}}
    answer = {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [
            {"message": {"content": "I look.", "tool_calls": [call]}, "finish_reason": "tool_calls"}
        ],
        "usage": USAGE,
    }
    request: Any = None
    assert json.loads(MESSAGES.encode(request, answer, b"")) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "I look."}, CALL],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": COUNTS,
    }


def test_usage_tells_the_tokens_of_reasoning() -> None:
    usage = USAGE | {"completion_tokens_details": {"reasoning_tokens": 2}}
    end = events(chunk({"content": "a"}), {"id": "chatcmpl-1", "choices": [], "usage": usage})[-2]
    assert end["usage"] == COUNTS | {"output_tokens_details": {"thinking_tokens": 2}}


def test_a_stop_sequence_is_named() -> None:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}
    end = events(chunk({"content": "a"}), {"id": "chatcmpl-1", "choices": [choice]})[-2]
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    request: Any = None
    whole = {"choices": [{"message": {"content": "a"}, **choice}]}
    message = json.loads(MESSAGES.encode(request, whole, b""))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    token = whole["choices"][0] | {"stop_reason": 7}
    message = json.loads(MESSAGES.encode(request, {"choices": [token]}, b""))
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


def test_a_silent_stream_gets_pings_behind_its_comments() -> None:
    assert MESSAGES.keep_alive(b": keepalive\n\n") == (
        b': keepalive\n\nevent: ping\ndata: {"type": "ping"}\n\n'
    )


def test_a_comment_of_a_worker_that_reads_a_prompt_reaches_the_client_with_a_ping() -> None:
    comment = b": read 2048 of 9000 tokens of the prompt\n\n"
    scanner = StreamScanner(MessageEncoder(sign, {}), MESSAGES.keep_alive, limit_bytes=4096)
    assert scanner.feed(comment) == MESSAGES.keep_alive(comment)


def test_the_events_of_a_stream_come_in_anthropics_order() -> None:
    def call(**function: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, "id": "call00001", "function": function}]}

    found = events(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm."}, usage=USAGE | {"completion_tokens": 1}),
        chunk({"content": "I "}),
        chunk({"content": "look."}),
        chunk(call(name="look", arguments="")),
        chunk(call(arguments='{"at": ')),
        chunk(call(arguments='"a"}')),
        chunk({}, finish_reason="tool_calls"),
        {"id": "chatcmpl-1", "model": "m", "choices": [], "usage": USAGE},
    )
    kinds = [event["type"].removeprefix("content_block_") for event in found]
    assert kinds == [
        "message_start",
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("message_delta", "message_stop"),
    ]
    assert found[0]["message"]["usage"]["input_tokens"] == COUNTS["input_tokens"]
    blocks = [event["content_block"]["type"] for event in found if "content_block" in event]
    assert blocks == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in found[1:-2]] == [0] * 4 + [1] * 4 + [2] * 4
    pieces = [event["delta"].get("partial_json", "") for event in found[1:-2] if "delta" in event]
    assert json.loads("".join(pieces)) == CALL["input"]
    assert found[3]["delta"]["type"] == "signature_delta"
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == COUNTS


def test_an_overflow_has_the_words_by_which_clients_shorten_a_conversation() -> None:
    overflow = RefusedByWorker(
        400,
        "This model's maximum context length is 100 tokens. However, your messages resulted in "
        "120 tokens. Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
    )
    assert json.loads(error_body(overflow)) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: 120 tokens > 100 maximum",
        },
    }
    words = json.dumps({"error": "the prompt exceeds the available context size"})
    of_an_engine = error_body(read_refusal(400, words.encode(), {"messages": [{}]}))
    assert json.loads(of_an_engine)["error"]["message"].startswith("prompt is too long")
    assert b'"api_error"' in error_body(GatewayError())


def test_a_tool_of_anthropics_servers_is_left_out_and_named() -> None:
    body = {"model": "m", "messages": [user("Hi")], "tools": [WEB_SEARCH, LOOK]}
    sent = to_chat(body, is_ours)
    assert [tool["function"]["name"] for tool in sent.body["tools"]] == ["look"]
    assert sent.left_out == ("tools.0:web_search_20250305",)
    alone = {**body, "tools": [WEB_SEARCH], "tool_choice": {"type": "auto"}}
    assert not {"tools", "tool_choice"} & to_chat(alone, is_ours).body.keys()


def test_a_signature_is_of_one_secret() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": sign("Hm.")}
    message = {"role": "assistant", "content": [thinking, {"type": "text", "text": "Yes."}]}
    assert chat(user("?"), message)["messages"][1]["reasoning_content"] == "Hm."
    thinking["signature"] = Sealer(b"other").seal(b"", b"thinking Hm.")
    assert "reasoning_content" not in chat(user("?"), message)["messages"][1]


def test_old_results_are_cleared_before_the_chat_is_built() -> None:
    result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": "much"}
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 0},
        "keep": {"type": "tool_uses", "value": 0},
    }
    sent = chat(
        {"role": "assistant", "content": [CALL]},
        user([result]),
        context_management={"edits": [edit]},
    )
    assert sent["messages"][1]["content"].startswith("[The result of this tool call was cleared")
