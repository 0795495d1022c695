"""Random JSON Schemas of the keywords that clients use, as a strategy of Hypothesis.

A schema usually has a value: bounds are drawn in order, and `allOf` adds to a type what fits it.
Most strings, numbers, lists and objects are bounded, because the demo model seldom ends one by
itself.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from hypothesis import strategies as st

Schema: TypeAlias = dict[str, Any]

FORMATS = (
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "uuid4",
)  # fmt: skip
PATTERNS = (
    "^[a-z]{1,8}$",
    "^\\d{3}-\\d{4}$",
    "^(red|green|blue)$",
    "^x{1,5}y?$",
    "^[A-Z][a-z]{0,9}$",
    "[0-9]",
    "^(?=.*[0-9])[a-z0-9]{2,9}$",
    "^(?!^[-+.]*$)[+-]?\\d{0,4}\\.?\\d{0,2}$",
)
NAMES = ("name", "age", "city", "tags", "é", 'a"b', "$id", "x y", "size", "next")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = (
    st.none() | st.booleans() | st.integers(-1000, 1000) | TEXT | st.sampled_from([0.5, -2.25])
)
SMALL_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=4,
)


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "string"}
    kind = draw(st.sampled_from(["bounded"] * 4 + ["pattern", "format", "format", "plain"]))
    if kind == "bounded":
        low = draw(st.integers(0, 5))
        schema |= {"minLength": low, "maxLength": low + draw(st.integers(0, 20))}
    elif kind == "pattern":
        schema |= {"pattern": draw(st.sampled_from(PATTERNS)), "maxLength": 16}
    elif kind == "format":
        schema["format"] = draw(st.sampled_from(FORMATS))
        if schema["format"] in ("email", "hostname", "uri"):
            schema["maxLength"] = 40
    return schema


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    low, width = draw(st.integers(-500, 500)), draw(st.integers(2, 1000))
    bounds: Schema = {"minimum": low, "maximum": low + width}
    exclusive = {"exclusiveMinimum": low, "exclusiveMaximum": low + width}
    multiple = {"multipleOf": draw(st.sampled_from([2, 5, 10])), "minimum": 0, "maximum": 100}
    whole = {"minimum": -(2**63), "maximum": 2**63 - 1}
    open_ended = draw(
        st.sampled_from([{"exclusiveMinimum": 0, "maximum": 0.75}, {"minimum": -1e300}, whole])
    )
    fraction = {"multipleOf": draw(st.sampled_from([0.5, 0.25, 0.01])), "minimum": 0, "maximum": 90}
    return draw(
        st.sampled_from(
            [
                *({"type": "integer", **more} for more in (bounds, exclusive, multiple, bounds)),
                *({"type": "number", **more} for more in (multiple, fraction, fraction)),
                draw(
                    st.sampled_from(
                        [open_ended, bounds, {"type": "integer"}, {"type": "number", **bounds}]
                    )
                ),
            ]
        )
    )


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "array", "items": draw(inner)}
    if draw(st.integers(0, 9)) < 9:
        low = draw(st.integers(0, 2))
        schema |= {"minItems": low, "maxItems": low + draw(st.integers(0, 3))}
    if draw(st.integers(0, 4)) == 4:
        schema |= {"prefixItems": draw(st.lists(inner, min_size=1, max_size=2))}
    if draw(st.integers(0, 19)) == 19:
        schema["uniqueItems"] = True
    if draw(st.integers(0, 19)) == 19:
        values = draw(st.lists(TEXT, unique=True, min_size=1, max_size=5))
        schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True}
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    schema: Schema = {"type": "object", "properties": {name: draw(inner) for name in names}}
    schema["required"] = [name for name in names if draw(st.booleans())]
    more = draw(st.sampled_from(["false"] * 18 + ["absent", "schema", "pattern", "names"]))
    if more == "false":
        schema["additionalProperties"] = False
    elif more == "schema":
        schema["additionalProperties"] = draw(inner)
    elif more == "pattern":
        schema |= {"patternProperties": {"^x[0-9]$": draw(inner)}, "additionalProperties": False}
    elif more == "names":
        listed: Schema = {"propertyNames": {"type": "string", "enum": ["a", "b"]}}
        schema = {"type": "object", "additionalProperties": draw(inner), **listed}
        schema["required"] = draw(st.sampled_from([[], ["a"], ["a", "b"]]))
    if draw(st.integers(0, 9)) == 9:
        schema["minProperties"] = len(schema["required"])
    return schema


@st.composite
def unions(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    keyword = draw(st.sampled_from(["anyOf", "oneOf", "types", "tagged"]))
    if keyword == "types":
        return {"type": draw(st.lists(st.sampled_from(["null", "boolean", "string"]), unique=True, min_size=1))}  # fmt: skip # noqa: E501
    if keyword == "tagged":  # a discriminated union, as pydantic writes it
        kinds = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": draw(inner)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in ("cat", "dog")
        ]
        return {"oneOf": kinds}
    if keyword == "oneOf":  # of different types: most unions of people are
        if draw(st.booleans()):
            return {"oneOf": [{"type": "null"}, draw(objects(inner))]}
        return {"oneOf": [draw(strings()), draw(numbers()), {"type": "null"}]}
    return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}


@st.composite
def conjunctions(draw: st.DrawFn) -> Schema:
    low = draw(st.integers(0, 50))
    return draw(
        st.sampled_from(
            [
                {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 100}]},
                {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 9}]},
                {
                    "allOf": [{"required": ["id", "on"]}, {"minProperties": 1}],
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer", "minimum": 0, "maximum": low},
                        "on": {"type": "boolean"},
                    },
                    "additionalProperties": False,
                },
                {"allOf": [{"type": "string"}, {"enum": ["a", "b", 3]}]},
            ]
        )
    )


LEAVES = (
    strings()
    | numbers()
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}])
    | st.lists(SMALL_JSON, min_size=1, max_size=4).map(lambda values: {"enum": values})
    | SMALL_JSON.map(lambda value: {"const": value})
    | conjunctions()
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Return a schema, sometimes with definitions to which it refers, also recursively."""
    referring = draw(st.integers(0, 2)) == 2
    leaves = LEAVES
    if referring:
        leaves = leaves | st.sampled_from([{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}])

    def extend(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
        return arrays(inner) | objects(inner) | objects(inner) | unions(inner)

    schema = draw(st.recursive(leaves, extend, max_leaves=6))
    if referring:
        node = {
            "type": "object",
            "properties": {
                "value": draw(LEAVES),
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        schema = {**schema, "$defs": {"leaf": draw(LEAVES), "node": node}}
    if draw(st.booleans()):
        schema = {**schema, "title": "Answer", "description": "What to answer."}
    return schema


def keywords(schema: Any) -> set[str]:
    """Return the keywords of a schema, those of its parts included."""
    found: set[str] = set()
    for part in _parts(schema):
        found.update(part)
    return found - {"title", "description"}


_OF_SCHEMAS: dict[str, Callable[[Any], Any]] = {
    "items": lambda value: [value],
    "additionalProperties": lambda value: [value],
    "properties": dict.values,
    "$defs": dict.values,
    "prefixItems": list,
    "anyOf": list,
    "oneOf": list,
    "allOf": list,
}


def _parts(schema: Any) -> Iterator[Schema]:
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, inner in _OF_SCHEMAS.items():
        if keyword in schema:
            for part in inner(schema[keyword]):
                yield from _parts(part)
