"""Whatever the engine: calls one after another, with an index, an id, a name and text each."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.base import AnswerMalformed
from gateway.protocols.engine_answer import EngineAnswer, FieldUnheld
from paceline.request.call_rules import CallRules, read_call_rules

Json = dict[str, Any]
FREE = CallRules(frozenset("fgh"))


def chunk(*calls: Json, **choice: Any) -> Json:
    delta = {"tool_calls": list(calls)} if calls else {}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}


def piece(index: int | None = 0, call_id: str = "", name: Any = "", arguments: Any = "") -> Json:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    fields = {"index": index, "id": call_id} | {"function": function}
    return {name: value for name, value in fields.items() if value not in (None, "")}


def read(*chunks: Json, rules: CallRules = FREE) -> tuple[list[Json], list[Any]]:
    """Return the calls as an SDK merges them, by index, and the reasons of the end."""
    answer = EngineAnswer("x", "m", rules)
    merged: list[Json] = []
    reasons: list[Any] = []
    for one in chunks:
        answer.read(one, "delta")
        for choice in one["choices"]:
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(merged):
                    assert call["id"]
                    assert call["type"] == "function"
                    merged.append(call | {"function": dict(call["function"])})
                else:
                    assert call["index"] == len(merged) - 1, "one call after another"
                    merged[-1]["function"]["arguments"] += call["function"]["arguments"]
    return [one["function"] | {"id": one["id"]} for one in merged], reasons


def end() -> Json:
    return chunk(finish_reason="stop")


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, "a", "f", '{"k":1}'), piece(1, "b", "g", '{"k":2}')],
        [piece(0, "a", "f"), piece(1, "b", "g"), *(piece(i, arguments='{"k"') for i in (0, 1)),
         piece(0, arguments=":1}"), piece(1, arguments=":2}")],
        [piece(1, "b", "f", '{"k":1}'), piece(0, "a", "g", '{"k":2}')],
        [piece(0, "a", "f", '{"k":1}'), piece(0, "b", "g", '{"k":2}')],
        [piece(None, "a", "f", '{"k":1}'), piece(None, "b", "g", '{"k":2}')],
        [piece(None, "", "f", {"k": 1}), piece(None, "", "g", {"k": 2})],
        [piece(0, "", "f", '{"k":1}'), piece(0, "", "g", '{"k":2}')],
        [piece(0, "a", "f", '{"k"'), piece(0, "a", "f", ":1}"), piece(1, "b", "g", '{"k":2}')],
        [piece(0, "a", "f", '{"k":1}'), piece(0, "a", "f", '{"k":1}'),
         piece(1, "b", "g", '{"k":2}')],
        [piece(0, "", "f"), piece(0, "a", arguments='{"k":1}'), piece(1, "a", "g", '{"k":2}')],
    ],
)  # fmt: skip
@pytest.mark.parametrize("together", [False, True])
def test_two_calls_stay_two_however_they_are_numbered(pieces, *, together) -> None:
    copies = json.loads(json.dumps(pieces))
    chunks = [chunk(*copies)] if together else [chunk(one) for one in copies]
    calls, reasons = read(*chunks, end())
    found = [(one["name"], json.loads(one["arguments"])) for one in calls]
    assert found == [("f", {"k": 1}), ("g", {"k": 2})]
    assert len({one["id"] for one in calls}) == 2
    assert reasons == ["tool_calls"], "by what is there, not by what the engine says"


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.text('a}{",', max_size=6), max_size=3)


@given(data=st.data(), calls=st.lists(st.tuples(st.sampled_from("fgh"), ARGUMENTS), max_size=4))
def test_any_cutting_and_interleaving_gives_the_same_calls(data, calls) -> None:
    queues = []
    for index, (name, arguments) in enumerate(calls):
        text = json.dumps(arguments)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        head = piece(index, f"id{index}", name)
        queues.append([head, *(piece(index, arguments=part) for part in parts)])
    turns = data.draw(st.permutations([i for i, queue in enumerate(queues) for _ in queue]))
    begun = sorted(set(turns), key=turns.index)
    chunks = [chunk(queues[turn].pop(0)) for turn in turns]
    read_calls, reasons = read(*chunks, end())
    expected = [calls[index] for index in begun]
    assert [(one["name"], json.loads(one["arguments"])) for one in read_calls] == expected
    assert reasons == ["tool_calls" if calls else "stop"]


def test_what_has_its_form_stays_as_it_is_but_for_the_name_of_the_model() -> None:
    answer = EngineAnswer("x", "m", FREE)
    chunks = [
        chunk(piece(0, "a", "f") | {"type": "function"}),
        chunk(piece(0, arguments='{"k":1}')),
        chunk(finish_reason="tool_calls"),
        {"model": "m", "choices": [{"index": 0, "delta": {"content": "Hi"}}]},
    ]
    assert [answer.read(one, "delta") for one in chunks] == [False] * 4
    for model, renames in (("m", False), ("/Users/me/model", True)):
        frame = {"model": model, "choices": []}
        assert answer.read(frame, "delta") == answer.renames == renames
        assert frame["model"] == "m", "that by which the client knows it"


def test_a_whole_call_is_passed_on_at_once_and_one_without_arguments_gets_an_empty_object() -> None:
    answer = EngineAnswer("x", "m", FREE)
    frames = chunk(piece(0, "a", "f", "{}")), chunk(piece(1, "b", "g")), end()
    for frame in frames:
        answer.read(frame, "delta")
    _, second, last = (frame["choices"][0]["delta"]["tool_calls"][0] for frame in frames)
    assert second["index"] == 1
    assert last == {"index": 1, "function": {"arguments": "{}"}}


def whole(*calls: Json, reason: Any = "stop", **message: Any) -> Json:
    message |= {"tool_calls": list(calls)} if calls else {}
    return {"model": "/a/path", "choices": [{"message": message, "finish_reason": reason}]}


def test_a_whole_answer_gets_the_form_too() -> None:
    answer = whole(piece(0, "", "f", {"k": 1}), piece(0, "a", "f"), piece(None, "a", "g", "{}"))
    EngineAnswer("x", "m", FREE).read(answer, "message")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [one["function"]["arguments"] for one in calls] == ['{"k":1}', "{}", "{}"]
    assert [one["id"] for one in calls] == ["call_x00", "a", "call_x02"]
    assert all(one.keys() == {"id", "type", "function"} for one in calls)


@pytest.mark.parametrize(
    ("given_reason", "reason"),
    [("eos", "stop"), ("max_tokens", "length"), ("tool_calls", "stop"), ("length", "length")],
)
def test_the_reason_of_the_end_is_one_that_clients_know(given_reason: str, reason: str) -> None:
    answer = whole(content="Hi", reason=given_reason)
    EngineAnswer("x", "m", FREE).read(answer, "message")
    assert answer["choices"][0]["finish_reason"] == reason
    assert read(chunk(finish_reason=given_reason))[1] == [reason]


@pytest.mark.parametrize(
    "pieces",
    [[piece(0, "a", "", "{}")], [piece(0, "a", "f", 7)], [piece(0, "a", 7)],
     [piece(0, "a", "f", "{}"), piece(1, "b", "g"), piece(0, arguments="{1}")]],
)  # fmt: skip
def test_calls_that_no_client_could_read_are_malformed(pieces: list[Json]) -> None:
    with pytest.raises(AnswerMalformed):
        read(*(chunk(one) for one in pieces), end())


TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]


def only(*names: str, mode: str = "auto") -> Json:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "called", "kept"),
    [
        ({"tool_choice": "required"}, "", None),
        ({"tool_choice": "required"}, "fg", "fg"),
        ({"tool_choice": "required"}, "h", None),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "f", None),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "fgg", "g"),
        ({"tool_choice": only("g", mode="required")}, "f", None),
        ({"tool_choice": only("g")}, "fg", "g"),
        ({"tool_choice": only("g")}, "f", ""),
        ({"tool_choice": only()}, "fg", ""),
        ({"tool_choice": "none"}, "fg", ""),
        ({"tools": None}, "f", ""),
        ({}, "hfhgh", "fg"),
        ({"parallel_tool_calls": False}, "hfg", "f"),
        ({"parallel_tool_calls": True, "max_tool_calls": 2}, "fgf", "fg"),
        ({"parallel_tool_calls": False, "max_tool_calls": 2}, "fgf", "f"),
        ({"tool_choice": "auto"}, "", ""),
    ],
)
def test_calls_that_the_request_does_not_admit_are_left_out_and_the_end_tells_of_the_others(
    fields: Json, called: str, kept: str | None
) -> None:
    """In a stream each comes in pieces; without any that is admitted, a forced call is missing."""
    rules = read_call_rules({"tools": TOOLS, **fields})
    calls = [piece(index, f"id{index}", name, '{"a":1}') for index, name in enumerate(called)]
    halves = [
        half
        for index, name in enumerate(called)
        for half in (piece(index, f"id{index}", name, '{"a"'), piece(index, arguments=":1}"))
    ]
    frames = [*map(chunk, halves), chunk(content="text"), end()]
    answer, form = whole(*calls, content="text"), EngineAnswer("x", "m", rules)
    if kept is None:
        with pytest.raises(FieldUnheld, match="tool_choice"):
            read(*frames, rules=rules)
        with pytest.raises(FieldUnheld, match="tool_choice"):
            form.read(answer, "message")
        form.read(whole(content="text", reason="length"), "message")  # it had no time to call
        return
    streamed, reasons = read(*frames, rules=rules)
    form.read(answer, "message")
    (choice,) = answer["choices"]
    found = [one["function"] for one in choice["message"].get("tool_calls", ())]
    for functions in (found, streamed):
        assert "".join(one["name"] for one in functions) == kept
        assert all(json.loads(one["arguments"]) == {"a": 1} for one in functions)
    assert reasons == [choice["finish_reason"]] == ["tool_calls" if kept else "stop"]
    assert choice["message"]["content"] == "text"
    assert form.left_out == len(called) - len(kept)


@pytest.mark.parametrize("name", ["f", "h"])
def test_a_call_in_the_form_of_2023_is_one_like_others(name: str) -> None:
    """Some engines write it beside the same call in today's form."""
    old = {"function_call": {"name": name, "arguments": "{}"}}
    answer, beside = whole(**old), whole(piece(0, "a", "f", "{}"), **old)
    streamed = chunk() | {"choices": [{"index": 0, "delta": old, "finish_reason": None}]}
    calls, reasons = read(json.loads(json.dumps(streamed)), end())
    for one in (answer, beside):
        EngineAnswer("x", "m", CallRules(frozenset("f"))).read(one, "message")
        assert "function_call" not in one["choices"][0]["message"]
    (choice,) = answer["choices"]
    assert len(choice["message"].get("tool_calls", ())) == (name == "f")
    assert len(beside["choices"][0]["message"]["tool_calls"]) == 1
    assert ([one["name"] for one in calls], reasons) == ([name], ["tool_calls"])


@pytest.mark.parametrize("reason", ["length", "content_filter"])
@pytest.mark.parametrize("arguments", ["", '{"k', None])
def test_a_cut_call_has_the_arguments_that_came_and_none_without_a_name(reason, arguments) -> None:
    last = piece(1, "b", "" if arguments is None else "g", arguments or "")
    calls = [piece(0, "a", "f", '{"k":1}'), last]
    answer = whole(*calls, reason=reason)
    EngineAnswer("x", "m", FREE).read(answer, "message")
    streamed, reasons = read(*map(chunk, calls), chunk(finish_reason=reason))
    found = [one["function"] for one in answer["choices"][0]["message"]["tool_calls"]]
    expected = ['{"k":1}'] if arguments is None else ['{"k":1}', arguments]
    for functions in (found, streamed):
        assert [one["arguments"] for one in functions] == expected
    assert reasons == [answer["choices"][0]["finish_reason"]] == [reason]
