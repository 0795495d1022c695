"""Where the fault of a schema is: in the smallest part that is refused for the same reason."""

import re
from collections.abc import Callable, Collection
from typing import Any

_Path = list[str | int]
_QUOTED = re.compile(r"'([^']{1,40})'")
_APART = ("$defs", "definitions", "required")
"""Keywords that refer to other parts, or that these refer to."""
_STEPS = 64
"""More than the levels of a schema."""


def fault_path(
    schema: Any, reason: str, reason_of: Callable[[Any], str], root_levels: int = 0
) -> _Path:
    """Return the keys and indexes of the part at fault; a keyword that the reason quotes is last.

    `reason_of` returns why a schema is refused, or nothing. References begin below `root_levels`.
    """
    path, shown = _Path(), _Path()

    def fails(keys: Collection[Any]) -> bool:
        return reason_of(_replaced(schema, path, _only(node, keys))) == reason

    for _ in range(_STEPS):  # references may run in a circle
        node = _at(schema, path)
        keys = () if fails(()) else (key for key in _keys(node) if fails((key,)))
        if (key := next(iter(keys), None)) is not None:
            schema = _replaced(schema, path, _only(node, (key,)))
            path, shown = [*path, key if isinstance(node, dict) else 0], [*shown, key]
            continue
        reference = node.get("$ref") if isinstance(node, dict) else None
        names = reference.split("/")[1:] if isinstance(reference, str) else []
        names = [name.replace("~1", "/").replace("~0", "~") for name in names]
        if not names or not isinstance(_at(schema, [*path[:root_levels], *names]), dict):
            break
        path = shown = [*path[:root_levels], *names]
    for name in _QUOTED.findall(reason):
        if name in node:
            return [*shown, name]
        if name in shown:
            return shown[: len(shown) - shown[::-1].index(name)]
    return shown


def _keys(node: Any) -> list[Any]:
    """Return the keys or the indexes of the parts of a schema that may each be at fault."""
    keys = range(len(node)) if isinstance(node, list) else node
    return [key for key in keys if key not in _APART and isinstance(node[key], dict | list)]


def _only(node: Any, keys: Collection[Any]) -> Any:
    """Return a schema with only these parts; those of a list close up."""
    if isinstance(node, list):
        return [node[key] for key in keys]
    left_out = {*_keys(node), "required"}.difference(keys)
    return {key: value for key, value in node.items() if key not in left_out}


def _at(schema: Any, path: _Path) -> Any:
    for key in path:
        try:
            schema = schema[key]
        except (LookupError, TypeError):
            return None
    return schema


def _replaced(schema: Any, path: _Path, part: Any) -> Any:
    if not path:
        return part
    copy: Any = [*schema] if isinstance(schema, list) else {**schema}
    copy[path[0]] = _replaced(schema[path[0]], path[1:], part)
    return copy
