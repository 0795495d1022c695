"""Grammars of strict tools: any text, and calls of the model's own format that fit their schema.

A tool whose text has a grammar of its own is strict too.
"""

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLTokenizer

from paceline.request.constraint import strict_tools
from tests.support.patch_grammar import PATCH
from workers.engine.text.grammar_source import (
    FUNCTION_TAGS,
    RECORDS,
    grammar_source,
    matcher_of,
    text_source,
)
from workers.engine.text.lark_text import UnsupportedGrammar
from workers.engine.text.tool_formats import FORMATS
from workers.server.tool_arguments import TagReader, argument_types

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["c", "f"]},
        "days": {"$ref": "#/$defs/days"},
        "note": {"type": "string"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
BODY: Any = {
    "tools": [
        {"function": {"name": "get_weather", "strict": True, "parameters": WEATHER}},
        {"function": {"name": "now", "strict": True}},
        {"function": {"name": "free"}},
    ]
}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SUM = 'start: N ("+" N)+\nN: /[0-9]+/\n%ignore /[ \\n]+/'
TEXTS_OF_TOOLS: Any = {
    "tools": [
        *({"function": {"name": name, "parameters": TEXT}} for name in ("patch", "code", "sum")),
        {"function": {"name": "any", "parameters": TEXT}},
        {"function": {"name": "free"}},
    ],
    "tool_grammars": {
        "patch": {"syntax": "lark", "definition": PATCH},
        "code": {"syntax": "regex", "definition": r'^[a-z]+/"[^"]*"$'},
        "sum": {"syntax": "lark", "definition": SUM},
        "any": {"syntax": "lark", "definition": "start: /(?s:.+)/"},
    },
}
SPECIAL = ("<tool_call>", "</tool_call>")
"""Special tokens of the demo model."""
TEXTS = ("[[call]]", "[[/call]]")


def source_of(
    tokenizer: LLTokenizer, style: str, marks: tuple[str, str] = SPECIAL, body: Any = BODY
) -> str:
    constraint = strict_tools(body, style)
    assert constraint is not None
    return grammar_source(constraint, tokenizer, marks)


def accepts(
    tokenizer: LLTokenizer, style: str, marks: tuple[str, str], answer: str, body: Any = BODY
) -> bool:
    """Return whether an answer may have this text, with `(` and `)` for the marks."""
    matcher = matcher_of(source_of(tokenizer, style, marks, body), tokenizer)
    assert not matcher.is_error(), matcher.get_error()
    text = answer.replace("(", marks[0]).replace(")", marks[1])
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tags(function: str, **values: Any) -> str:
    parameters = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"(\n<function={function}>\n{''.join(parameters)}</function>\n)"


WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'


@pytest.mark.parametrize("marks", [SPECIAL, TEXTS])
@pytest.mark.parametrize(
    ("style", "answer", "good"),
    [
        (FUNCTION_TAGS, "Only text, with < and [", True),
        (FUNCTION_TAGS, tags("get_weather", city="Paris", days=3), True),
        (FUNCTION_TAGS, f"So: {tags('get_weather', city='Paris', unit='c', days=3)}\n", True),
        (FUNCTION_TAGS, tags("get_weather", city="Paris", days=3, note="a\nb"), True),
        (FUNCTION_TAGS, tags("now") + "\n" + tags("free", x="a\nb", y=1), True),
        (FUNCTION_TAGS, tags("get_weather", days=3), False),
        (FUNCTION_TAGS, tags("get_weather", city="Paris", days=30), False),
        (FUNCTION_TAGS, tags("get_weather", city="P" * 21, days=3), False),
        (FUNCTION_TAGS, tags("get_weather", city="Paris", unit="k", days=3), False),
        (FUNCTION_TAGS, tags("now", x=1), False),
        (FUNCTION_TAGS, tags("other"), False),
        (FUNCTION_TAGS, "( text )", False),
        (RECORDS, f"(\n{WEATHER_CALL}\n)", True),
        (RECORDS, f'So: ([{WEATHER_CALL}, {{"name": "now", "arguments": {{}}}}])', True),
        (RECORDS, f'({{"name": "free", "arguments": {{"x": [1]}}}})\n({WEATHER_CALL})', True),
        (RECORDS, '({"name": "get_weather", "arguments": {"city": "Paris"}})', False),
        (RECORDS, '({"name": "now", "arguments": {"x": 1}})', False),
        (RECORDS, '({"name": "other", "arguments": {}})', False),
    ],
)
def test_calls_fit_their_schema(tokenizer, *, marks, style, answer, good) -> None:
    assert accepts(tokenizer, style, marks, answer) is good


@pytest.mark.parametrize("marks", [SPECIAL, TEXTS, ("<tools>", "</tools>")])
@pytest.mark.parametrize("style", [RECORDS, FUNCTION_TAGS])
@pytest.mark.parametrize(
    ("function", "text", "good"),
    [
        ("patch", '*** Begin Patch\n*** Add File: a"\\b\n+é\t\n*** End Patch', True),
        ("patch", "*** Begin Patch\n*** Delete File: a\n*** End Patch\n", True),
        ("patch", "*** Begin Patch\n*** End Patch", False),
        ("patch", "*** Begin Patch\n*** Add File: a\n+b", False),
        ("code", 'ab/"\n\\"', True),
        ("code", 'ab/""\n', False),
        ("code", '^ab/""', False),
        ("sum", "1 + 2\n+\n3", True),
        ("sum", "1 + ", False),
        ("any", "\n<b>\n</parameter\n", True),
        ("any", "", False),
    ],
)
def test_a_text_follows_the_grammar_of_its_tool(
    tokenizer, *, marks, style, function, text, good
) -> None:
    if style == FUNCTION_TAGS:
        written, free = tags(function, text=text), tags("free", x=1)
    else:
        call = {"name": function, "arguments": {"text": text}}
        written = f"(\n{json.dumps(call, ensure_ascii=False)}\n)"
        free = '({"name": "free", "arguments": {}})'
    for answer in (f"So: {written}", f"{written}\n{free}"):
        assert accepts(tokenizer, style, marks, answer, TEXTS_OF_TOOLS) == good


def test_no_text_between_tags_contains_the_tag_that_ends_it(tokenizer: LLTokenizer) -> None:
    for function, text in (("any", "a</parameter>b"), ("code", 'a/"</parameter>"')):
        written = tags(function, text=text)
        assert not accepts(tokenizer, FUNCTION_TAGS, SPECIAL, written, TEXTS_OF_TOOLS)


MONTH = {"type": "string", "pattern": "^[0-9]{2}$", "minLength": 1}
TEXT_VALUES: Any = [
    # schema, texts that it takes, texts that it does not take
    ({"minLength": 9}, ["New York\n\n", "a</b> <c>\n"], ["Paris", "8 chars.", ""]),
    ({"maxLength": 2}, ["", "ét", "\n\n"], ["éte"]),
    ({"minLength": 2, "maxLength": 2}, ["<\n"], ["<", "<\n<"]),
    ({"pattern": "^[0-9]{3}$"}, ["750"], ["Paris", "7500", "75", "a\n750"]),
    ({"pattern": r"^\d\w|/[|{]x$"}, ["1a b", "so /{x", "a\n/|x"], ["a1a", "/|x.", "\u0667a"]),
    ({"pattern": "a"}, ["bab", "a"], ["b", ""]),
    ({"pattern": "^a", "maxLength": 3}, ["abc"], ["abcd", "bac"]),
    ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "Paris"]),
    ({"format": "uuid"}, ["0123abcd-0123-0123-0123-0123456789aB"], ["0123abcd"]),
    ({"enum": ["ab", "é\n", ""], "maxLength": 2}, ["ab", "é\n", ""], ["a", '"ab"']),
    ({"const": "a|b"}, ["a|b"], ["a", "b"]),
    ({"type": ["string", "null"], "minLength": 5}, ["Paris", "null"], ["nul", "Pari"]),
    ({"type": ["string", "null"]}, ["Paris", "null", ""], []),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ['"a"', "b"]),
    ({"type": None, "anyOf": [{"const": "a"}, {"type": "null"}]}, ["a", "null"], ['"a"', "b"]),
    ({"type": None, "oneOf": [MONTH, {"type": "null"}]}, ["12", "null"], ["1", '"12"']),
    ({"type": None, "$ref": "#/$defs/month", "title": "Month"}, ["12"], ["1", '"12"']),
    ({"type": ["string", "integer"]}, ['"a"', "1"], ["a"]),
]  # fmt: skip


