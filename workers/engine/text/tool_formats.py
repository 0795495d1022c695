"""Formats of tool calls: how each family of models writes the calls that its template asks for.

A format is a row of a table: the marks that begin and end a list of calls, and surround the name
and the arguments of one. Arguments have two shapes: one literal (JSON, Python's keyword arguments
or Gemma's notation), or a text per argument between tags. `workers.server.tool_calls` reads any
row of the table while its text arrives. mlx-vlm knows many families by their templates; a format
that only its own parser can read is a row that names the parser.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from re import escape
from typing import Any, Final

import regex

from paceline.request.content import TOOL_NAME
from workers.engine.text import grammar_source

_NAME: Final = rf"(?P<name>{TOOL_NAME})"
_SPACE: Final = r"\s*+"
_STRING: Final = r'"(?:[^"\\]|\\.)*+"'
_SCALAR: Final = (
    rf'"(?!(?:tool_)?name"|arguments"|parameters")\w++"\s*+:\s*+(?:{_STRING}|[\w.+-]++)'
)
_QUOTED_NAME: Final = r'"(?:(?:tool_)?name|function)"\s*+:\s*+"(?P<name>(?:[^"\\]|\\.)++)"'
_ARGUMENTS: Final = r'"(?:arguments|parameters)"\s*+:\s*+'
_LIST: Final = r"[\s\[,;]*+"


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments as elements, each with a name and the text of its value."""

    key: str
    """Pattern of the text before a value; its group `key` is the argument's name, and its group
    `string`, if it has one, matches if the value is a text."""
    end: str
    """Text that ends a value."""
    wrap: tuple[str, str] = ("", "")
    """Texts that may stand around a value, and are no part of it."""


@dataclass(frozen=True)
class Call:
    """One way to write a call, by patterns of the texts before and after its arguments."""

    head: str
    """Its group `name` is the function."""
    tail: str = ""
    tags: Tags | None = None
    """None: the arguments are one literal."""
    bare: bool = False
    """Whether the call is without arguments."""

    @cached_property
    def head_pattern(self) -> regex.Pattern[str]:
        """Return the compiled pattern."""
        return regex.compile(self.head)

    @cached_property
    def lead_pattern(self) -> regex.Pattern[str] | None:
        """Return the pattern of the text that may precede the name; None if markup does."""
        lead, found, _ = self.head.partition(_NAME)
        pattern = regex.compile(lead)
        return pattern if found and pattern.fullmatch("") else None

    @cached_property
    def tail_pattern(self) -> regex.Pattern[str]:
        """Return the compiled pattern; its group `name` is the function if the head has none."""
        return regex.compile(self.tail)


_RECORD_END: Final = rf"\s*+(?:,\s*+{_SCALAR}\s*+)*+\}}"
RECORDS: Final = (
    Call(
        rf"{_LIST}\{{\s*+(?:{_SCALAR}\s*+,\s*+)*+{_QUOTED_NAME}\s*+,\s*+"
        rf"(?:{_SCALAR}\s*+,\s*+)*+{_ARGUMENTS}",
        _RECORD_END,
    ),
    Call(rf"{_LIST}\{{\s*+(?:{_SCALAR}\s*+,\s*+)*+{_QUOTED_NAME}{_RECORD_END}", bare=True),
    Call(rf"{_LIST}\{{\s*+{_ARGUMENTS}", rf"\s*+,\s*+{_QUOTED_NAME}{_RECORD_END}"),
)
"""JSON objects with a name and arguments, in either order, single or in a list."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes its calls."""

    begin: str
    """Text that begins calls."""
    end: str = ""
    """Text that ends them; empty if nothing does."""
    calls: tuple[Call, ...] = RECORDS
    """Ways to write one; the first that matches holds."""
    strays: tuple[Call, ...] = ()
    """Ways to write a call that the format does not define, most of them without `begin`."""
    markers: tuple[tuple[str, ...], ...] = ()
    """Texts that identify the format: all of any group stand in the chat template."""
    opened: bool = False
    """Whether an answer may begin with a call of a known function, without `begin`."""
    plain: str = ""
    """Text that begins an answer without a call, and is no part of it."""
    skip: tuple[str, ...] = ()
    """Texts between calls."""
    quote: str = ""
    """Text around strings, if it is a separate token."""
    short_ids: bool = False
    """Whether the template accepts only ids of nine letters and digits."""
    named_ids: bool = False
    """Whether the template writes the id of a call in place of its function."""
    written: str = ""
    """One call, for a template that renders none."""
    parser: str = ""
    """Name of mlx-vlm's parser, for a format that is not described here."""

    @property
    def style(self) -> str:
        """Return the style of the calls in a grammar; empty if a grammar cannot write them."""
        if self.calls == RECORDS and not self.opened and not self.parser:
            return grammar_source.RECORDS
        return grammar_source.FUNCTION_TAGS if self.calls[0] == _FUNCTION_TAGS else ""

    @cached_property
    def spelling(self) -> str:
        """Return all texts and patterns of the format, in which its special tokens occur."""
        parts = [self.begin, self.end, self.quote, *self.skip]
        for call in (*self.calls, *self.strays):
            parts += [call.head, call.tail]
            parts += [call.tags.key, call.tags.end] if call.tags else []
        return "\n".join(parts)

    @cached_property
    def stop_pattern(self) -> regex.Pattern[str]:
        """Return the pattern of markup behind a literal, which none holds outside of strings."""
        marks = [text for text in (self.begin, self.end, *self.skip) if len(text) > 1]
        tails = {call.tail.removeprefix(_SPACE) for call in (*self.calls, *self.strays)}
        elements = sorted(tail for tail in tails if tail.startswith("<"))
        return regex.compile("|".join((*map(escape, marks), *elements)) or "(?!)")

    def has_mark(self, token: str) -> bool:
        """Return whether a special token is part of the format."""
        return token in self.spelling or escape(token) in self.spelling


