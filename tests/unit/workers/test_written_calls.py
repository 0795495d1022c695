"""Random calls in the text of every family, read back: any names, and values that are none."""

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request.call_rules import CallRules
from tests.support.call_writers import WRITERS
from tests.support.tool_call_text import cut_at, read_calls, same_json
from workers.engine.text.tool_formats import FORMATS
from workers.server.tool_calls import FORCED_CALLS

NAMES = ("add", "get weather", "mcp:files/read", "a.b-c:7 d", "später", "to")
TYPES = {"text": "string", "count": "integer", "list": "array", "map": "object", "any": None}
PROPERTIES = {key: {"type": kind} if kind else {} for key, kind in TYPES.items()}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
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
LITERALS = st.dictionaries(st.sampled_from([*TYPES]), JSON, max_size=3)
BETWEEN_TAGS = st.dictionaries(
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


def check(family: str, text: str, places: list[int], expected: list[tuple[str, Any]]) -> None:
    for pieces in ([text], cut_at(text, places), list(text)):
        read = read_calls(KNOWN[family], pieces, TOOLS)
        assert read.content == "", (text, pieces)
        assert [name for name, _ in read.calls] == [name for name, _ in expected], (text, pieces)
        for (_, arguments), (_, wanted) in zip(read.calls, expected, strict=True):
            assert same_json(json.loads(arguments), wanted), (text, pieces, arguments)


def test_every_format_has_a_writer() -> None:
    assert WRITERS.keys() == KNOWN.keys()


@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.proof)])
@pytest.mark.parametrize("family", WRITERS)
def test_f66_calls_are_read_back_at_any_cut(family: str, examples: int) -> None:
    """Between tags a value of its type is that; any other text is a text, and ends at its tag."""
    writer = WRITERS[family]
    given_arguments = BETWEEN_TAGS if writer.argument else LITERALS
    given_calls = st.tuples(st.sampled_from(NAMES), given_arguments)

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.lists(given_calls, min_size=1, max_size=3), PLACES)
    def read_back(calls: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
        expected = calls
        if writer.argument:
            expected = [
                (name, {key: value_of(value, TYPES[key]) for key, value in values.items()})
                for name, values in calls
            ]
        check(family, writer.answer(calls), places, expected)

    read_back()


@pytest.mark.parametrize("family", WRITERS)
def test_calls_that_the_request_does_not_admit_leave_nothing_at_any_cut(family: str) -> None:
    calls = [(name, {"text": name}) for name in ("to", "add", "get weather", "add", "to", "add")]
    text = WRITERS[family].answer(calls)
    rules = CallRules(frozenset(("add", "get weather")), limit=3)
    for pieces in ([text], text):
        read = read_calls(KNOWN[family], pieces, TOOLS, rules=rules)
        assert read.content == ""
        assert [name for name, _ in read.calls] == ["add", "get weather", "add"]
        assert [json.loads(arguments)["text"] for _, arguments in read.calls] == [
            name for name, _ in read.calls
        ]


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


@pytest.mark.parametrize("before", ["", "Let me see.\n\n", "Hm:\n  "])
@pytest.mark.parametrize("family", STRAY_FAMILIES)
def test_f66_a_call_without_its_wrapper_counts_where_a_line_begins(family, before) -> None:
    """Outside of code fences, and if it names a tool of the request; else it is content."""
    call, end = STRAY_FAMILIES[family], FORMATS[family].end
    unknown = before + call.replace("get weather", "get whether")
    cases: list[tuple[str, list[tuple[str, Any]], str]] = [
        (before + call, CALLED, before),
        (f"{before}{call}\n{end}{end}\n{call}", CALLED * 2, before),
        (f"So {call}", [], f"So {call}"),
        (unknown, [], unknown),
    ]
    for fence in FENCES:
        block = f"{fence}\n{call}\n{fence.strip()[:4].rstrip('x')}\n"
        cases += [(f"{block}{call}", CALLED, block), (block, [], block)]
    for text, expected, content in cases:
        for pieces in ([text], cut_at(text, range(0, len(text), 7)), list(text)):
            read = read_calls(FORMATS[family], pieces, TOOLS)
            calls = [(name, json.loads(arguments)) for name, arguments in read.calls]
            assert calls == expected, (text, pieces)
            assert read.content.rstrip() == content.rstrip(), (text, pieces)


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


FORCED = st.tuples(st.text('ab"é\\', min_size=1, max_size=4), st.dictionaries(TEXT, JSON))


@settings(max_examples=30)
@given(st.lists(FORCED, min_size=1, max_size=3), st.integers(1, 7))
def test_forced_calls_are_the_same_however_their_text_arrives(calls: list[Any], size: int) -> None:
    """Cut anywhere, also within escapes, the names and the exact text of the arguments arrive."""
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    expected = [(name, json.dumps(arguments)) for name, arguments in calls]
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for read in (read_calls(FORCED_CALLS, pieces), read_calls(FORCED_CALLS, [text])):
        assert (read.calls, read.content) == (expected, "")


def test_a_forced_call_cut_before_its_name_is_no_text() -> None:
    assert read_calls(FORCED_CALLS, ['[{"name": "ad'], cut=True)[:2] == ("", [])
    pieces = ['[{"name": "f", "argu', 'ments": {"a']
    assert read_calls(FORCED_CALLS, pieces, cut=True).calls == [("f", '{"a')]
