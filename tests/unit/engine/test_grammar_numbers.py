"""Numbers of a JSON Schema: what a grammar takes is what the schema takes."""

import itertools
import json
from typing import Any

import jsonschema_rs
import pytest

from tests.support.grammars import matcher, takes
from workers.engine.text.lark_text import UnsupportedGrammar

BOUNDS = (-1, -0.5, 0, 0.25, 0.75, 1, 1.5, 10, 12.75)
RANGES = [*itertools.combinations_with_replacement(BOUNDS, 2), (1, 0.75)]
NUMBERS = (
    "-2 -1.5 -1.50 -1 -1.0 -0.9 -0.50 -0.49 -0 -0.0 0 0.0 0.1 0.25 0.26 0.75 0.76 1 1.0 1.01 1.5 2"
    " 9 9.0 9.9 10 10.0 10.1 12.75 100"
).split()
LARGE = (2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63) + 1, 1234567890123456789)


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_a_number_is_within_its_bounds(low: str, high: str, kind: str) -> None:
    """An exclusive bound that is whole was taken where the other had the same whole part."""
    wrong, taken = [], 0
    for least, most in RANGES:
        schema = {"type": kind, low: least, high: most}
        state = matcher(schema)
        if state.is_error():
            continue
        valid = jsonschema_rs.validator_for(schema)
        for text in NUMBERS:
            is_taken = takes(state.deep_copy(), text)
            taken += is_taken
            if is_taken and not valid.is_valid(json.loads(text)):
                wrong.append((schema, text))
    assert not wrong
    assert taken > 50


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.75, "multipleOf": 0.25},
        {"type": "number", "exclusiveMinimum": 0, "minimum": -1, "maximum": 0.75},
        {"type": "number", "exclusiveMinimum": -1, "minimum": 0.25, "maximum": 0.75},
        {"type": ["number", "null"], "exclusiveMinimum": 0.0, "exclusiveMaximum": 0.75},
    ],
)
def test_an_exclusive_bound_is_no_value(schema: Any) -> None:
    assert not takes(matcher(schema), "0")
    assert takes(matcher(schema), "0.5") or takes(matcher(schema), "0.50")


@pytest.mark.parametrize("value", LARGE)
def test_bounds_beyond_the_exact_floats_hold(value: int) -> None:
    for keyword, outside in (("minimum", value - 1), ("maximum", value + 1)):
        state = matcher({"type": "integer", keyword: value})
        assert not takes(state.deep_copy(), str(outside))
        assert takes(state, "0") is ((value > 0) is (keyword == "maximum"))


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("farthest", [2**63 - 1, 3.4028234663852886e38, 1.7976931348623157e308])
def test_the_range_of_a_types_own_numbers_holds(kind: str, farthest: float) -> None:
    """Zod, Rust and Go write the range of an int64 or a float; llguidance has no such range."""
    lowest = -(2**63) if isinstance(farthest, int) else -farthest
    for schema in (
        {"type": kind, "minimum": lowest, "maximum": farthest},
        {"type": kind, "exclusiveMinimum": lowest},
        {"type": kind, "minimum": 0, "exclusiveMaximum": farthest},
    ):
        state = matcher(schema)
        assert takes(state.deep_copy(), str(9 * 10**18))
        assert takes(state.deep_copy(), str(2**64)) is (len(schema) == 2)
        assert takes(state, "-7") is (schema.get("minimum") != 0)


def test_a_multiple_has_no_more_digits_than_a_float() -> None:
    for schema in (
        {"type": "number", "multipleOf": 1.5},
        {"type": "number", "multipleOf": 1.5, "minimum": 0, "exclusiveMaximum": 1e300},
    ):
        assert takes(matcher(schema), "8081637" if "minimum" in schema else "-4.5")
        assert not takes(matcher(schema), "8081636243368315.5")
    assert takes(matcher({"type": "integer", "multipleOf": 5}), "8081636243368315")


@pytest.mark.parametrize("value", [*LARGE, 12345678901234567890, 123456789.12345679])
def test_a_number_that_would_be_written_otherwise_is_refused(value: float) -> None:
    for schema in ({"const": value}, {"enum": [1, {"id": [value]}]}):
        (keyword,) = schema
        with pytest.raises(UnsupportedGrammar, match=f"'{keyword}'"):
            matcher(schema)


@pytest.mark.parametrize("value", [0, -7, 2**53, 0.1, 1.5, 1e-7, 10**23, 123456.789012])
def test_a_listed_number_is_written_as_it_is(value: float) -> None:
    assert json.loads(bytes(matcher({"const": value}).compute_ff_tokens())) == value


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    """Its schema is held, and its bounds are no values."""
    value = {"anyOf": [{"type": "string", "format": "date"}, {"const": 1, "maximum": 2**63 - 1}]}
    for name in ("const", "enum", "default", "examples", "minimum"):
        schema = {"type": "object", "properties": {name: value}}
        assert takes(matcher(schema), json.dumps({name: "2024-02-29"}))
        assert not takes(matcher(schema), json.dumps({name: "2023-02-29"}))
