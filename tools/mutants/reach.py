"""The tests of a line; for lines that run at import, the tests that use their definitions."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.mutants.mutants import Position

Symbol = tuple[str, str]
"""A module's file, and a name that is bound at its top level."""
Line = tuple[str, int]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class _Module:
    """The names that a module binds, and its uses of names of other modules."""

    tree: ast.Module
    imported: dict[str, Symbol] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    """Local names of whole modules."""
    bound: set[str] = field(default_factory=set)


class Reach:
    """The tests that a change can affect."""

    def __init__(
        self, root: Path, tests_of: Mapping[Line, Sequence[str]], files: Sequence[str]
    ) -> None:
        self._tests_of = tests_of
        self._modules = {name: _read(root, name) for name in files}
        self._lines: dict[Symbol, set[Line]] = defaultdict(set)
        """Lines of functions that use a symbol."""
        self._bindings: dict[Symbol, set[Symbol]] = defaultdict(set)
        """Symbols whose definitions use a symbol at import."""
        for name in files:
            self._find_uses(name)

    def tests(self, module: str, at: Position) -> set[str]:
        """Return the tests that run a position or use a name that it defines at import."""
        path = _path_to(self._modules[module].tree, at)
        tests = self._running(module, _lines(path[-1])) if path else set()
        function = _enclosing_function(path, at)
        if function is None or not tests:
            tests |= self._using(module, path, at)
        return tests

    def _running(self, module: str, lines: range) -> set[str]:
        return {test for line in lines for test in self._tests_of.get((module, line), ())}

    def _using(self, module: str, path: Sequence[ast.AST], at: Position) -> set[str]:
        """Follow the names of a statement to the lines of functions that use them."""
        for node in reversed(path):
            if isinstance(node, _Function) and not _in_body(node, at):
                # A decorator or a default of one function.
                tests = self._running(module, _body(node))
                if tests:
                    return tests
        if not path:
            return set()
        tests = set()
        if isinstance(path[0], ast.ClassDef | _Function):
            tests = self._running(module, _body(path[0]))
        pending = [(module, name) for name in _bound(path[0])]
        seen = set(pending)
        while pending:
            symbol = pending.pop()
            for file, line in self._lines[symbol]:
                tests |= self._running(file, range(line, line + 1))
            fresh = self._bindings[symbol] - seen
            seen |= fresh
            pending.extend(fresh)
            for file, name in fresh:
                tests |= self._methods(file, name)
        return tests

    def _methods(self, file: str, name: str) -> set[str]:
        for node in self._modules[file].tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._running(file, _body(node))
        return set()

    def _find_uses(self, name: str) -> None:
        module = self._modules[name]
        for statement in module.tree.body:
            bound = _bound(statement)
            for used, line in _uses(statement, inside=False):
                symbol = self._resolve(name, used)
                if symbol is None:
                    continue
                if line is not None:
                    self._lines[symbol].add((name, line))
                else:
                    self._bindings[symbol] |= {(name, one) for one in bound}

    def _resolve(self, file: str, used: Sequence[str]) -> Symbol | None:
        """Return the definition of a name, through packages that re-export it."""
        module = self._modules[file]
        first = used[0]
        symbol: Symbol | None = None
        if first in module.modules:
            symbol = (module.modules[first], used[1]) if len(used) > 1 else None
        elif first in module.imported:
            symbol = module.imported[first]
        elif first in module.bound:
            return file, first
        for _ in range(10):
            if symbol is None or symbol[0] not in self._modules:
                return None
            further = self._modules[symbol[0]].imported.get(symbol[1])
            if further is None:
                return symbol
            symbol = further
        return None


def _read(root: Path, name: str) -> _Module:
    module = _Module(ast.parse((root / name).read_text()))
    for statement in module.tree.body:
        module.bound |= _bound(statement)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            origin = _origin(name, node)
            for alias in node.names:
                local = alias.asname or alias.name
                whole = _file(root, f"{origin}/{alias.name}")
                if whole is not None:
                    module.modules[local] = whole
                elif (file := _file(root, origin)) is not None:
                    module.imported[local] = (file, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                file = _file(root, alias.name.replace(".", "/"))
                if file is not None and alias.asname:
                    module.modules[alias.asname] = file
    return module


def _origin(name: str, node: ast.ImportFrom) -> str:
    origin = (node.module or "").replace(".", "/")
    if not node.level:
        return origin
    folder = Path(name).parents[node.level - 1].as_posix()
    return f"{folder}/{origin}".rstrip("/")


def _file(root: Path, path: str) -> str | None:
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if (root / name).is_file():
            return name
    return None


def _bound(statement: ast.stmt | ast.AST) -> set[str]:
    """Return the names that a top-level statement binds."""
    if isinstance(statement, ast.ClassDef | _Function):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return set()
    stores = (
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    definitions = (
        node.name for node in ast.walk(statement) if isinstance(node, ast.ClassDef | _Function)
    )
    return {*stores, *definitions}


def _uses(node: ast.AST, *, inside: bool) -> Iterator[tuple[list[str], int | None]]:
    """Return the names that a node reads, with their line if a function reads them."""
    if isinstance(node, ast.Name | ast.Attribute):
        dotted = _dotted(node)
        if dotted:
            yield dotted, node.lineno if inside else None
            return
    if isinstance(node, _Function):
        arguments = node.args
        for one in (*node.decorator_list, *arguments.defaults, *arguments.kw_defaults):
            if one is not None:
                yield from _uses(one, inside=inside)
        for statement in node.body:
            yield from _uses(statement, inside=True)
        return
    if isinstance(node, ast.AnnAssign) and inside:
        # Of annotations only those of fields matter: pydantic and dataclasses read them.
        if node.value is not None:
            yield from _uses(node.value, inside=inside)
        return
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, inside=inside)


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return [*before, node.attr] if before else []
    return []


def _path_to(tree: ast.Module, at: Position) -> list[ast.AST]:
    """Return the statements around a position, from the top level to the innermost."""
    path: list[ast.AST] = []
    body: Sequence[ast.AST] = tree.body
    while True:
        holding = next(
            (node for node in body if _first_line(node) <= at[0] <= _last_line(node)), None
        )
        if holding is None:
            return path
        path.append(holding)
        body = [
            node
            for node in ast.iter_child_nodes(holding)
            if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case)
        ]


def _first_line(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return int(node.pattern.lineno)
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min(int(getattr(node, "lineno", 0)), *(one.lineno for one in decorators), sys.maxsize)


def _last_line(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return _last_line(node.body[-1])
    return int(getattr(node, "end_lineno", 0))


def _lines(node: ast.AST) -> range:
    """Return the lines of a statement; of one with a body, those before it."""
    body = getattr(node, "body", None)
    if not body:
        return range(_first_line(node), _last_line(node) + 1)
    return range(_first_line(node), max(_first_line(body[0]), _first_line(node) + 1))


def _enclosing_function(path: Sequence[ast.AST], at: Position) -> ast.AST | None:
    for node in path:
        if isinstance(node, _Function) and _in_body(node, at):
            return node
    return None


def _in_body(node: _Function, at: Position) -> bool:
    first = node.body[0]
    return (first.lineno, 0 if first.lineno != node.lineno else first.col_offset) <= at


def _body(node: ast.ClassDef | _Function) -> range:
    """Return the lines within functions of a definition."""
    if isinstance(node, ast.ClassDef):
        return range(node.lineno, _last_line(node) + 1)
    return range(node.body[0].lineno, _last_line(node) + 1)
