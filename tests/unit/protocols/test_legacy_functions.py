"""Functions of 2023 as tools, and calls of tools as calls of functions."""

from typing import Any

import pytest

from gateway.protocols.legacy_functions import as_function_call, with_tools
from paceline.request.fields import FieldError

FUNCTION = {"name": "look", "parameters": {"type": "object"}}
CALL = {"name": "look", "arguments": '{"at": "a"}'}


@pytest.mark.parametrize(
    ("choice", "tool_choice"),
    [
        (None, {}),
        ("auto", {"tool_choice": "auto"}),
        ("none", {"tool_choice": "none"}),
        ({"name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ],
)
def test_functions_become_tools_of_one_call(choice: Any, tool_choice: dict[str, Any]) -> None:
    body = with_tools({"functions": [FUNCTION], "function_call": choice, "model": "m"})
    tools = [{"type": "function", "function": FUNCTION}]
    assert body == {"model": "m", "tools": tools, "parallel_tool_calls": False, **tool_choice}


def test_each_result_of_a_function_belongs_to_the_last_call_of_that_name() -> None:
    """Also without `functions`, since a conversation may go on without them."""
    call = {"role": "assistant", "content": None, "function_call": CALL}
    red, blue = (
        {"role": "function", "name": "look", "content": color} for color in ("red", "blue")
    )
    last = {"role": "assistant", "content": "Blue."}
    history = [call, red, call, blue, {**last, "function_call": None}]
    messages = with_tools({"messages": history})["messages"]
    ids = [message["tool_calls"][0]["id"] for message in messages[:4:2]]
    assert [message["tool_call_id"] for message in messages[1:4:2]] == ids
    assert len(set(ids)) == 2
    assert [message["role"] for message in messages[:2]] == ["assistant", "tool"]
    assert messages[0]["tool_calls"][0]["function"] == CALL
    assert messages[4] == last


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": {"name": "look"}}, "functions"),
        ({"functions": [FUNCTION, {}]}, "functions[1]"),
        ({"functions": [FUNCTION], "tools": []}, "functions"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
        ({"functions": [FUNCTION], "function_call": {"name": 3}}, "function_call"),
    ],
)
def test_an_invalid_function_is_an_error_of_its_field(fields: Any, param: str) -> None:
    with pytest.raises(FieldError) as invalid:
        with_tools(fields)
    assert invalid.value.param == param


@pytest.mark.parametrize("part", ["message", "delta"])
def test_a_call_of_a_tool_becomes_a_function_call(part: str) -> None:
    tool_call = {"id": "call00001", "type": "function", "function": CALL}
    choices: Any = [
        {"index": 0, part: {"content": None, "tool_calls": [tool_call]}, "finish_reason": None},
        {"index": 1, part: {}, "finish_reason": "tool_calls"},
        {"index": 2, part: {"content": "Hi"}, "finish_reason": "stop"},
    ]
    assert as_function_call(choices, part)
    assert choices == [
        {"index": 0, part: {"content": None, "function_call": CALL}, "finish_reason": None},
        {"index": 1, part: {}, "finish_reason": "function_call"},
        {"index": 2, part: {"content": "Hi"}, "finish_reason": "stop"},
    ]
    assert not as_function_call(choices[2:], part)
    assert not as_function_call(None, part)