def strict_tool_of(value: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a body with a strict tool of one argument, a string unless `type` says otherwise."""
    schema = {name: part for name, part in {"type": "string", **value}.items() if part is not None}
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], **more}
    parameters["$defs"] = {"month": MONTH}
    return {"tools": [{"function": {"name": "f", "strict": True, "parameters": parameters}}]}


@pytest.mark.parametrize(("value", "good", "bad"), TEXT_VALUES)
def test_a_text_between_tags_has_what_its_schema_says(tokenizer, value, good, bad) -> None:
    """It has no quotes there, and a client's text is what stands between the tags."""
    body = strict_tool_of(value)
    for text in (*good, *bad):
        written = tags("f", x=text)
        took = accepts(tokenizer, FUNCTION_TAGS, TEXTS, written, body)
        assert took == (text in good), text
    schema = body["tools"][0]["function"]["parameters"]
    call = FORMATS["qwen3_coder"].calls[0]
    assert call.tags is not None
    for text in good:
        types = argument_types({"parameters": schema})
        reader = TagReader(call.tags, call.tail_pattern, "</tool_call>", types)
        arguments, _ = reader.feed(tags("f", x=text).removeprefix("(\n<function=f>"))
        assert jsonschema_rs.is_valid(schema, json.loads(arguments)), arguments


@pytest.mark.parametrize(
    ("body", "keyword"),
    [
        (strict_tool_of({"format": "iri"}), "format"),
        (strict_tool_of({"allOf": [{"enum": ["a"]}]}), "allOf"),
        (strict_tool_of({"not": {"const": "a"}}), "not"),
        (strict_tool_of({"minLength": 2.5}), "minLength"),
        (strict_tool_of({"type": None, "oneOf": [MONTH, {"type": "string"}]}), "oneOf"),
        (strict_tool_of({"type": None, "$ref": "#/$defs/month", "minLength": 9}), "$ref"),
        (strict_tool_of({}, minProperties=1), "minProperties"),
        (strict_tool_of({}, anyOf=[{"required": ["x"]}]), "anyOf"),
        (strict_tool_of({}, required=["x", "y"]), "required"),
        (strict_tool_of({}, properties={}, required=[], additionalProperties={}), "additionalPr"),
    ],
)
def test_a_keyword_that_cannot_be_held_between_tags_is_named(tokenizer, body, keyword) -> None:
    with pytest.raises(UnsupportedGrammar, match=re.escape(f"'{keyword}")):
        source_of(tokenizer, FUNCTION_TAGS, body=body)


@pytest.mark.parametrize("pattern", ["(^a|b)c", "a(?=b)", "[", r"\bx"])
def test_a_pattern_that_cannot_be_held_has_no_grammar(tokenizer: LLTokenizer, pattern: str) -> None:
    """llguidance refuses it as an expression, and so a client is told of the pattern."""
    source = source_of(tokenizer, FUNCTION_TAGS, body=strict_tool_of({"pattern": pattern}))
    error = matcher_of(source, tokenizer).get_error()
    assert "regex" in error.partition("\n")[0]


@pytest.mark.parametrize("style", [RECORDS, FUNCTION_TAGS])
def test_the_grammar_of_each_tool_is_known_alone(tokenizer: LLTokenizer, style: str) -> None:
    constraint = strict_tools(TEXTS_OF_TOOLS, style)
    assert constraint is not None
    matcher = matcher_of(text_source(constraint, "code"), tokenizer)
    text = r"ab/\"x\"" if style == RECORDS else 'ab/"x"\n</parameter>\n'
    assert matcher.consume_tokens(tokenizer.tokenize_str(text))
    assert matcher.is_accepting()


def test_only_strict_tools_are_a_constraint() -> None:
    assert strict_tools({"tools": BODY["tools"][2:]}, RECORDS) is None
    constraint = strict_tools({**BODY, "parallel_tool_calls": False}, RECORDS)
    assert constraint is not None
    assert constraint.value["limit"] == 1


@pytest.mark.parametrize("style", [RECORDS, FUNCTION_TAGS])
def test_a_grammar_lets_the_model_call_allowed_tools_alone(tokenizer, style) -> None:
    functions = [one["function"]["name"] for one in BODY["tools"]]

    def only(*names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
        return {**BODY, "tools": BODY["tools"][1:], "tool_choice": choice}

    answers = {
        name: f'{{"name": "{name}", "arguments": {{}}}}'
        if style == RECORDS
        else f"<function={name}>\n</function>"
        for name in functions[1:]
    }
    for name, call in answers.items():
        for allowed in answers:
            fits = accepts(tokenizer, style, SPECIAL, f"({call})", only(allowed))
            assert fits == (name == allowed)
    assert strict_tools(only(), style) is None, "what the model calls is left out of the answer"


def test_the_styles_of_formats_are_those_that_a_grammar_writes() -> None:
    """A format that ends calls by no text of its own, or begins them by none, has no style."""
    styles = {name: form.style for name, form in FORMATS.items()}
    assert (styles["json_tools"], styles["qwen3_coder"]) == (RECORDS, FUNCTION_TAGS)
    assert {styles[name] for name in ("gemma4", "llama3", "harmony", "seed_oss")} == {""}
