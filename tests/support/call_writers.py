"""How each family of models writes calls of tools."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


def _in_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _in_python(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _in_gemmas_notation(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_in_gemmas_notation, value))}]"
    if isinstance(value, dict):
        pairs = [map(_in_gemmas_notation, pair) for pair in value.items()]
        return "{" + ",".join(map(":".join, pairs)) + "}"
    return json.dumps(value)


class Writer(NamedTuple):
    """Texts around all calls, one call (`%n`: its name, `%a`: its arguments), and between calls.

    Arguments are a literal, or each stands between tags (`%k`: its key, `%v`: its value).
    """

    begin: str
    call: str
    end: str
    argument: str = ""
    separator: str = ""
    literal: Callable[[Mapping[str, Any]], str] = _in_json

    def answer(self, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of an answer with these calls."""
        written = [
            self.call.replace("%n", name).replace("%a", self._arguments(arguments))
            for name, arguments in calls
        ]
        return f"{self.begin}{self.separator.join(written)}{self.end}"

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if not self.argument:
            return self.literal(arguments)
        return "".join(
            self.argument.replace("%s", json.dumps(key == "text"))
            .replace("%t", "string" if key == "text" else "number")
            .replace("%k", key)
            .replace("%v", value if isinstance(value, str) else json.dumps(value))
            for key, value in arguments.items()
        )


_RECORD = '{"name": "%n", "arguments": %a}'
_PARAMETERS = '{"name": "%n", "parameters": %a}'


def _records(begin: str, end: str) -> Writer:
    return Writer(begin, _RECORD, end, separator=", ")


def _functions(tag: str, separator: str, newline: str = "\n") -> Writer:
    argument = f"<parameter=%k>{newline}%v{newline}</parameter>\n"
    begin, call, end = f"<{tag}>\n", "<function=%n>\n%a</function>", f"\n</{tag}>"
    return Writer(begin, call, end, argument, f"{end}{separator}{begin}")


def _keys(tag: str, prefix: str = "", newline: str = "") -> Writer:
    key = f"<{prefix}arg_key>%k</{prefix}arg_key>{newline}"
    argument = f"{key}<{prefix}arg_value>%v</{prefix}arg_value>\n"
    return Writer(f"<{tag}>", "%n\n%a", f"</{tag}>", argument, f"</{tag}><{tag}>")


def _invokes(calls: str, prefix: str = "", more: str = "") -> Writer:
    call = f'<{prefix}invoke name="%n">\n%a</{prefix}invoke>\n'
    argument = f'<{prefix}parameter name="%k"{more}>%v</{prefix}parameter>\n'
    return Writer(f"<{calls}>\n", call, f"</{calls}>", argument)


WRITERS = {
    "json_tools": Writer(
        *("<tool_call>\n", _RECORD, "\n</tool_call>"), separator="\n</tool_call>\n<tool_call>\n"
    ),
    "qwen3_coder": _functions("tool_call", "\n"),
    "naive": _functions("tool_call", "\n", newline=""),
    "seed_oss": _functions("seed:tool_call", "\n", newline=""),
    "glm47": _keys("tool_call", newline="\n"),
    "longcat": _keys("longcat_tool_call", "longcat_"),
    "minimax_m2": _invokes("minimax:tool_call"),
    "atem": _invokes("atem:function_calls", "atem:"),
    "deepseek_v3.2": _invokes("｜DSML｜function_calls", "｜DSML｜", ' string="%s"'),
    "deepseek_v4": _invokes("｜DSML｜tool_calls", "｜DSML｜", ' string="%s"'),
    "gigachat3.5": _invokes("｜GCML｜tool_calls", "｜GCML｜", ' string="%s"'),
    "minicpm5": Writer(
        *("", '<function name="%n">%a</function>', ""),
        '<param name="%k"><![CDATA[%v]]></param>',
        "\n",
    ),
    "cohere2_moe": Writer(
        "<|START_ACTION|>[\n",
        '{"tool_call_id": "0", "tool_name": "%n", "parameters": %a}',
        "\n]<|END_ACTION|>",
        separator=",\n",
    ),
    "gemma4": Writer(
        *("<|tool_call>", "call:%n%a", "<tool_call|>"),
        separator="<tool_call|><|tool_call>",
        literal=_in_gemmas_notation,
    ),
    "kimi_k2": Writer(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.%n:0<|tool_call_argument_begin|>%a<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "kimi_k3": Writer(
        "<|open|>tools<|sep|>",
        '<|open|>call tool="%n" index="1"<|sep|>%a<|close|>call<|sep|>',
        "<|close|>tools<|sep|>",
        '<|open|>argument key="%k" type="%t"<|sep|>%v<|close|>argument<|sep|>',
    ),
    "mistral": Writer("", "[TOOL_CALLS]%n[ARGS]%a", ""),
    "harmony": Writer(
        "", "<|channel|>commentary to=functions.%n <|constrain|>json<|message|>%a<|call|>", ""
    ),
    "functionary_v3.1": Writer("", "<function=%n>%a</function>", ""),
    "functionary_v3.2": Writer("", "%n\n%a", "", separator=">>>"),
    "llama3": Writer("", _PARAMETERS, "", separator="; "),
    "llama4": Writer("<|python_start|>", _PARAMETERS, "<|python_end|>"),
    "deepseek_v3": Writer(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%n\n```json\n%a\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "granite": _records("<|tool_call|>[", "]"),
    "phi4": _records("<|tool_call|>[", "]<|/tool_call|>"),
    "nemotron": _records("<TOOLCALL>[", "]</TOOLCALL>"),
    "apriel": _records("<tool_calls>[", "]</tool_calls>"),
    "gigachat3.1": Writer("", f"<|function_call|>{_RECORD}", ""),
    "apertus": Writer("<|tools_prefix|>[", '{"%n": %a}', "]<|tools_suffix|>", separator=", "),
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
    "hunyuan3_preview": Writer(
        "<tool_calls>\n",
        "<tool_call>%n<tool_sep>\n%a</tool_call>\n",
        "</tool_calls>",
        "<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n",
    ),
    "pythonic": Writer(
        *("<|tool_call_start|>[", "%n(%a)", "]<|tool_call_end|>"),
        separator=", ",
        literal=_in_python,
    ),
    "forced": _records("[", "]"),
}