def _xml(prefix: str = "") -> Call:
    return Call(
        rf'\s*+<{prefix}invoke name="{_NAME}">',
        rf"\s*+</{prefix}invoke>",
        Tags(
            rf'\s*+<{prefix}parameter name="(?P<key>[^"]++)"'
            r'(?: string="(?P<string>true|false)")?+>',
            f"</{prefix}parameter>",
        ),
    )


def _function_tags(wrap: tuple[str, str] = ("", "")) -> Call:
    return Call(
        rf"\s*+<function={_NAME}>",
        r"\s*+</function>",
        Tags(r"\s*+<parameter=(?P<key>[^>\n]++)>", "</parameter>", wrap),
    )


def _key_tags(prefix: str = "", suffix: str = "") -> Tags:
    key, value = f"{prefix}arg_key{suffix}", f"{prefix}arg_value{suffix}"
    return Tags(rf"\s*+<{key}>(?P<key>[^<]++)</{key}>\s*+<{value}>", f"</{value}>")


def _key_call(prefix: str = "") -> Call:
    """Return a call as GLM writes it: a name, and arguments in such pairs."""
    head = rf"\s*+{_NAME}\s*+(?=<{prefix}arg_key>|</{prefix}tool_call>)"
    return Call(head, rf"\s*+(?=</{prefix}tool_call>)", _key_tags(prefix))


_FUNCTION_TAGS: Final = _function_tags(("\n", "\n"))
_SEED_CALL: Final = _function_tags()
_DEEPSEEK_CALLS: Final = (
    Call(rf"\s*+<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\s*+```json\s"),
    Call(rf"\s*+<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>(?=\s*+\{{)"),
)
_KIMI_CALL: Final = Call(
    rf"\s*+<\|tool_call_begin\|>\s*+(?:functions\.)?+{_NAME}(?::\d++)?\s*+"
    r"<\|tool_call_argument_begin\|>",
    r"\s*+<\|tool_call_end\|>",
)
_MISTRAL_CALL: Final = Call(rf"\s*+{_NAME}(?:\[CALL_ID\]\w++)?+\[ARGS\]")
_SOLAR_CALL: Final = Call(
    rf"\s*+<\|tool_call:begin\|>[^<]*+<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>",
    r"\s*+<\|tool_call:end\|>",
)
_GEMMA_STRAY: Final = Call(
    # Its mark may lack bars and brackets; without any mark, the word stands before the name.
    r"\s*+(?:<\|?+tool_call\|?+>?+\s*+(?:(?:call)?+\s*+:)?|(?:call|declaration)\s*+:)"
    rf"\s*+(?:default_api[.:])?+{_NAME}\s*+(?=[{{(])",
    ">",
)
_PYTHON_CALL: Final = Call(rf"[\s\[,]*+{_NAME}(?:\.call)?(?=\()")
_LLAMA4_MARKS: Final = r"(?:<\|python_(?:start|end)\|>)*+"
"""Texts that may precede a call if a tokenizer takes these marks for text."""
_NEAR: Final = {"qwen3_coder": "naive", "glm47": "hunyuan3_preview"}
"""Formats that mlx-vlm detects in a template, and formats with more specific markers."""


