"""Calls in the texts of every family, as models write them, whole and letter by letter."""

import json
from typing import Any

import pytest

from paceline.request.call_rules import CallRules
from tests.support.call_writers import WRITERS
from tests.support.tool_call_text import read_calls, tool_of
from workers.engine.text.tool_formats import FORMATS, ToolFormat, detect_tool_format
from workers.server.tool_calls import FORCED_CALLS

PROSE = 'Tides rise and fall twice a day, said "she", and <b>nobody</b> knows {why} it\'s so.'
ARGUMENTS = {"text": PROSE, "count": 3}
TOOLS = [tool_of("write", ARGUMENTS), tool_of("stop", {})]
EVERY = {**FORMATS, "forced": FORCED_CALLS}
STOP: list[tuple[str, Any]] = [("stop", {})]
STOPS = [*STOP, ("stop", {"a": "b"})]
A: list[tuple[str, Any]] = [("a", {})]
B: list[tuple[str, Any]] = [("b", {})]
CALLS = [("write", ARGUMENTS), ("stop", {})]
TEXTS = {family: writer.answer(CALLS) for family, writer in WRITERS.items()}


def decoded(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("family", EVERY)
def test_calls_are_read_whole_and_letter_by_letter(family: str) -> None:
    known, text = EVERY[family], TEXTS[family]
    whole = read_calls(known, [text], TOOLS)
    assert (decoded(whole.calls), whole.content) == (CALLS, "")
    assert read_calls(known, text, TOOLS)[:2] == whole[:2]
    if not known.opened:
        after = read_calls(known, f"Let me see.\n\n{text}", TOOLS)
        assert (after.content, after.calls) == ("Let me see.", whole.calls)
        assert read_calls(known, ["Nothing to do."], TOOLS).content == "Nothing to do."
    rules = CallRules(frozenset(name for name, _ in CALLS), limit=1)
    assert read_calls(known, text, TOOLS, rules=rules).calls == whole.calls[:1]


@pytest.mark.parametrize("family", EVERY)
def test_arguments_arrive_while_they_are_written(family: str) -> None:
    """Each letter of a long text adds to the arguments; a client waits for none of them."""
    known, text = EVERY[family], TEXTS[family]
    middle = text.index("nobody")
    read = read_calls(known, [text[:middle]], TOOLS, cut=None)
    ((name, arguments),) = read.calls
    assert name == "write"
    assert json.loads(arguments + '"}') == {"text": PROSE[: PROSE.index("nobody")]}
    assert len(read_calls(known, text, TOOLS).parts) > len(PROSE) * 0.9


def test_a_text_that_may_be_null_arrives_while_it_is_written() -> None:
    """Only what could begin the word is held back."""
    value = "nullify nothing"
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>"
    read = read_calls(FORMATS["qwen3_coder"], text, tools)
    assert read.calls == [("f", f'{{"a": "{value}"}}')]
    assert len(read.parts) > len(value) // 2


@pytest.mark.parametrize("family", EVERY)
def test_a_call_cut_anywhere_leaves_no_markup_in_the_content(family: str) -> None:
    known, text = EVERY[family], TEXTS[family]
    before = "" if known.opened else "See."
    for length in range(1, len(text)):
        read = read_calls(known, [before + text[:length]], TOOLS, cut=True)
        # The first letter of a marker is a text as any other.
        assert read.content == before + (text[:1] if length == 1 and not known.opened else "")


@pytest.mark.parametrize("family", EVERY)
def test_arguments_that_the_model_ends_early_are_complete(family: str) -> None:
    """A call that lacks its end marks is a call all the same."""
    known, text = EVERY[family], TEXTS[family]
    end = text.index("3") + 1
    calls = read_calls(known, [text[:end]], TOOLS).calls
    assert [name for name, _ in calls] == ["write"]
    if known.calls[0].tags:
        assert json.loads(calls[0][1]) == ARGUMENTS


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        (  # Hermes 2 names the arguments first.
            "json_tools",
            '<tool_call>{"arguments": {"a": [1]}, "name": "add"}</tool_call>',
            "",
            [("add", {"a": [1]})],
        ),
        ("json_tools", '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "", A),
        ("json_tools", '<tool_call>[{"name": "a", "arguments": null}, {"name": "b"}', "", A + B),
        ("json_tools", "See <tool_call>.", None, []),
        ("json_tools", '<tool_call>{"nom": "add"}</tool_call> x', None, []),
        ("json_tools", '<tool_call>{"name": "a', None, []),
        (
            "json_tools",
            '<tool_call>{"name": "a", "arguments": {\'b\': True, "c": "\n", \'d\': (1,)}}',
            "",
            [("a", {"b": True, "c": "\n", "d": [1]})],
        ),
        ("qwen3_coder", '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "", A),
        (
            "qwen3_coder",
            "<tool_call><function=write><parameter=text>\n</parameter>\n</b>\n</parameter>"
            "<parameter=count>\n3</parameter></tool_call>",
            "",
            [("write", {"text": "</parameter>\n</b>", "count": 3})],
        ),
        (
            "naive",
            "<tool_call>\n<function=write>\n<parameter=text>\na\n</parameter>\n</function>\n"
            "</tool_call>",
            "",
            [("write", {"text": "\na\n"})],
        ),
        ("llama3", '<|python_tag|>search.call(query="a\\"b")', "", [("search", {"query": 'a"b'})]),
        ("llama3", '<|python_tag|>{"name": "b", "parameters": {}}', "", B),
        (
            "llama3",
            '{"type": "function", "name": "stop", "parameters": {"a": "{"}}',
            "",
            [("stop", {"a": "{"})],
        ),
        ("llama3", "[stop(), stop(a='b')]", "", STOPS),
        ("llama3", '{"name": "Bo", "parameters": {}}', None, []),
        ("llama3", "print(1)", None, []),
        ("llama4", "<|python_start|>[stop(), stop(a='b')]<|python_end|>", "", STOPS),
        ("llama4", "[stop(), stop(a='b')]", "", STOPS),
        ("llama4", 'I see.<|python_end|>{"name": "b", "parameters": {}}', "I see.", B),
        (
            "llama4",
            '<|python_start|><|python_end|>{"name": "stop", "parameters": {}}',
            "",
            STOPS[:1],
        ),
        ("llama4", "I see.", None, []),
        ("functionary_v3.2", "all\nHi {there}", "Hi {there}", []),
        ("functionary_v3.2", "all\nHi.>>>stop\n{}", "Hi.", [("stop", {})]),
        ("functionary_v3.2", "all\n>>> 1 + 1\n2", ">>> 1 + 1\n2", []),
        (  # V3.1 names no type, and writes no fence.
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("add", {}), ("function", {})],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b"}]', "", A + B),
        ("mistral", "[TOOL_CALLS]b[CALL_ID]abcdefgh1[ARGS]{}", "", B),
        ("granite", '<|tool_call|>[{"name": "a", "arguments": {}}, {"name": "b"}]', "", A + B),
        (
            "pythonic",
            "<|tool_call_start|>[f(a=None, b='\\x41\\U0001f600\\d', c={'x': -1.5e3, 2: ()})]",
            "",
            [("f", {"a": None, "b": "A😀\\d", "c": {"x": -1500, "2": []}})],
        ),
        (
            "gemma4",
            '<|tool_call>call:f{a:{b:[<|"|><|x"{<|"|>,None,1.5]},c:<|"|><|"|>}<tool_call|>',
            "",
            [("f", {"a": {"b": ['<|x"{', None, 1.5]}, "c": ""})],
        ),
        ("harmony", "<|channel|>analysis to=functions.f<|message|>{}", "", [("f", {})]),
    ],
)
def test_variants_that_models_write(family, text, content, calls) -> None:
    """Without a content of its own all the text is content."""
    for pieces in ([text], text):
        read = read_calls(FORMATS[family], pieces, TOOLS)
        assert read.content == (text if content is None else content)
        assert decoded(read.calls) == calls


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<tool_call>{{ tool_call.name }}", "json_tools"),
        ("<tool_call> </tool_call>", "json_tools"),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("{%- if message.tools %}<|tool|>{{ message.tools }}<|/tool|>", "phi4"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseek_v3"),
        ("<tool_call>\n<function=f>\n<parameter=example_parameter_1>value_1</parameter>", "naive"),
        ("{{ '<｜GCML｜tool_calls>' }} or <|function_call|>", "gigachat3.5"),
        ("<tool_calls> <tool_call>{name}<tool_sep> <arg_key> </arg_value>", "hunyuan3_preview"),
        ("<tool_call>{name} <arg_key> </arg_value>", "glm47"),
        ("[TOOL_CALLS] and <|python_tag|>", "mistral"),
        ("Nothing", None),
    ],
)
def test_a_format_is_known_by_its_template(template: str, family: str | None) -> None:
    known = detect_tool_format(template)
    assert known is (FORMATS[family] if family else None)


def test_a_format_of_mlx_vlm_alone_is_read_by_its_parser() -> None:
    """A whole call at a time, in any pieces; what it rejects is content."""
    known = detect_tool_format("]<]minimax[>[<tool_call>")
    assert isinstance(known, ToolFormat)
    assert known.parser == "minimax_m3"
    mark = "]<]minimax[>["
    text = (
        f'{mark}<tool_call>\n{mark}<invoke name="write">{mark}<text>Tides{mark}</text>'
        f"{mark}<count>3{mark}</count>{mark}</invoke>\n{mark}</tool_call>"
    )
    for pieces in ([text], text):
        assert decoded(read_calls(known, pieces, TOOLS).calls) == [
            ("write", {"text": "Tides", "count": 3})
        ]
    broken = f"{mark}<tool_call>x{mark}</tool_call>"
    assert read_calls(known, [broken], TOOLS).content == broken
