"""Schemas as programs write them: what a grammar takes is what the schema takes."""

import datetime
import decimal
import enum
import json
import pathlib
import uuid
from typing import Any, Literal

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import Base64Str, SecretStr, TypeAdapter

from paceline.request.constraint import Constraint, ConstraintKind
from tests.support.grammars import matcher, takes
from workers.engine.text.grammar_source import FUNCTION_TAGS, grammar_source
from workers.engine.text.lark_text import UnsupportedGrammar

OPTIONAL: dict[str, Any] = {"type": "object", "properties": {"a": {}, "b": {}}}
CLOSED = {**OPTIONAL, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        # A number of properties that every object has is no bound.
        ({**OPTIONAL, "minProperties": 0}, None),
        ({**OPTIONAL, "required": ["a"], "minProperties": 1}, None),
        ({**CLOSED, "maxProperties": 2}, None),
        ({**CLOSED, "required": ["b"], "minProperties": 1, "maxProperties": 3}, None),
        ({**OPTIONAL, "minProperties": 1}, ""),
        ({**OPTIONAL, "maxProperties": 2}, "abc"),
        ({**CLOSED, "patternProperties": {"^x": {}}, "maxProperties": 2}, "abx"),
        ({**CLOSED, "maxProperties": 1}, "ab"),
        ({**CLOSED, "required": ["a"], "minProperties": 2}, "a"),
    ],
)
def test_a_number_of_properties_is_held_or_refused(schema: Any, refused: str | None) -> None:
    state = matcher(schema)
    if refused is None:
        assert takes(state, json.dumps({"a": 1, "b": 2}))
    else:
        assert state.is_error() or not takes(state, json.dumps(dict.fromkeys(refused, 1)))


class Color(enum.Enum):
    RED, GREEN, BLUE = "red", "green", "blue"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pathlib.Path, "/tmp/a"),
        (SecretStr, "hidden"),
        (bytes, "raw"),
        (Base64Str, "YQ=="),
        (decimal.Decimal, 1.25),
        (datetime.timedelta, "P3D"),
        (set[Color], ["red", "blue"]),
        (frozenset[Literal[1, 2, 3]], [2]),
        (dict[Color, int], {"green": 1}),
        (dict[Literal["x", "y"], bool], {"x": True, "y": False}),
        (Color | None, None),
    ],
)
def test_the_schemas_of_pydantic_are_held(kind: Any, value: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    adapter.validate_json(json.dumps(value))
    assert takes(matcher(adapter.json_schema()), json.dumps(value))


LETTERS = {"a": {"type": "null"}, "b": {}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"propertyNames": {"type": "string"}, "maxProperties": 9}, [{"a": 1}], []),
        ({"propertyNames": {"enum": ["a", "b"]}}, [{"a": 1, "b": 2}, {}], [{"c": 1}]),
        ({"propertyNames": {"const": "a"}, "properties": LETTERS}, [{"a": None}], [{"b": 1}]),
        ({"propertyNames": {"pattern": "^x"}}, [{"x1": 1}], [{"y": 1}]),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
    ],
)
def test_names_of_properties_hold(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """Zod writes `propertyNames` for each of its records."""
    record = {"type": "object", "additionalProperties": {"type": "integer"}}
    check_held({**record, **schema}, valid, invalid)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"items": {}, "uniqueItems": False}, [[1, 1]], []),
        ({"items": {}, "uniqueItems": True, "maxItems": 1}, [[1], []], [[1, 1]]),
        ({"items": {"enum": ["a", "b"]}, "uniqueItems": True}, [["a", "b"], []], [["a", "a"]]),
        (
            {"items": {"$ref": "#/$defs/N"}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
            [[1], [1, 3]],
            [[], [1, 2, 3], [2, 2]],
        ),
    ],
)
def test_lists_of_different_values_hold(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    numbers = {"N": {"type": "integer", "enum": [1, 2, 3], "title": "N"}}
    check_held({"type": "array", "$defs": numbers, **schema}, valid, invalid)


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("^(?=.*[0-9])(?=.*[a-z])[a-z0-9]{4,}$", ["ab1c"], ["abcd", "1234", "a1"]),
        ("^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", ["-1.5", ".5", "07"], ["-", ".", "", "1.2.3"]),
        ("^(?=.{1,5}$)a|b(?:|c)*$", None, None),
        ("^(?=a)?b$", None, None),
        ("^(?=a", None, None),
        ("^(?=a(?:b|[)]c))(?=a|x)a.*$", ["ab", "a)c"], ["ac", "xb"]),
        ("^(?![^a-c]*$)\\S+$", ["xa", "b"], ["xyz", "a b"]),
    ],
)
def test_a_pattern_that_looks_ahead_is_held_or_refused(pattern, valid, invalid) -> None:
    schema = {"type": "string", "pattern": pattern}
    if valid is None or invalid is None:
        assert "regex" in matcher(schema).get_error()
    else:
        check_held(schema, valid, invalid)


