"""The routes that the packages of OpenAI and Anthropic call, read from their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_METHODS = {
    "_get": "GET",
    "_get_api_list": "GET",
    "_post": "POST",
    "_put": "PUT",
    "_patch": "PATCH",
    "_delete": "DELETE",
}


def sdk_routes(package: ModuleType, prefix: str) -> list[tuple[str, str]]:
    """Return the method and the path template of each route, once."""
    folder = Path(str(package.__file__)).parent / "resources"
    calls = (
        node
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    )
    return sorted({(method, prefix + path) for call in calls for method, path in _route_of(call)})


def _route_of(call: ast.Call) -> Iterator[tuple[str, str]]:
    """Yield the route of a call such as `self._get(path_template("/a/{b}", b=b))`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name not in _METHODS or not call.args:
        return
    path = call.args[0]
    if isinstance(path, ast.Call):
        path = path.args[0]
    if isinstance(path, ast.Constant) and isinstance(path.value, str):
        yield _METHODS[name], path.value.partition("?")[0]