def _element(name: str, *calls: Call, **options: Any) -> ToolFormat:
    """Return a format of calls in an element; calls that are no JSON count without it too."""
    strays = tuple(call for call in calls if call not in RECORDS)
    return ToolFormat(f"<{name}>", f"</{name}>", calls or RECORDS, **{"strays": strays, **options})


def _hunyuan(suffix: str) -> ToolFormat:
    """Return Hunyuan 3's format, whose tags have a suffix."""
    call = Call(
        rf"\s*+<tool_call{suffix}>{_NAME}<tool_sep{suffix}>",
        rf"\s*+</tool_call{suffix}>",
        _key_tags(suffix=suffix),
    )
    markers = ("<tool_calls", "<tool_sep", suffix) if suffix else ("<tool_calls>", "<tool_sep>")
    return _element(f"tool_calls{suffix}", call, strays=(), markers=(markers,))


FORMATS: Final = {
    # Families by mlx-vlm's names, which it knows by their templates.
    "json_tools": _element("tool_call", strays=(_FUNCTION_TAGS,)),
    "qwen3_coder": _element("tool_call", _FUNCTION_TAGS, *RECORDS),
    "naive": _element(  # as Qwen's, but line breaks around a value are a part of it
        "tool_call",
        _SEED_CALL,
        *RECORDS,
        markers=(("<tool_call>", "<parameter=example_parameter_1>value_1</parameter>"),),
    ),
    "glm47": _element("tool_call", _key_call(), *RECORDS, strays=(_FUNCTION_TAGS,)),
    "longcat": _element("longcat_tool_call", _key_call("longcat_"), *RECORDS, strays=()),
    "minimax_m2": _element("minimax:tool_call", _xml()),
    "atem": _element("atem:function_calls", _xml("atem:")),
    "minicpm5": ToolFormat(
        '<function name="',
        calls=(
            Call(
                rf'{_NAME}">',
                r"\s*+</function>",
                Tags(r'\s*+<param name="(?P<key>[^"]++)">', "</param>", wrap=("<![CDATA[", "]]>")),
            ),
        ),
    ),
    "pythonic": ToolFormat(
        "<|tool_call_start|>", "<|tool_call_end|>", (_PYTHON_CALL,), skip=("]", ",")
    ),
    "cohere2_moe": ToolFormat("<|START_ACTION|>", "<|END_ACTION|>", skip=("]", ",")),
    "gemma4": ToolFormat(
        "<|tool_call>",
        "<tool_call|>",
        (Call(rf"\s*+(?:(?:call)?+\s*+:)?\s*+(?:default_api[.:])?+{_NAME}\s*+(?=[{{(])"),),
        (_GEMMA_STRAY,),
        skip=("</tool_call>",),
        quote='<|"|>',
    ),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        (_KIMI_CALL,),
        (_KIMI_CALL,),
        named_ids=True,
        written="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        calls=(_MISTRAL_CALL, *RECORDS),
        strays=(_MISTRAL_CALL,),
        skip=("]",),
        short_ids=True,
    ),
    "harmony": ToolFormat(
        "<|channel|>",
        calls=(
            Call(
                rf"\w++\s++to=(?:functions\.)?+{_NAME}(?:\s++(?:code|json))?\s*+"
                r"(?:<\|(?:constrain|channel)\|>[^<]*+)*+<\|message\|>",
            ),
        ),
        skip=("<|call|>",),
    ),
    # The others.
    "functionary_v3.1": ToolFormat(
        "<function=",
        calls=(Call(rf"{_NAME}>", r"\s*+</function>"),),
        markers=(("<function=example_function_name>{",),),
    ),
    "functionary_v3.2": ToolFormat(
        ">>>",
        calls=(Call(rf"{_NAME}\n(?=\s*+\{{)"),),
        markers=((">>>${recipient}",),),
        opened=True,
        plain="all\n",
    ),
    "llama4": ToolFormat(
        "<|python_end|>",
        calls=tuple(
            replace(call, head=_LLAMA4_MARKS + call.head) for call in (*RECORDS, _PYTHON_CALL)
        ),
        markers=(("<|python_start|>", "<|python_end|>"),),
        opened=True,
        skip=("<|python_end|>", ";", ",", "]"),
    ),
    "llama3": ToolFormat(
        "<|python_tag|>",
        calls=(*RECORDS, _PYTHON_CALL),
        markers=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        opened=True,
        skip=(";", ",", "]"),
    ),
    "deepseek_v3": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _DEEPSEEK_CALLS,
        _DEEPSEEK_CALLS,
        markers=(("<｜tool▁calls▁begin｜>",),),
        skip=("```", "<｜tool▁call▁end｜>"),
        written="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>",
    ),
    "deepseek_v3.2": _element(
        "｜DSML｜function_calls", _xml("｜DSML｜"), markers=(("｜DSML｜", "function_calls"),)
    ),
    "deepseek_v4": _element(
        "｜DSML｜tool_calls", _xml("｜DSML｜"), markers=(("｜DSML｜", "tool_calls"),)
    ),
    "granite": ToolFormat("<|tool_call|>", markers=(("<|tool_call|> followed by",),), skip=("]",)),
    "phi4": ToolFormat(
        "<|tool_call|>", "<|/tool_call|>", markers=(("<|tool|>", "<|/tool|>"),), skip=("]",)
    ),
    "nemotron": _element("TOOLCALL", markers=(("<TOOLCALL>",),), skip=("]", ",")),
    # And MiniMax M1.
    "apriel": _element("tool_calls", markers=(("<tool_calls>",),), skip=("]", ",")),
    "seed_oss": _element("seed:tool_call", _SEED_CALL, markers=(("<seed:tool_call>",),)),
    "gigachat3.5": _element(
        "｜GCML｜tool_calls", _xml("｜GCML｜"), markers=(("｜GCML｜", "tool_calls"),)
    ),
    "gigachat3.1": ToolFormat("<|function_call|>", markers=(("<|function_call|>",),)),
    "apertus": ToolFormat(
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        (Call(rf'{_LIST}\{{\s*+"{_NAME}"\s*+:\s*+', r"\s*+\}"),),
        markers=(("<|tools_prefix|>",),),
        skip=("]", ","),
    ),
    "solar": ToolFormat(
        "<|tool_calls|>",
        "<|calls|>",
        (_SOLAR_CALL,),
        (_SOLAR_CALL,),
        markers=(("<|tool_call:begin|>",),),
    ),
    "hunyuan3": _hunyuan(":opensource"),
    "hunyuan3_preview": _hunyuan(""),
    "kimi_k3": ToolFormat(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        (
            Call(
                rf'\s*+<\|open\|>call tool="{_NAME}"[^<]*+<\|sep\|>',
                r"\s*+<\|close\|>call<\|sep\|>",
                Tags(
                    r'\s*+<\|open\|>argument key="(?P<key>[^"]++)" '
                    r'type="(?P<string>\w++)"<\|sep\|>',
                    "<|close|>argument<|sep|>",
                ),
            ),
        ),
        markers=(("<|open|>", "<|sep|>", "argument"),),
    ),
}
"""Formats by family; formats that mlx-vlm lacks follow in the order of their search."""


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format of a chat template's calls; None if the template shows none."""
    # This takes seconds, and only an engine needs it.
    from mlx_vlm.tools import SPECS, load_tool_module  # noqa: PLC0415

    matching = [spec for spec in SPECS if spec.matches(template)]
    best: Any = max(matching, key=lambda spec: spec.priority, default=None)
    name = "" if best is None else str(best.name)
    shown = [
        known
        for known in FORMATS.values()
        if any(all(marker in template for marker in group) for group in known.markers)
    ]
    if best is not None and best.priority > 0:
        shown = [known for known in shown if known is FORMATS.get(_NEAR.get(name, ""))]
    if shown:
        return shown[0]
    if best is None:
        hermes = FORMATS["json_tools"]
        return hermes if hermes.begin in template and hermes.end in template else None
    if name in FORMATS:
        return FORMATS[name]
    module = load_tool_module(name)
    return ToolFormat(module.tool_call_start, module.tool_call_end, parser=name)


def write_calls(functions: Sequence[Mapping[str, Any]], tool_format: ToolFormat | None) -> str:
    """Return calls as a model of this format writes them, or in JSON if the format is unknown."""
    known = tool_format or ToolFormat("", opened=True)
    named = [(one["name"], one["arguments"]) for one in functions]
    if known.calls == (_PYTHON_CALL,):
        calls = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in named
        ]
        text = f"[{', '.join(calls)}]"
    elif known.written:
        text = "".join(
            known.written.format(index=index, name=name, arguments=to_json(arguments))
            for index, (name, arguments) in enumerate(named)
        )
    else:
        text = to_json([{"name": name, "arguments": arguments} for name, arguments in named])
        if known.calls != RECORDS or known.opened:
            return text
    return f"{known.begin}{text}{known.end}"


def to_json(value: Any) -> str:
    """Return a value as JSON, with all letters as they are."""
    return json.dumps(value, ensure_ascii=False)