def test_other_lists_of_different_values_are_refused() -> None:
    for items in (
        *({}, {"type": "string"}, {"enum": [*range(9)]}, {"enum": [1, 1.0]}, {"enum": [1, "a"]}),
        *({"type": "string", "enum": [1, 2]}, {"enum": ["a", "b"], "maxLength": 1}),
    ):
        schema = {"type": "array", "items": items, "uniqueItems": True}
        assert "uniqueItems" in matcher(schema).get_error(), items


@pytest.mark.parametrize(
    ("choices", "held"),
    [
        ([{"type": "null"}, {"$ref": "#/$defs/A"}], True),
        ([{"$ref": "#/$defs/A"}, {"enum": ["x", None]}, {"type": ["number", "boolean"]}], True),
        ([{"anyOf": [{"type": "null"}, {"const": 1}]}, {"$ref": "#/$defs/A"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"type": "number"}], False),
        ([{"$ref": "#/$defs/A"}, {"required": ["b"]}], False),
        ([{"$ref": "#/$defs/A"}, {"type": "object", "properties": {"b": {}}}], False),
    ],
)
def test_one_of_different_types_is_held(choices: list[Any], held: bool) -> None:
    target = {"type": "object", "properties": {"x": {"type": "string"}}}
    state = matcher({"oneOf": choices, "$defs": {"A": target}})
    assert state.is_error() is not held
    assert not held or takes(state, '{"x": "y"}')


def test_a_format_that_json_schema_does_not_have_is_any_text() -> None:
    check_held({"type": "string", "format": "path"}, ["a b", ""], [1])
    assert takes(matcher({"type": "string", "format": "uuid4"}), json.dumps(str(uuid.uuid4())))
    assert not takes(matcher({"type": "string", "format": "uuid4"}), json.dumps(str(uuid.uuid1())))
    assert "format" in matcher({"type": "string", "format": "iri"}).get_error()


def test_an_encoded_text_holds() -> None:
    state = matcher({"type": "string", "contentEncoding": "base64"})
    for text in ("", "YQ==", "YWI=", "YWJj"):
        assert takes(state.deep_copy(), json.dumps(text))
    for text in ("YR==", "Y", "YQ", "a b="):
        assert not takes(state.deep_copy(), json.dumps(text))


