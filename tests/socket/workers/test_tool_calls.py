"""Tool calls in generated text become `tool_calls`, independent of chunk boundaries."""

import json
from typing import Any

import openai
import pytest

from tests.support.call_writers import WRITERS
from tests.support.running_gateway import said
from tests.support.scripted_engine import (
    ScriptedEngine,
    StubPrompts,
    make_worker,
    serve_worker,
    text_events,
    worker_client,
)
from tests.support.tool_call_text import read_calls
from workers.engine.text.tool_formats import FORMATS
from workers.server.tool_calls import ToolCallSplitter


def call_text(value: object) -> str:
    return (
        f"<tool_call>\n<function=add>\n<parameter=a>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def tools_of(schema: object) -> Any:
    """Return a tool with this schema of its argument."""
    definitions = {
        "Count": {"type": "integer"},
        "Name": {"type": "string"},
        "Place/~": {"$ref": "#/$defs/Name"},
        "Loop": {"$ref": "#/$defs/Loop"},
        **{f"Long{n}": {"$ref": f"#/$defs/Long{n + 1}"} for n in range(2000)},
    }
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    return [{"type": "function", "function": {"name": "add", "parameters": parameters}}]


TOOLS: Any = tools_of({"type": "integer"})


def split(
    chunks: list[str], tools: Any = TOOLS, family: str = "qwen3_coder"
) -> list[str | tuple[str, Any]]:
    """Feed chunks to a splitter; return the content, and then the calls."""
    read = read_calls(FORMATS[family], chunks, tools)
    calls = [(name, json.loads(arguments)) for name, arguments in read.calls]
    return [*([read.content] if read.content else []), *calls]


def test_the_id_of_a_call_has_the_form_that_mistral_needs() -> None:
    splitter = ToolCallSplitter(FORMATS["qwen3_coder"], TOOLS)
    calls = [call for call in splitter.feed(call_text(1) + call_text(2)) if isinstance(call, dict)]
    ids = [call["id"] for call in calls]
    assert len({*ids}) == 2
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)


ADD, STOP = ({"type": "function", "function": {"name": name}} for name in ("add", "stop"))


def only(*tools: Any) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, ["{}", "{}"]),
        ({"tool_choice": only(ADD)}, ["{}", "{}"]),
        ({"tool_choice": only(STOP)}, []),
        ({"tool_choice": only()}, []),
        ({"tool_choice": "none"}, []),
        ({"tools": [STOP]}, []),
        ({"max_tool_calls": 1}, ["{}"]),
        ({"parallel_tool_calls": False}, ["{}"]),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_coder", "json_tools"])
async def test_a_call_that_the_request_does_not_admit_is_no_part_of_the_answer(
    family: str, fields: Any, arguments: list[str], caplog
) -> None:
    """The model first calls a function that nobody declared; whole and streamed, with `n`."""
    caplog.set_level("INFO")
    written = WRITERS[family].answer([(name, {}) for name in ("fly", "add", "add")])
    engine = ScriptedEngine(text_events("Look.\n", *written))
    engine.prompts = StubPrompts(tool_format=FORMATS[family])
    body = {"model": "scripted", **said("3?"), "tools": [ADD, STOP], "n": 2, **fields}
    async with worker_client(engine) as client:
        whole = await client.post("/v1/chat/completions", json=body)
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    for choice in whole.json()["choices"]:
        calls = [one["function"] for one in choice["message"].get("tool_calls", ())]
        assert [one["arguments"] for one in calls] == arguments
        assert {one["name"] for one in calls} <= {"add"}
        assert choice["message"]["content"] == "Look."
        assert choice["finish_reason"] == ("tool_calls" if arguments else "stop")
    assert "fly" not in whole.text + streamed.text
    assert streamed.text.count('"name":"add"') == 2 * len(arguments)
    assert ('"finish_reason":"tool_calls"' in streamed.text) == bool(arguments)
    assert "calls.left_out" in caplog.text


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": ["string", "null"]}, "Paris", "Paris"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, '{"b": 1}', '{"b": 1}'),
        ({"type": ["string", "null"], "enum": ["Paris", None]}, "Paris", "Paris"),
        ({"type": ["null", "boolean"]}, "true", True),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"type": ["array", "null"]}, "[1, 2]", [1, 2]),
        ({"type": ["string", "integer"]}, "Paris", "Paris"),
        ({"type": "any"}, "Paris", "Paris"),
        ({"type": "any"}, "[1, 2]", [1, 2]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, "3", "3"),
        ({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}, "Paris", "Paris"),
        ({"$ref": "#/$defs/Name"}, "3", "3"),
        ({"$ref": "#/$defs/Count", "description": "How many."}, "3", 3),
        ({"$ref": "#/$defs/Place~1~0"}, "3", "3"),
        ({"$ref": "#/$defs/Loop"}, "Paris", "Paris"),
        ({"$ref": "#/$defs/Long0"}, "Paris", "Paris"),
        ({"$ref": "#/$defs/Unknown"}, "Paris", "Paris"),
        ({"anyOf": [{"$ref": "#/$defs/Unknown"}, {"type": "null"}]}, '{"b": 1}', {"b": 1}),
        ({"$ref": "#/$defs/Unknown"}, '{"b": 1}', {"b": 1}),
        ({"$ref": "https://elsewhere.test/schema"}, "Paris", "Paris"),
        (True, "Paris", "Paris"),
    ],
)
def test_arguments_are_parsed_by_every_notation_of_their_type(schema, value, expected) -> None:
    """OpenAI's strict tools declare optional arguments by a list of types."""
    assert split([call_text(value)], tools=tools_of(schema)) == [("add", {"a": expected})]


