"""Tools as mlx-vlm's parsers can read them: one plain type for an argument, or none.

These parsers know a type by a single name. A list of names, which is how OpenAI's strict tools say
that an argument may be null, is evaluated as Python; some give null for all that may be null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workers.server.ports import Json

# How the names begin that these parsers know; a value of any other type they evaluate as Python.
_KNOWN_TYPES = (
    *("str", "text", "varchar", "char", "enum", "bool", "binary", "num", "float"),
    *("int", "uint", "long", "short", "unsigned", "obj", "dict", "arr", "list"),
)

# More than anybody writes; a chain as long as the body allows would end the recursion.
_REFERENCES_FOLLOWED = 16


def plain_tools(tools: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """Return copies of the tools in which no argument has several types, or an unknown one."""
    return [_plain_tool(tool) for tool in tools]


def _plain_tool(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return tool
    plain = {name: _plain_schema(schema, parameters) for name, schema in properties.items()}
    parameters = {**parameters, "properties": plain}
    return {**tool, "function": {**function, "parameters": parameters}}


def _plain_schema(schema: Json, root: Mapping[str, Json], followed: int = 0) -> Json:
    """Leave null out, and let what remains alone, or is referred to, stand for the whole.

    Every parser reads `null` as null anyway, and what has no type as JSON or else as text.
    """
    if not isinstance(schema, Mapping):
        return schema
    plain = dict(schema)
    reference = str(plain.pop("$ref", ""))
    if followed < _REFERENCES_FOLLOWED and isinstance(meant := _meant(reference, root), Mapping):
        return _plain_schema({**meant, **plain}, root, followed + 1)
    if isinstance(plain.get("enum"), list):
        plain["enum"] = [value for value in plain["enum"] if value is not None]
    if isinstance(plain.get("type"), list):
        plain["anyOf"] = [{"type": kind} for kind in plain.pop("type")]
    for several in ("anyOf", "oneOf"):
        if isinstance(plain.get(several), list):
            choices = [choice for choice in plain.pop(several) if not _is_null(choice)]
            if len(choices) == 1 and isinstance(choices[0], Mapping):
                return _plain_schema({**plain, **choices[0]}, root, followed)
            plain[several] = choices
    if not str(plain.get("type")).strip().lower().startswith(_KNOWN_TYPES):
        plain.pop("type", None)
    return plain


def _meant(reference: str, root: Mapping[str, Json]) -> Json:
    """Find what a reference into the same schema means; None for any other."""
    found: Json = root if reference.startswith("#/") else None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_null(schema: Json) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"