def test_an_escape_hides_no_key() -> None:
    """A key of an open object that spells another one has the schema of that."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert takes(matcher(schema), '{"a": 1, "b": "x"}')
    for key in (r"\u0061", r"b\u0061"):
        assert not takes(matcher(schema), f'{{"a": 1, "{key}": "x"}}')
    for text in ("\\", '"', "\n", "é", "0\x1b", "\x7f"):
        written = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
        assert takes(matcher({"const": text}), written)
    for pattern in (r"^0\x1b$", r"^0\u007f$", "^0[\x1b]$", r"^0\v$", r"^0\x{1b}$"):
        assert not takes(matcher({"type": "string", "pattern": pattern}), '"0"')


def check_held(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    state, truth = matcher(schema), jsonschema_rs.validator_for(schema)
    assert not state.get_error()
    for value in valid:
        assert truth.is_valid(value)
        assert takes(state.deep_copy(), json.dumps(value)), value
    for value in invalid:
        assert not truth.is_valid(value)
        assert not takes(state.deep_copy(), json.dumps(value)), value


FORMATS = {
    "date": (["2024-02-29"], ["2023-02-29", "24-01-01"]),
    "time": (["12:00:00Z", "23:59:59.5+01:00"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2024-02-29 12:00:00Z"]),
    "duration": (["P3D", "PT1H30M", "P1Y2M3DT4H5M6S", "P2W", "PT5S"], ["P", "PT", "P1D2W", "3D"]),
    "email": (
        ["a.b+c@sub.example.org", f"{'a' * 64}@example.com"],
        ["a", "a@", "a b@c.de", ".a@b.co", "a@-b.co", f"{'a' * 65}@example.com"],
    ),
    "hostname": (["a-b.example.com", "abcd." * 50 + "com"], ["-a", "a..b", "abcd." * 50 + "comm"]),
    "ipv4": (["255.255.255.255"], ["256.1.1.1", "1.2.3"]),
    "ipv6": (["::", "::1", "2001:db8::1", "1:2:3:4:5:6:7:8"], ["1:2", "1::2::3", ":::"]),
    "uri": (
        ["http://u:p@example.com:8080/a?b=%20#c", "mailto:a@b.co", "file:///tmp/x", "urn:a/b"],
        ["example.com", "http://a b", "http://a.b/%2"],
    ),
    "uuid": (["f81d4fae-7dec-11d0-a765-00a0c91e6bf6"], ["f81d4fae7dec11d0a76500a0c91e6bf6"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_holds_in_json_and_between_tags(name: str) -> None:
    valid, invalid = FORMATS[name]
    schema = {"type": "string", "format": name}
    truth = jsonschema_rs.validator_for(schema, validate_formats=True)
    between_tags = matcher_of_tags({"properties": {"x": schema}, "required": ["x"]})
    for text in (*valid, *invalid):
        assert truth.is_valid(text) is (text in valid)
        assert takes(matcher(schema), json.dumps(text)) is (text in valid), text
        assert takes(between_tags.deep_copy(), call_in_tags(text)) is (text in valid), text


def test_the_strings_of_zod_hold_between_tags() -> None:
    """A pattern that looks ahead, a format that is Zod's own, and an `allOf` of patterns."""
    schema = {
        "type": "string",
        "format": "includes",
        "pattern": "^(?=.*[0-9])[a-z0-9]+$",
        "allOf": [{"type": "string", "pattern": "b"}, {"maxLength": 3}],
    }
    state = matcher_of_tags({"properties": {"x": schema}, "required": ["x"]})
    for text in ("ab1", "ab", "a1", "ab1c"):
        assert takes(state.deep_copy(), call_in_tags(text)) is (text == "ab1")
    for part in ({"enum": ["a"]}, {"type": "number"}, {"format": "iri"}):
        with pytest.raises(UnsupportedGrammar):
            matcher_of_tags({"properties": {"x": {"type": "string", "allOf": [part]}}})


def matcher_of_tags(parameters: dict[str, Any]) -> LLMatcher:
    tokenizer = LLTokenizer("byte")
    value = {"limit": 1, "functions": {"f": parameters}, "grammars": {}, "style": FUNCTION_TAGS}
    constraint = Constraint(ConstraintKind.STRICT_TOOLS, value, "tools")
    source = grammar_source(constraint, tokenizer, ("<tool_call>", "</tool_call>"))
    return LLMatcher(tokenizer, source, log_level=0)


def call_in_tags(text: str) -> str:
    value = f"<parameter=x>\n{text}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{value}</function>\n</tool_call>"
