"""Custom tools of `/v1/responses`: the engine holds their text to its grammar, forced or free."""

import re
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.patch_grammar import PATCH

LINES = r"""
start: line{2} last   // two lines, then the last one
line: "say \"" WORD "\" \\" LF
last: ("end" | "end " /[^a-z\n]{0,6}/) LF?
WORD: ("a".."f" | "é" | "\t"){1,4}
%import common.LF
"""
FORMS: Any = [
    pytest.param("lark", LINES, r'(say "[a-fé\t]{1,4}" \\\n){2}end( [^a-z\n]{0,6})?\n?', id="lark"),
    pytest.param("regex", r'^[a-c]{2}"[^"]{0,4}"\n\\?$', r'[a-c]{2}"[^"]{0,4}"\n\\?', id="regex"),
]
QUESTION = "What is the weather in Paris?"


def tool(syntax: str, definition: str, name: str = "get_weather") -> Any:
    return {
        "type": "custom",
        "name": name,
        "description": "Get the weather in a city.",
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }


def streamed_inputs(client: OpenAI, **fields: Any) -> list[str]:
    """Return the texts of the calls in a stream, whose parts spell each text."""
    inputs: list[str] = []
    parts: dict[str, str] = {}
    for event in client.responses.create(stream=True, **fields):
        if event.type == "response.custom_tool_call_input.delta":
            parts[event.item_id] = parts.get(event.item_id, "") + event.delta
        elif event.type == "response.custom_tool_call_input.done":
            inputs.append(event.input)
            assert parts[event.item_id] == event.input
    return inputs


def whole_inputs(client: OpenAI, **fields: Any) -> list[str]:
    output = client.responses.create(**fields).output
    return [item.input for item in output if item.type == "custom_tool_call"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("syntax", "definition", "pattern"), FORMS)
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "get_weather"}])
def test_a_forced_custom_tool_gets_a_text_of_its_grammar(
    openai_client, *, choice, syntax, definition, pattern, temperature
) -> None:
    """Whole and streamed, greedy and sampled."""
    fields: Any = {
        "model": "demo",
        "input": QUESTION,
        "tools": [tool(syntax, definition)],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": temperature,
        "max_output_tokens": 200,
    }
    for read in (whole_inputs, streamed_inputs):
        (text,) = read(openai_client, **fields)
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(("syntax", "definition", "pattern"), FORMS)
def test_a_free_call_of_a_custom_tool_gets_a_text_of_its_grammar(
    openai_client: OpenAI, syntax: str, definition: str, pattern: str
) -> None:
    fields: Any = {
        "model": "demo",
        "input": QUESTION,
        "tools": [tool(syntax, definition)],
        "temperature": 0,
        "max_output_tokens": 200,
    }
    whole, streamed = (
        whole_inputs(openai_client, **fields),
        streamed_inputs(openai_client, **fields),
    )
    assert whole == streamed
    assert len(whole) == 1
    assert re.fullmatch(pattern, whole[0]), whole[0]


def test_the_patch_of_a_coding_agent_begins_as_its_grammar_does(openai_client: OpenAI) -> None:
    """Its lines may have any length, so the answer may end before the patch does."""
    response = openai_client.responses.create(
        model="demo",
        input="Count from 1 to 20.",
        tools=[tool("lark", PATCH, "apply_patch")],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=120,
    )
    (call,) = [item for item in response.output if item.type == "custom_tool_call"]
    assert re.match(r"\*\*\* Begin Patch\n\*\*\* (Add|Delete|Update) File: .", call.input)


@pytest.mark.parametrize(
    ("choice", "syntax", "definition", "message"),
    [
        *(
            (choice, *refused)
            for choice in ("auto", "required")
            for refused in (
                ("lark", 'start: "a" missing', "does not support this grammar"),
                ("lark", 'start: %json {"type": "object"}', "not support line 1 of this grammar"),
                ("regex", "(?=a)b", "does not support this grammar"),
                ("regex", "[", "this grammar"),
            )
        ),
        # Seconds, until a limit ends the process that tries it.
        ("auto", "lark", "start: A\nA: /((((a{100}){100}){100}){100})/", "too complex"),
    ],
)
def test_a_grammar_that_cannot_be_held_is_named(
    openai_client: OpenAI, choice: Any, syntax: str, definition: str, message: str
) -> None:
    other: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}}
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.responses.create(
            model="demo",
            input=QUESTION,
            tools=[other, tool(syntax, definition)],
            tool_choice=choice,
        )
    assert refused.value.param == "tools[1].format.definition"
    assert refused.value.code == "unsupported_value"
    assert message in str(refused.value)
