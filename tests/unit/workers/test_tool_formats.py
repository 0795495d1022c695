"""Calls in the texts of every family, as models write them, whole and letter by letter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.tool_call_text import read_calls, tool_of
from workers.engine.tool_formats import FORMATS, ToolFormat, detect_tool_format
from workers.server.tool_calls import FORCED_CALLS

PROSE = 'Tides rise and fall twice a day, said "she", and <b>nobody</b> knows {why} it\'s so.'
ARGUMENTS = {"text": PROSE, "count": 3}
TOOLS = [tool_of("write", ARGUMENTS), tool_of("stop", {})]
JSON = json.dumps(ARGUMENTS)
EVERY = {**FORMATS, "forced": FORCED_CALLS}
# Each holds the same two calls, except those of which a format has one.
TEXTS = {
    "json_tools": '<tool_call>\n{"name": "write", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=text>\n%p\n</parameter>\n"
    "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "glm47": "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>%p</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    "<tool_call>stop\n</tool_call>",
    "longcat": "<longcat_tool_call>write\n<longcat_arg_key>text</longcat_arg_key>"
    "<longcat_arg_value>%p</longcat_arg_value><longcat_arg_key>count</longcat_arg_key>"
    "<longcat_arg_value>3</longcat_arg_value></longcat_tool_call>"
    "<longcat_tool_call>stop\n</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">%p'
    '</parameter>\n<parameter name="count">3</parameter>\n</invoke>\n<invoke name="stop">\n'
    "</invoke>\n</minimax:tool_call>",
    "atem": '<atem:function_calls>\n<atem:invoke name="write">\n<atem:parameter name="text">%p'
    '</atem:parameter>\n<atem:parameter name="count">3</atem:parameter>\n</atem:invoke>\n'
    '<atem:invoke name="stop">\n</atem:invoke>\n</atem:function_calls>',
    "minicpm5": '<function name="write"><param name="text"><![CDATA[%p]]></param>'
    '<param name="count">3</param></function>\n<function name="stop"></function>',
    "pythonic": "<|tool_call_start|>[write(text=%r, count=3), stop()]<|tool_call_end|>",
    "cohere2_moe": '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "write", '
    '"parameters": %s},\n  {"tool_call_id": "1", "tool_name": "stop", "parameters": {}}\n]'
    "<|END_ACTION|>",
    "gemma4": '<|tool_call>call:write{text:<|"|>%p<|"|>,count:3}<tool_call|>'
    "<|tool_call>call:stop{}<tool_call|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"
    "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_call_begin|>functions.stop:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": "[TOOL_CALLS]write[CALL_ID]abcdefgh1[ARGS]%s[TOOL_CALLS]stop[ARGS]{}",
    "harmony": "<|channel|>commentary to=functions.write <|constrain|>json<|message|>%s<|call|>",
    "functionary_v3.1": "<function=write>%s</function><function=stop>{}</function>",
    "functionary_v3.2": "write\n%s>>>stop\n{}",
    "llama3": '{"name": "write", "parameters": %s}; {"name": "stop", "parameters": {}}',
    "llama4": '<|python_start|><|python_end|>{"name": "write", "parameters": %s}'
    '{"name": "stop", "parameters": {}}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n"
    "```json\n%s\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n'
    '<｜DSML｜parameter name="text" string="true">%p</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n'
    '<｜DSML｜parameter name="text" string="true">%p</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="stop">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "granite": '<|tool_call|>[{"name": "write", "arguments": %s}, {"name": "stop"}]',
    "phi4": '<|tool_call|>[{"name": "write", "arguments": %s}, {"name": "stop", "arguments": {}}]'
    "<|/tool_call|>",
    "nemotron": '<TOOLCALL>[{"name": "write", "arguments": %s}, {"name": "stop", "arguments": '
    "{}}]</TOOLCALL>",
    "apriel": '<tool_calls>[{"name": "write", "arguments": %s, "id": "1"}, '
    '{"name": "stop", "arguments": {}, "id": "2"}]</tool_calls>',
    "seed_oss": "<seed:tool_call>\n<function=write>\n<parameter=text>%p</parameter>\n"
    "<parameter=count>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>",
    "gigachat3.1": '<|function_call|>{"name": "write", "arguments": %s}',
    "apertus": '<|tools_prefix|>[{"write": %s}, {"stop": {}}]<|tools_suffix|>',
    "solar": "<|tool_calls|><|tool_call:begin|>ab1<|tool_call:name|>write<|tool_call:args|>%s"
    "<|tool_call:end|><|tool_call:begin|>ab2<|tool_call:name|>stop<|tool_call:args|>{}"
    "<|tool_call:end|><|calls|>",
    "hunyuan3": "<tool_calls:opensource>\n<tool_call:opensource>write<tool_sep:opensource>\n"
    "<arg_key:opensource>text</arg_key:opensource>\n<arg_value:opensource>%p"
    "</arg_value:opensource>\n<arg_key:opensource>count</arg_key:opensource>\n"
    "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
    "<tool_call:opensource>stop<tool_sep:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|><|open|>argument '
    'key="text" type="string"<|sep|>%p<|close|>argument<|sep|><|open|>argument key="count" '
    'type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="stop" '
    'index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "forced": '[{"name": "write", "arguments": %s}, {"name": "stop", "arguments": {}}]',
}
STOPS = [("stop", {}), ("stop", {"a": "b"})]
ONE_CALL = {"harmony", "gigachat3.1"}


def text_of(family: str) -> str:
    text = TEXTS[family]
    return text.replace("%s", JSON).replace("%p", PROSE).replace("%r", repr(PROSE))


def decoded(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_format_has_its_text() -> None:
    assert TEXTS.keys() == EVERY.keys()


@pytest.mark.parametrize("family", EVERY)
def test_calls_are_read_whole_and_letter_by_letter(family: str) -> None:
    known, text = EVERY[family], text_of(family)
    whole = read_calls(known, [text], TOOLS)
    assert decoded(whole.calls) == [("write", ARGUMENTS), ("stop", {})][: len(whole.calls)]
    assert len(whole.calls) == (1 if family in ONE_CALL else 2)
    assert whole.content == ""
    assert read_calls(known, text, TOOLS)[:2] == whole[:2]
    if not known.opened:
        after = read_calls(known, f"Let me see.\n\n{text}", TOOLS)
        assert (after.content, after.calls) == ("Let me see.", whole.calls)
        assert read_calls(known, ["Nothing to do."], TOOLS).content == "Nothing to do."
    assert read_calls(known, text, TOOLS, limit=1).calls == whole.calls[:1]


@pytest.mark.parametrize("family", EVERY)
def test_arguments_arrive_while_they_are_written(family: str) -> None:
    """Each letter of a long text adds to the arguments; a client waits for none of them."""
    known, text = EVERY[family], text_of(family)
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
    known, text = EVERY[family], text_of(family)
    before = "" if known.opened else "See."
    for length in range(1, len(text)):
        read = read_calls(known, [before + text[:length]], TOOLS, cut=True)
        # The first letter of a marker is a text as any other.
        assert read.content == before + (text[:1] if length == 1 and not known.opened else "")


@pytest.mark.parametrize("family", EVERY)
def test_arguments_that_the_model_ends_early_are_complete(family: str) -> None:
    """A call that lacks its end marks is a call all the same."""
    known, text = EVERY[family], text_of(family)
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
        (
            "json_tools",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("add", {"a": 1})],
        ),
        (
            "json_tools",
            '<tool_call>[{"name": "add", "arguments": null}, {"name": "b"}',
            "",
            [("add", {}), ("b", {})],
        ),
        ("json_tools", "See <tool_call>.", "See <tool_call>.", []),
        (
            "json_tools",
            '<tool_call>{"nom": "add"}</tool_call> x',
            '<tool_call>{"nom": "add"}</tool_call> x',
            [],
        ),
        ("json_tools", '<tool_call>{"name": "a', '<tool_call>{"name": "a', []),
        (
            "json_tools",
            '<tool_call>{"name": "a", "arguments": {\'b\': True, "c": "\n", \'d\': (1,)}}',
            "",
            [("a", {"b": True, "c": "\n", "d": [1]})],
        ),
        ("qwen3_coder", '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "", [("a", {})]),
        (
            "qwen3_coder",
            "<tool_call><function=write><parameter=text>\n</parameter>\n</b>\n</parameter>"
            "<parameter=count>\n3</parameter></tool_call>",
            "",
            [("write", {"text": "</parameter>\n</b>", "count": 3})],
        ),
        ("llama3", '<|python_tag|>search.call(query="a\\"b")', "", [("search", {"query": 'a"b'})]),
        ("llama3", '<|python_tag|>{"name": "b", "parameters": {}}', "", [("b", {})]),
        (
            "llama3",
            '{"type": "function", "name": "stop", "parameters": {"a": "{"}}',
            "",
            [("stop", {"a": "{"})],
        ),
        ("llama3", "[stop(), stop(a='b')]", "", STOPS),
        ("llama3", '{"name": "Bo", "parameters": {}}', '{"name": "Bo", "parameters": {}}', []),
        ("llama3", "print(1)", "print(1)", []),
        ("llama4", "<|python_start|>[stop(), stop(a='b')]<|python_end|>", "", STOPS),
        ("llama4", "[stop(), stop(a='b')]", "", STOPS),
        ("llama4", 'I see.<|python_end|>{"name": "b", "parameters": {}}', "I see.", [("b", {})]),
        ("llama4", "I see.", "I see.", []),
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
        ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b"}]', "", None),
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
def test_variants_that_models_write(
    family: str, text: str, content: str, calls: list[tuple[str, Any]] | None
) -> None:
    for pieces in ([text], text):
        read = read_calls(FORMATS[family], pieces, TOOLS)
        assert read.content == content
        assert decoded(read.calls) == ([("a", {}), ("b", {})] if calls is None else calls)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<tool_call>{{ tool_call.name }}", "json_tools"),
        ("<tool_call> </tool_call>", "json_tools"),
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("{%- if message.tools %}<|tool|>{{ message.tools }}<|/tool|>", "phi4"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseek_v3"),
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
