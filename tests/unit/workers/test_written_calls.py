"""Random calls in the text of every family, read back: any names, and values that are none."""

from __future__ import annotations

import ast
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tool_call_text import cut_at, read_calls, same_json
from workers.engine.tool_formats import FORMATS
from workers.server.tool_calls import FORCED_CALLS

NAMES = ("add", "get weather", "mcp:files/read", "a.b-c:7 d", "später", "to")
TYPES = {"text": "string", "count": "integer", "list": "array", "map": "object", "any": None}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} if kind else {} for key, kind in TYPES.items()},
            },
        },
    }
    for name in NAMES
]


class Writer(NamedTuple):
    """How a family writes calls: texts around all, one call, and one argument between tags."""

    begin: str
    call: str
    end: str
    argument: str = ""
    separator: str = ""


RECORD = '{"name": "%n", "arguments": %a}'
WRITERS = {
    "json_tools": Writer("<tool_call>\n", RECORD, "\n</tool_call>", "", ", "),
    "qwen3_coder": Writer(
        "<tool_call>\n",
        "<function=%n>\n%a</function>",
        "\n</tool_call>",
        "<parameter=%k>\n%v\n</parameter>\n",
        "\n</tool_call>\n<tool_call>\n",
    ),
    "glm47": Writer(
        "<tool_call>",
        "%n\n%a",
        "</tool_call>",
        "<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n",
        "</tool_call><tool_call>",
    ),
    "longcat": Writer(
        "<longcat_tool_call>",
        "%n\n%a",
        "</longcat_tool_call>",
        "<longcat_arg_key>%k</longcat_arg_key><longcat_arg_value>%v</longcat_arg_value>\n",
        "</longcat_tool_call><longcat_tool_call>",
    ),
    "minimax_m2": Writer(
        "<minimax:tool_call>\n",
        '<invoke name="%n">\n%a</invoke>\n',
        "</minimax:tool_call>",
        '<parameter name="%k">%v</parameter>\n',
    ),
    "atem": Writer(
        "<atem:function_calls>\n",
        '<atem:invoke name="%n">\n%a</atem:invoke>\n',
        "</atem:function_calls>",
        '<atem:parameter name="%k">%v</atem:parameter>\n',
    ),
    "minicpm5": Writer(
        "", '<function name="%n">%a</function>', "", '<param name="%k"><![CDATA[%v]]></param>'
    ),
    "cohere2_moe": Writer(
        "<|START_ACTION|>[\n",
        '{"tool_call_id": "0", "tool_name": "%n", "parameters": %a}',
        "\n]<|END_ACTION|>",
        "",
        ",\n",
    ),
    "gemma4": Writer("<|tool_call>", "call:%n%a", "<tool_call|>", "", "<tool_call|><|tool_call>"),
    "kimi_k2": Writer(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.%n:0<|tool_call_argument_begin|>%a<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "mistral": Writer("", "[TOOL_CALLS]%n[ARGS]%a", ""),
    "harmony": Writer(
        "", "<|channel|>commentary to=functions.%n <|constrain|>json<|message|>%a<|call|>", ""
    ),
    "functionary_v3.1": Writer("", "<function=%n>%a</function>", ""),
    "functionary_v3.2": Writer("", "%n\n%a", "", "", ">>>"),
    "llama3": Writer("", '{"name": "%n", "parameters": %a}', "", "", "; "),
    "llama4": Writer("<|python_start|>", '{"name": "%n", "parameters": %a}', "<|python_end|>"),
    "deepseek_v3": Writer(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%n\n```json\n%a\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3.2": Writer(
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="%n">\n%a</｜DSML｜invoke>\n',
        "</｜DSML｜function_calls>",
        '<｜DSML｜parameter name="%k" string="%s">%v</｜DSML｜parameter>\n',
    ),
    "deepseek_v4": Writer(
        "<｜DSML｜tool_calls>\n",
        '<｜DSML｜invoke name="%n">\n%a</｜DSML｜invoke>\n',
        "</｜DSML｜tool_calls>",
        '<｜DSML｜parameter name="%k" string="%s">%v</｜DSML｜parameter>\n',
    ),
    "granite": Writer("<|tool_call|>[", RECORD, "]", "", ", "),
    "phi4": Writer("<|tool_call|>[", RECORD, "]<|/tool_call|>", "", ", "),
    "nemotron": Writer("<TOOLCALL>[", RECORD, "]</TOOLCALL>", "", ", "),
    "apriel": Writer("<tool_calls>[", RECORD, "]</tool_calls>", "", ", "),
    "seed_oss": Writer(
        "<seed:tool_call>\n",
        "<function=%n>\n%a</function>\n",
        "</seed:tool_call>",
        "<parameter=%k>%v</parameter>\n",
        "</seed:tool_call>\n<seed:tool_call>\n",
    ),
    "gigachat3.1": Writer("", "<|function_call|>" + RECORD, ""),
    "apertus": Writer("<|tools_prefix|>[", '{"%n": %a}', "]<|tools_suffix|>", "", ", "),
    "solar": Writer(
        "<|tool_calls|>",
        "<|tool_call:begin|>ab1<|tool_call:name|>%n<|tool_call:args|>%a<|tool_call:end|>",
        "<|calls|>",
    ),
    "hunyuan3": Writer(
        "<tool_calls:opensource>\n",
        "<tool_call:opensource>%n<tool_sep:opensource>\n%a</tool_call:opensource>\n",
        "</tool_calls:opensource>",
        "<arg_key:opensource>%k</arg_key:opensource>\n"
        "<arg_value:opensource>%v</arg_value:opensource>\n",
    ),
    "kimi_k3": Writer(
        "<|open|>tools<|sep|>",
        '<|open|>call tool="%n" index="1"<|sep|>%a<|close|>call<|sep|>',
        "<|close|>tools<|sep|>",
        '<|open|>argument key="%k" type="%s"<|sep|>%v<|close|>argument<|sep|>',
    ),
    "pythonic": Writer("<|tool_call_start|>[", "%n(%a)", "]<|tool_call_end|>", "", ", "),
    "forced": Writer("[", RECORD, "]", "", ", "),
}
KNOWN = {**FORMATS, "forced": FORCED_CALLS}
BROKEN = ("[1, 2", "{'a': [1}", '{"a": "b', "[a, b]", "1] [2", '"', "}]", "{", "(1", "x", "[1 2]")

PIECES = st.sampled_from(["</", "<", "{", '"', "'", "\\", "\n", ": ", "call:add{", "é", "a b", "]"])
TEXT = st.lists(PIECES | st.text("abc ,.", max_size=6), max_size=5).map("".join)
# Without white space at the ends, because some templates write it around a value.
CLEAN = TEXT.map(str.strip)
JSON: st.SearchStrategy[Any] = st.recursive(
    TEXT | st.integers(-99, 10**15) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from([*TYPES]), JSON, max_size=3)),
    min_size=1,
    max_size=3,
)
VALUES = st.dictionaries(
    st.sampled_from([*TYPES]),
    CLEAN | st.sampled_from(BROKEN) | JSON.map(json.dumps) | JSON.map(repr),
    max_size=3,
)
PLACES = st.lists(st.integers(0, 600), max_size=12)


def value_of(text: str, kind: str | None) -> Any:
    """Return the value that a text between tags has for a type; the text if it is none of it."""
    if kind == "string":
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = json.loads(json.dumps(read(text.strip()), allow_nan=False))
        except (ValueError, SyntaxError, TypeError, MemoryError):
            continue
        types = {"integer": int, "array": list, "object": dict}
        if kind is None or type(value) is types[kind]:
            return value
    return text


def gemma(value: Any) -> str:
    """Return a value in Gemma's notation."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{gemma(key)}:{gemma(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def literal_of(family: str, arguments: dict[str, Any]) -> str:
    if family == "gemma4":
        return gemma(arguments)
    if family == "pythonic":
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return json.dumps(arguments, ensure_ascii=False)


def check(family: str, text: str, places: list[int], expected: list[tuple[str, Any]]) -> None:
    for pieces in ([text], cut_at(text, places), list(text)):
        read = read_calls(KNOWN[family], pieces, TOOLS)
        assert read.content == "", (text, pieces)
        assert [name for name, _ in read.calls] == [name for name, _ in expected], (text, pieces)
        for (_, arguments), (_, wanted) in zip(read.calls, expected, strict=True):
            assert same_json(json.loads(arguments), wanted), (text, pieces, arguments)


def test_every_format_has_a_writer() -> None:
    assert WRITERS.keys() == KNOWN.keys()


@pytest.mark.parametrize(
    "family", [family for family, writer in WRITERS.items() if not writer.argument]
)
def test_f66_literal_arguments_are_read_back_at_any_cut(family: str) -> None:
    writer = WRITERS[family]

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(CALLS, PLACES)
    def read_back(calls: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
        written = [
            writer.call.replace("%n", name).replace("%a", literal_of(family, arguments))
            for name, arguments in calls
        ]
        check(family, f"{writer.begin}{writer.separator.join(written)}{writer.end}", places, calls)

    read_back()


@pytest.mark.parametrize(
    "family", [family for family, writer in WRITERS.items() if writer.argument]
)
def test_f66_texts_between_tags_are_read_back_at_any_cut(family: str) -> None:
    """A value of its type is that; any other text is a text, and ends at its own tag."""
    writer = WRITERS[family]

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.tuples(st.sampled_from(NAMES), VALUES), min_size=1, max_size=3), PLACES)
    def read_back(calls: list[tuple[str, dict[str, str]]], places: list[int]) -> None:
        written = []
        for name, values in calls:
            arguments = [
                writer.argument.replace("%s", ("true" if key == "text" else "false"))
                .replace("%k", key)
                .replace("%v", value)
                for key, value in values.items()
            ]
            written.append(writer.call.replace("%n", name).replace("%a", "".join(arguments)))
        expected = [
            (name, {key: value_of(value, TYPES[key]) for key, value in values.items()})
            for name, values in calls
        ]
        check(
            family, f"{writer.begin}{writer.separator.join(written)}{writer.end}", places, expected
        )

    read_back()


FUNCTION = "<function=get weather>\n<parameter=text>\nBern\n</parameter>\n</function>"
STRAY_FAMILIES = {
    "qwen3_coder": FUNCTION,
    "json_tools": FUNCTION,
    "glm47": FUNCTION,
    "seed_oss": FUNCTION.replace("\nBern\n", "Bern"),
    "minimax_m2": '<invoke name="get weather">\n<parameter name="text">Bern</parameter>\n</invoke>',
    "kimi_k2": "<|tool_call_begin|>functions.get weather:0<|tool_call_argument_begin|>"
    '{"text": "Bern"}<|tool_call_end|>',
    "mistral": 'get weather[ARGS]{"text": "Bern"}',
    "gemma4": 'call:get weather{text:<|"|>Bern<|"|>}',
}
CALLED = [("get weather", {"text": "Bern"})]
FENCES = ("```", "~~~", "````xml", "  ```")


@pytest.mark.parametrize("family", STRAY_FAMILIES)
def test_f66_a_call_without_its_wrapper_counts_only_where_a_line_begins(family: str) -> None:
    """Outside of code fences, and if it names a tool of the request; else it is content."""
    call = STRAY_FAMILIES[family]
    end = FORMATS[family].end

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(PLACES, st.sampled_from(FENCES), st.sampled_from(["", "Let me see.\n\n", "Hm:\n  "]))
    def read_back(places: list[int], fence: str, before: str) -> None:
        block = f"{fence}\n{call}\n{fence.strip()[:4].rstrip('x')}\n"
        unknown = before + call.replace("get weather", "get whether")
        cases: tuple[tuple[str, list[tuple[str, Any]], str], ...] = (
            (before + call, CALLED, before),
            (f"{before}{call}\n{end}{end}\n{call}", CALLED * 2, before),
            (f"{block}{call}", CALLED, block),
            (block, [], block),
            (f"So {call}", [], f"So {call}"),
            (unknown, [], unknown),
        )
        for text, expected, content in cases:
            for pieces in ([text], cut_at(text, places), list(text)):
                read = read_calls(FORMATS[family], pieces, TOOLS)
                calls = [(name, json.loads(arguments)) for name, arguments in read.calls]
                assert calls == expected, (text, pieces)
                assert read.content.rstrip() == content.rstrip(), (text, pieces)

    read_back()


Q = '<|"|>'


@pytest.mark.parametrize(
    "text",
    [
        f"<|tool_call>call: get weather{{text:{Q}Bern{Q}}}<tool_call|>",
        f"<|tool_call>:get weather{{text:{Q}Bern{Q}}}<tool_call|>",
        f"<|tool_call>get weather {{text:{Q}Bern{Q}}}<tool_call|><tool_call|>",
        f"<|tool_call>call:default_api:get weather{{text:{Q}Bern{Q}}}<tool_call|>",
        f"<|tool_call>call:get weather(text: {Q}Bern{Q})<tool_call|>",
        '<|tool_call>call:get weather{"text": "Bern"}<tool_call|>',
        f"<|tool_call>call:get weather{{text:{Q}Bern{Q}<tool_call|>",
        f"<tool_call:get weather{{text:{Q}Bern{Q}}}><tool_call|>",
        f"<tool_call>call:get weather{{text:{Q}Bern{Q}}}</tool_call>",
        f"declaration:default_api:get weather{{text:{Q}Bern{Q}}}",
    ],
)
def test_f66_the_ways_in_which_gemma_writes_a_call(text: str) -> None:
    check("gemma4", text, [5, 17, 31], CALLED)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"list": [1, 2', {"list": [1, 2]}),
        ('{"list": [1, {"a"', {"list": [1, {"a": None}]}),
        ('{"text": "a</tool_call>", "count":', {"text": "a</tool_call>", "count": None}),
        ('{"count": 1, ', {"count": 1}),
        ('{"count": 12', {"count": 12}),
        ('{"count": }}', {"count": None}),
        ("", {}),
        ("}", {}),
    ],
)
def test_f66_a_literal_ends_at_the_tag_around_it(arguments: str, expected: Any) -> None:
    """The next call is read; a tag within a string ends nothing."""
    text = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {written}\n</tool_call>\n'
        for name, written in (("add", arguments), ("to", '{"count": 7}}'))
    )
    for pieces in ([text], list(text)):
        read = read_calls(FORMATS["json_tools"], pieces, TOOLS)
        calls = [(name, json.loads(one)) for name, one in read.calls]
        assert calls == [("add", expected), ("to", {"count": 7})]
        assert not read.content.strip()


def test_f66_the_next_argument_and_call_follow_broken_json() -> None:
    call = (
        "<tool_call>\n<function=add>\n<parameter=list>\n[{'old': 'a}\n</parameter>\n"
        "<parameter=text>\nhi\n</parameter>\n</function>\n</tool_call>\n"
    )
    check("qwen3_coder", call * 2, [], [("add", {"list": "[{'old': 'a}", "text": "hi"})] * 2)


@pytest.mark.parametrize("letter", ["<", "x"])
def test_a_letter_behind_a_call_is_content(letter: str) -> None:
    read = read_calls(FORMATS["qwen3_coder"], ["<tool_call><function=to></function>", letter])
    assert (read.content, read.calls) == (letter, [("to", "{}")])