def test_a_nullable_argument_has_its_value() -> None:
    block = (
        '<minimax:tool_call><invoke name="add"><parameter name="a">Paris</parameter>'
        "</invoke></minimax:tool_call>"
    )
    for schema in (
        {"type": ["string", "null"]},
        {"type": ["string", "null"], "enum": ["Paris", None]},
        {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    ):
        parts = split([block], tools=tools_of(schema), family="minimax_m2")
        assert parts == [("add", {"a": "Paris"})]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("number", "inf"),
        ("number", "1e999"),
        ("number", "nan"),
        ("integer", "twelve"),
        ("object", "Paris"),
        pytest.param("object", "-" * 20_000 + "1", id="deep"),
    ],
)
def test_an_argument_that_is_no_value_of_its_type_is_a_text(kind: str, value: str) -> None:
    assert split([call_text(value)], tools=tools_of({"type": kind})) == [("add", {"a": value})]


async def test_the_openai_package_reads_calls_unstreamed_and_streamed() -> None:
    engine = ScriptedEngine(text_events("Adding.\n<tool", *call_text(3)[5:], "\n"))
    fields: Any = {"model": "scripted", **said("3?"), "tools": TOOLS}
    async with (
        serve_worker(make_worker(engine)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        completion = await client.chat.completions.create(**fields)
        async with client.chat.completions.stream(**fields) as stream:
            streamed = await stream.get_final_completion()
    for response in (completion.choices[0], streamed.choices[0]):
        assert response.finish_reason == "tool_calls"
        assert response.message.content == "Adding."
        call: Any = (response.message.tool_calls or [])[0]
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 3}
        assert call.id.isalnum()


async def test_a_response_with_calls_only_has_no_content() -> None:
    engine = ScriptedEngine(text_events(call_text(3)))
    body = {"model": "scripted", **said("x"), "tools": TOOLS}
    async with worker_client(engine) as client:
        with_tools = await client.post("/v1/chat/completions", json=body)
        declined = await client.post("/v1/chat/completions", json={**body, "tool_choice": "none"})
    assert [generation.keep_call_tokens for generation in engine.generations] == [True, True]
    assert with_tools.json()["choices"][0]["message"]["content"] is None
    assert declined.json()["choices"][0]["message"]["content"] == ""


async def test_arguments_of_earlier_calls_reach_the_template_as_a_mapping() -> None:
    engine = ScriptedEngine(text_events("5"))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    messages = [*said("3?")["messages"], called, result]
    body = {"model": "scripted", "messages": messages, "tools": TOOLS}
    async with worker_client(engine) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert "'arguments': {'a': 3}" in engine.generations[0].prompt.text
