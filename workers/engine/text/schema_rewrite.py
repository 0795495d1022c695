"""JSON Schemas as llguidance holds them.

llguidance refuses keywords that allow every answer, and holds some others wrongly. Here a schema
becomes one whose every answer by llguidance's rules is one by JSON Schema's. Pydantic and Zod write
many of these keywords for the types of a program: a set, a path, a map with keys of an enum.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Context, Decimal
from functools import partial
from itertools import combinations
from typing import Any

import regex

from workers.engine.text.lark_text import UnsupportedGrammar

# llguidance allows a leap second in every minute, fractions without end, and names of any length.
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DAYS = "[0-9]+D"
_MONTHS = f"[0-9]+M(?:{_DAYS})?"
_MINUTES = "[0-9]+M(?:[0-9]+S)?"
_CLOCK = f"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES}|[0-9]+S)"
_DURATION = f"P(?:[0-9]+W|(?:[0-9]+Y(?:{_MONTHS})?|{_MONTHS}|{_DAYS})(?:{_CLOCK})?|{_CLOCK})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_WORD = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_WORD}:){{7}}{_WORD}",
        f"(?:{_WORD}:){{1,7}}:",
        *(f"(?:{_WORD}:){{1,{7 - n}}}(?::{_WORD}){{1,{n}}}" for n in range(1, 7)),
        f":(?::{_WORD}){{1,7}}",
        "::",
    ]
)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_ESCAPE = "%[0-9a-fA-F]{2}"
_PATH = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|{_ESCAPE})*"
_AUTHORITY = (
    rf"//(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPE})*@)?{_HOST}"
    "(?::(?:[0-9]{1,4}|[1-5][0-9]{4}))?"
)
_QUERY = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_ESCAPE})*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}(?:/{_PATH})?|/(?://)?(?:[A-Za-z0-9._~-]{_PATH})?"
    rf"|[A-Za-z0-9._~-]{_PATH})(?:\?{_QUERY})?(?:#{_QUERY})?"
)
_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-%s{_HEX}{{3}}-%s{_HEX}{{3}}-{_HEX}{{12}}"
_FORMATS: Mapping[str, Sequence[str]] = {
    "date": [_DATE],
    "time": [_TIME],
    "date-time": [f"{_DATE}T{_TIME}"],
    "duration": [_DURATION],
    "email": [rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}", "[^@]{1,64}@.*", ".{3,254}"],
    "hostname": [_HOST, ".{1,253}"],
    "ipv4": [rf"(?:{_BYTE}\.){{3}}{_BYTE}"],
    "ipv6": [_IPV6],
    "uri": [_URI],
    "uuid": [_UUID % (_HEX, _HEX)],
    **{f"uuid{version}": [_UUID % (version, "[89abAB]")] for version in range(1, 9)},
}
"""Expressions that all match the texts of a format, which may be fewer than it allows."""
_BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"
_UNHELD_FORMATS = frozenset(
    "idn-email idn-hostname iri uri-reference iri-reference uri-template json-pointer "
    "relative-json-pointer regex".split()
)
"""The other formats of JSON Schema, which has those of all others ignored: Pydantic has `path`."""
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment".split()
)
_FORCED = frozenset({"const", "enum"})
_VALUES = _FORCED | {"default", "examples"}
_NAMED = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
"""Keywords whose values have a schema for each name."""
_LOOSE = frozenset(
    "not if then else contains minContains maxContains uniqueItems propertyNames minProperties "
    "maxProperties dependentRequired dependentSchemas dependencies unevaluatedItems "
    "unevaluatedProperties format pattern minimum maximum exclusiveMinimum exclusiveMaximum "
    "multipleOf".split()
)
_EXACT_INT = 2**53
"""llguidance reads numbers as floats, which count up to here."""
_FARTHEST = 2**63 - 1024
"""The largest whole float that fits 64 bits: beyond it llguidance knows no range."""
_FARTHEST_MULTIPLE = 10**12
"""Up to here a float has enough digits for a `multipleOf` with a fraction."""
_STEP = 1e-9
"""How far within an exclusive bound the range begins; no answer needs a number between."""
_DIGITS = Context(prec=5000)
_SET_LIMIT = 8
"""Values that a list may have, each at most once: 256 lists."""
REFERENCES_LIMIT = 16
_UNIONS_LIMIT = 4
"""Unions within unions whose types are looked for; a union may have itself as a member."""
_ONLY_CLASS = re.compile(r"\^?\[(\^?)((?:\\.|[^\]\\])+)\]\*\$")
_APART = r"\\.|\[(?:\\.|[^]\\])*+\]"
"""Escapes and classes, whose characters mean nothing to a pattern."""
_GROUP = regex.compile(rf"(?s)(?P<group>\((?:{_APART}|[^()\\[]|(?&group))*+\))")
_BAR = regex.compile(rf"(?:{_APART}|{_GROUP.pattern})(*SKIP)(*FAIL)|\|", regex.DOTALL)


def as_held(schema: Any) -> Any:
    """Return a schema whose every answer by llguidance's rules is one by JSON Schema's.

    Raise `UnsupportedGrammar` otherwise.
    """
    return _held(schema, schema)


def loosened(schema: Any) -> Any:
    """Return a schema without the keywords that a grammar may be unable to hold."""
    if not isinstance(schema, Mapping):
        return [loosened(part) for part in schema] if isinstance(schema, list) else schema
    parts = {
        name: part if name in _VALUES else _mapped(name, part, loosened)
        for name, part in schema.items()
        if name not in _LOOSE or (name in _NAMED and isinstance(part, Mapping))
    }
    if "oneOf" in parts and "anyOf" not in parts:
        parts["anyOf"] = parts.pop("oneOf")
    return parts


def _mapped(name: str, part: Any, change: Callable[[Any], Any]) -> Any:
    if name in _NAMED and isinstance(part, Mapping):
        return {key: change(inner) for key, inner in part.items()}
    return change(part)


def resolve(reference: Any, root: Any) -> Any:
    """Return the target of a reference within a schema; None if it is missing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _held(schema: Any, root: Any) -> Any:
    if not isinstance(schema, Mapping):
        return [_held(part, root) for part in schema] if isinstance(schema, list) else schema
    parts: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _FORCED and not _is_exact(part):
            raise UnsupportedGrammar(f"The worker does not support so exact a number in '{name}'.")
        held = partial(_held, root=root)
        parts[name] = part if name in _VALUES else _mapped(name, part, held)
    if "not" in parts and _is_anything(parts["not"]):
        return False
    if "anyOf" not in parts and _differ_in_type(parts.get("oneOf"), root):
        parts["anyOf"] = parts.pop("oneOf")
    parts = hold_texts(parts)
    _narrow(parts, "minimum", "exclusiveMinimum", math.inf)
    _narrow(parts, "maximum", "exclusiveMaximum", -math.inf)
    _hold_names(parts, root)
    _drop_property_counts(parts)
    return _as_set(parts, root)


