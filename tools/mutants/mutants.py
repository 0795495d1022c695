"""Draw mutants from a session of cosmic-ray, without those that cannot change the program."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec

from tools.mutants.config import Skip

Position = tuple[int, int]
"""A line, counted from one, and a column, counted in characters from zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A changed module."""

    module: str
    operator: str
    occurrence: int
    at: Position
    line: str
    becomes: str
    source: str
    mutated: str

    @property
    def key(self) -> str:
        """Return an id of the mutant that is stable while its module is unchanged."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:16]
        return f"{self.module}:{digest}:{self.operator}:{self.occurrence}"

    @property
    def diff(self) -> str:
        """Return the changed lines as a diff."""
        before, after = self.source.splitlines(), self.mutated.splitlines()
        changes = difflib.unified_diff(before, after, lineterm="", n=0)
        return "\n".join(one for one in list(changes)[2:] if not one.startswith("@@"))


def find_targets(root: Path, globs: Sequence[str]) -> list[str]:
    """Return the modules to mutate; raise ValueError for a glob without matches."""
    found = set()
    for glob in globs:
        modules = [path for path in root.glob(glob) if path.suffix == ".py" and path.is_file()]
        if not modules:
            raise ValueError(f"no module matches the target {glob!r}")
        found |= {path.relative_to(root).as_posix() for path in modules}
    return sorted(found)


def all_mutations(root: Path, modules: Sequence[str], state: Path) -> list[MutationSpec]:
    """Return every mutation of cosmic-ray for some modules, from a cached session."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(module.encode() + b"\0" + (root / module).read_bytes() + b"\0")
    session = state / f"session-{digest.hexdigest()[:16]}.sqlite"
    if not session.exists():
        for old in state.glob("session-*.sqlite"):
            old.unlink()
        unfinished = session.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        with contextlib.chdir(root), use_db(str(unfinished)) as database:
            init([Path(module) for module in modules], database, {})
        unfinished.rename(session)
    with use_db(str(session)) as database:
        return [mutation for item in database.work_items for mutation in item.mutations]


def draw(
    root: Path, mutations: Sequence[MutationSpec], skip: Skip, *, count: int, seed: int
) -> list[Mutant]:
    """Draw random mutants; a larger count with the same seed begins with the same ones."""
    order = sorted(
        mutations, key=lambda one: (str(one.module_path), one.operator_name, one.occurrence)
    )
    random.Random(seed).shuffle(order)
    drawn: list[Mutant] = []
    sources: dict[str, str] = {}
    spared: dict[str, Spared] = {}
    for mutation in order:
        if len(drawn) == count:
            break
        module = mutation.module_path.as_posix()
        if module not in sources:
            sources[module] = (root / module).read_text()
            spared[module] = Spared(sources[module], skip)
        if not spared[module].covers(mutation.start_pos):
            mutant = make(mutation, module, sources[module])
            if mutant is not None:
                drawn.append(mutant)
    return drawn


def make(mutation: MutationSpec, module: str, source: str) -> Mutant | None:
    """Apply a mutation; return None if the result is invalid or the same program."""
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    mutated = mutate_code(source, operator, mutation.occurrence)
    if mutated is None or not _differs(source, mutated):
        return None
    at = mutation.start_pos
    return Mutant(
        module=module,
        operator=mutation.operator_name.removeprefix("core/"),
        occurrence=mutation.occurrence,
        at=at,
        line=source.splitlines()[at[0] - 1].strip(),
        becomes=_becomes(source, mutated),
        source=source,
        mutated=mutated,
    )


def _differs(source: str, mutated: str) -> bool:
    try:
        with warnings.catch_warnings():
            # pytest turns warnings into errors: `is` with a literal would fail at import.
            warnings.simplefilter("error", SyntaxWarning)
            compile(mutated, "mutant", "exec")
    except SyntaxError:
        return False
    return _dump(source) != ast.dump(ast.parse(mutated))


@lru_cache(maxsize=256)
def _dump(source: str) -> str:
    return ast.dump(ast.parse(source))


def _becomes(source: str, mutated: str) -> str:
    """Return the first new line, or an empty string if lines were only removed."""
    before, after = source.splitlines(), mutated.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, _, _, start, end in matcher.get_opcodes():
        new = [line.strip() for line in after[start:end] if kind != "equal" and line.strip()]
        if new:
            return new[0]
    return ""


class Spared:
    """The parts of a module in which a change has no effect."""

    def __init__(self, source: str, skip: Skip) -> None:
        self._lines = source.splitlines()
        self._skip = skip
        self._spans: list[tuple[Position, Position]] = []
        self._kept: list[tuple[Position, Position]] = []
        """Parts within those that do matter."""
        for node in ast.walk(ast.parse(source)):
            self._add(node)

    def covers(self, at: Position) -> bool:
        """Return whether a mutation at a position is excluded."""
        return _within(self._spans, at) and not _within(self._kept, at)

    def _add(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._spare_signature(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                if _name(decorator) in self._skip.decorators:
                    line = decorator.lineno
                    self._spans.append(((line, 0), (line + 1, 0)))
        elif isinstance(node, ast.AnnAssign):
            self._spare_annotation(node.annotation)
        elif isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            self._spans.append(((node.lineno, 0), self._end(node.body[-1])))
        elif isinstance(node, ast.Call):
            self._spare_arguments(node)

    def _spare_signature(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if any(_name(one) == "overload" for one in node.decorator_list):
            self._spans.append((self._start(node), self._end(node)))
            return
        self._spans.append((self._start(node), self._start(node.body[0])))
        arguments = node.args
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self._keep(default)
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        for argument in (*every, arguments.vararg, arguments.kwarg):
            if argument is not None and argument.annotation is not None:
                self._keep_calls(argument.annotation)

    def _spare_annotation(self, annotation: ast.expr) -> None:
        self._spans.append((self._start(annotation), self._end(annotation)))
        self._keep_calls(annotation)

    def _keep_calls(self, annotation: ast.expr) -> None:
        for node in ast.walk(annotation):
            if isinstance(node, ast.Call):
                self._keep(node)

    def _keep(self, node: ast.expr) -> None:
        self._kept.append((self._start(node), self._end(node)))

    def _spare_arguments(self, call: ast.Call) -> None:
        function = call.func
        if isinstance(function, ast.Attribute) and _name(function.value) in self._skip.loggers:
            self._spans.append((self._end(function), self._end(call)))
        names = self._skip.keywords.get(_name(function), frozenset())
        for keyword in call.keywords:
            if keyword.arg in names:
                self._spans.append((self._start(keyword.value), self._end(keyword.value)))

    def _start(self, node: ast.stmt | ast.expr) -> Position:
        return node.lineno, self._characters(node.lineno, node.col_offset)

    def _end(self, node: ast.stmt | ast.expr) -> Position:
        line, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return line, self._characters(line, column)

    def _characters(self, line: int, utf8: int) -> int:
        """Return the position in characters, as cosmic-ray counts; `ast` counts bytes."""
        return len(self._lines[line - 1].encode()[:utf8].decode())


def _within(spans: Sequence[tuple[Position, Position]], at: Position) -> bool:
    return any(start <= at < end for start, end in spans)


def _name(node: ast.expr) -> str:
    """Return the last name of an expression: `cast` of `typing.cast(x)`."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
