"""Draw mutants from a session of cosmic-ray, without those that cannot change the program."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import random
import re
import tomllib
import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.tools.filters.operators_filter import OperatorsFilter
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec

_FOLDER = Path(__file__).parent
CONFIG = _FOLDER / "config.toml"
Entry = tuple[str, str, str, str]
"""Module, operator, line before and after: the key of an accepted survivor."""


def load_config() -> dict[str, Any]:
    """Return what is ours of `config.toml`."""
    return dict(tomllib.loads(CONFIG.read_text())["driver"])


def load_accepted(path: Path = _FOLDER / "equivalent.toml") -> dict[Entry, str]:
    """Return the reason of each accepted survivor; each must have one."""
    accepted = {}
    for entry in tomllib.loads(path.read_text()).get("survivor", []):
        if not entry["reason"].strip():
            raise ValueError(f"{path.name}: the entry for {entry['line']!r} has no reason")
        key = entry["module"], entry["operator"], entry["line"], entry["becomes"]
        accepted[key] = entry["reason"]
    return accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A changed module."""

    module: str
    operator: str
    occurrence: int
    at: int
    """The line, counted from one."""
    line: str
    source: str
    mutated: str

    @property
    def key(self) -> str:
        """Return an id of the mutant that is stable while its module is unchanged."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:16]
        return f"{self.module}:{digest}:{self.operator}:{self.occurrence}"

    @property
    def diff(self) -> list[str]:
        """Return the changed lines as a diff."""
        before, after = self.source.splitlines(), self.mutated.splitlines()
        changes = difflib.unified_diff(before, after, lineterm="", n=0)
        return [one for one in list(changes)[2:] if not one.startswith("@@")]

    @property
    def entry(self) -> Entry:
        """Return its key among accepted survivors; the first new line, if there is one."""
        new = [one[1:].strip() for one in self.diff if one.startswith("+") and one[1:].strip()]
        return self.module, self.operator, self.line, new[0] if new else ""


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
    """Return what the filters of cosmic-ray leave of its mutations, from a cached session."""
    digest = hashlib.sha256(CONFIG.read_bytes())
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
            OperatorsFilter().filter(database, Namespace(config=str(CONFIG)))
        unfinished.rename(session)
    with use_db(str(session)) as database:
        return [one for item in database.pending_work_items for one in item.mutations]


def draw(
    root: Path, mutations: Sequence[MutationSpec], skipped: Sequence[str], *, count: int, seed: int
) -> list[Mutant]:
    """Draw random mutants; a larger count with the same seed begins with the same ones."""
    order = sorted(
        mutations, key=lambda one: (str(one.module_path), one.operator_name, one.occurrence)
    )
    random.Random(seed).shuffle(order)
    drawn: list[Mutant] = []
    for mutation in order:
        if len(drawn) == count:
            break
        mutant = make(mutation, (root / mutation.module_path).read_text())
        if mutant is not None and not re.search("|".join(skipped), mutant.line):
            drawn.append(mutant)
    return drawn


def make(mutation: MutationSpec, source: str) -> Mutant | None:
    """Apply a mutation; return None if the result is invalid or the same program."""
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    mutated = mutate_code(source, operator, mutation.occurrence)
    if mutated is None or not _differs(source, mutated):
        return None
    at = mutation.start_pos[0]
    return Mutant(
        module=mutation.module_path.as_posix(),
        operator=mutation.operator_name.removeprefix("core/"),
        occurrence=mutation.occurrence,
        at=at,
        line=source.splitlines()[at - 1].strip(),
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
    return ast.dump(ast.parse(source)) != ast.dump(ast.parse(mutated))