def _is_anything(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and ANNOTATIONS.issuperset(schema))


def _target(schema: Any, root: Any) -> Any:
    """Follow a schema that is nothing but a reference."""
    for _ in range(REFERENCES_LIMIT):
        if not isinstance(schema, Mapping) or {*schema} - ANNOTATIONS != {"$ref"}:
            return schema
        schema = resolve(schema["$ref"], root)
    return None


def _differ_in_type(choices: Any, root: Any) -> bool:
    """Return whether no value fits two of these schemas, because their types differ."""
    if not isinstance(choices, list):
        return False
    each = [_types(one, root) for one in choices]
    return all(each) and sum(map(len, each)) == len(set().union(*each))


def _types(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Return the types that the values of a schema may have; empty if it is not known."""
    schema = _target(schema, root)
    if not isinstance(schema, Mapping) or depth > _UNIONS_LIMIT:
        return set()
    named = schema.get("type")
    if isinstance(named, str | list):
        each = [named] if isinstance(named, str) else named
        return {"number" if kind == "integer" else str(kind) for kind in each}
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {kind_of(value) for value in schema.get("enum", [schema.get("const")])}
    choices = schema.get("anyOf", schema.get("oneOf"))
    found = [_types(one, root, depth + 1) for one in choices] if isinstance(choices, list) else []
    return set().union(*found) if all(found) else set()


def kind_of(value: Any) -> str:
    """Return the type of a value; `integer` counts as `number`."""
    kinds = {bool: "boolean", str: "string", type(None): "null", list: "array", dict: "object"}
    return kinds.get(type(value), "number")


def hold_texts(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a format, an encoding and a pattern that looks ahead by patterns that mean the same.

    A format or a pattern that cannot be held stays, and the compiler refuses it.
    """
    parts = dict(schema)
    form, pattern, more = parts.get("format"), parts.get("pattern"), parts.get("allOf", [])
    if not isinstance(more, list):
        return parts  # which the compiler refuses
    added: list[str] = []
    if isinstance(form, str) and form not in _UNHELD_FORMATS:
        del parts["format"]
        added += [f"^(?:{one})$" for one in _FORMATS.get(form, ())]
    if parts.get("contentEncoding") == "base64":
        added.append(f"^{_BASE64}$")
    if isinstance(pattern, str) and (ahead := [*_split_lookahead(pattern)]):
        del parts["pattern"]
        added += ahead
    if added:
        parts["allOf"] = [*more, *({"pattern": one} for one in added)]
    return parts


def _split_lookahead(pattern: str) -> Iterator[str]:
    """Yield patterns that together mean a pattern that begins by looking ahead; else nothing.

    Such as `^(?=.*[0-9])[a-z0-9]{8,}$` for passwords, or Pydantic's of decimals, which begins with
    `^(?!^[-+.]*$)`. A pattern that looks ahead elsewhere is yielded as it is, and then refused.
    """
    rest = pattern[1:]
    found = []
    while pattern.startswith("^") and rest.startswith(("(?=", "(?!")):
        group = _GROUP.match(rest)
        if group is None:
            return
        inner = group[0][3:-1]
        only = _ONLY_CLASS.fullmatch(inner)
        if rest.startswith("(?="):
            found.append(f"^(?:{inner})" if len(ways(inner)) > 1 else f"^{inner}")
        elif only is not None:
            found.append(f"[{'' if only[1] else '^'}{only[2]}]")
        else:
            return
        rest = rest[group.end() :]
    if found and len(ways(rest)) == 1:
        yield from (*found, f"^{rest}")


def ways(pattern: str) -> list[str]:
    """Return the alternatives of a pattern that are in no group."""
    return _BAR.split(pattern)[::2]


def _narrow(parts: dict[str, Any], bound: str, exclusive: str, inwards: float) -> None:
    """Move bounds that llguidance does not hold to the next number inwards that it does.

    It reads integers as floats, takes an exclusive bound that is whole for a number of the range
    if the other bound has the same whole part, and no bound that does not fit 64 bits. Raise
    `UnsupportedGrammar` if nothing that it can write is within a bound.
    """
    farthest = _FARTHEST
    if "multipleOf" in parts and parts.get("type") != "integer":
        farthest = _FARTHEST_MULTIPLE
        if exclusive not in parts:
            parts.setdefault(bound, math.copysign(farthest, -inwards))
    for name in (bound, exclusive):
        value: Any = parts.get(name)
        if type(value) not in (int, float):
            continue
        if (-value if inwards > 0 else value) > farthest:
            parts[name] = value = -farthest if inwards > 0 else farthest
        elif abs(value) > 2**63:
            raise UnsupportedGrammar(f"The worker does not support so large a number in '{name}'.")
        if type(value) is int and int(float(value)) != value:
            near = int(float(value))
            if (near < value) == (inwards > 0):
                near = int(math.nextafter(near, inwards))
            parts[name] = near
    edge: Any = parts.get(exclusive)
    whole = type(edge) is int or (isinstance(edge, float) and edge.is_integer())
    if whole and abs(edge) < _EXACT_INT and parts.get("type") != "integer":
        within = edge + math.copysign(max(_STEP, math.ulp(edge)), inwards)
        other = parts.get(bound, within)
        if type(other) in (int, float):  # else llguidance refuses the schema
            parts[bound] = max(within, other) if inwards > 0 else min(within, other)
            del parts[exclusive]


def _is_exact(value: Any) -> bool:
    """Return whether llguidance writes each number of a value as it is."""
    if isinstance(value, Mapping | list):
        return all(map(_is_exact, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    digits = Decimal(repr(value)).normalize(_DIGITS).as_tuple().digits
    return int("".join(map(str, digits))) <= _EXACT_INT


def _hold_names(parts: dict[str, Any], root: Any) -> None:
    """Name the properties that `propertyNames` lists, or replace it by the pattern that it has.

    One that can be neither stays, and the compiler refuses it.
    """
    names = _target(parts.get("propertyNames"), root)
    if _is_anything(names):
        del parts["propertyNames"]
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return
    properties, more = parts.get("properties", {}), parts.get("additionalProperties", True)
    ruled = {*names} - ANNOTATIONS - {"type"}
    if not ruled:
        parts.pop("propertyNames", None)
    elif not isinstance(properties, Mapping) or "patternProperties" in parts:
        return
    elif ruled <= _FORCED and len(ruled) == 1:
        listed = names.get("enum", [names.get("const")])
        if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
            del parts["propertyNames"]
            parts["properties"] = {name: properties.get(name, more) for name in listed}
            parts["additionalProperties"] = False
    elif not properties:
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        pattern = names.get("pattern") if ruled == {"pattern"} else None
        if ruled <= {"minLength", "maxLength"} and type(low) is int and type(high) in (int, str):
            pattern = rf"^[\s\S]{{{low},{high}}}$"
        if isinstance(pattern, str):
            del parts["propertyNames"]
            parts |= {"patternProperties": {pattern: more}, "additionalProperties": False}


def _drop_property_counts(parts: dict[str, Any]) -> None:
    """Leave out bounds on the number of properties that every object of the schema has.

    llguidance holds such a bound only where each property is required.
    """
    names, required = parts.get("properties", {}), parts.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list):
        return  # which the compiler refuses
    least, most = parts.get("minProperties"), parts.get("maxProperties")
    if type(least) is int and 0 <= least <= len({*map(str, required)}):
        del parts["minProperties"]
    closed = parts.get("additionalProperties") is False and "patternProperties" not in parts
    if type(most) is int and closed and len(names) <= most:
        del parts["maxProperties"]


def _as_set(parts: dict[str, Any], root: Any) -> Any:
    """Return the lists that a list of different values may be, if they are few.

    Their values come in the order of the schema.
    """
    unique, low, high = parts.get("uniqueItems"), parts.get("minItems", 0), parts.get("maxItems")
    if unique is False or (unique is True and type(high) is int and high < 2):
        del parts["uniqueItems"]
    if "uniqueItems" not in parts or parts.get("type") != "array" or type(low) is not int:
        return parts
    values = _listed(_target(parts.get("items"), root))
    ruled = {*parts} - ANNOTATIONS - {"$defs", "definitions"}
    if not values or not ruled <= {"type", "uniqueItems", "items", "minItems", "maxItems"}:
        return parts
    most = min(high, len(values)) if type(high) is int else len(values)
    lists = [
        list(chosen)
        for length in range(max(low, 0), most + 1)
        for chosen in combinations(values, length)
    ]
    return {**{name: parts[name] for name in {*parts} - ruled}, "enum": lists}


def _listed(items: Any) -> Sequence[Any]:
    """Return the values of a schema that lists a few texts or whole numbers, else none."""
    if not isinstance(items, Mapping) or not {*items} - ANNOTATIONS <= {"type", "enum"}:
        return ()
    values = items.get("enum")
    if not isinstance(values, list) or len(values) > _SET_LIMIT or not _is_exact(values):
        return ()
    types = {*map(type, values)}
    names = [name for kind, name in ((str, "string"), (int, "integer")) if types == {kind}]
    fits = names and items.get("type", names[0]) == names[0]
    return [*dict.fromkeys(values)] if fits else ()
