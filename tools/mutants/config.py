"""The tool's settings and the list of accepted survivors."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
STATE = ROOT / ".mutants"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Parts of a module without mutants."""

    decorators: frozenset[str]
    loggers: frozenset[str]
    keywords: Mapping[str, frozenset[str]]
    """Names of keyword arguments by function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of `config.toml`; the command line replaces targets and tests."""

    targets: tuple[str, ...]
    tests: tuple[str, ...]
    measured: tuple[str, ...]
    without_plugins: tuple[str, ...]
    measure_timeout_s: float
    tests_budget_s: float
    timeout_factor: float
    timeout_start_s: float
    timeout_test_s: float
    memory_gib: float
    allowed_survivors: float
    skip: Skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A survivor that changes no behavior."""

    module: str
    operator: str
    line: str
    becomes: str
    reason: str


def load_config(path: Path = FOLDER / "config.toml") -> Config:
    """Read the settings."""
    document: dict[str, Any] = tomllib.loads(path.read_text())
    skip = document.pop("skip")
    keywords = {function: frozenset(names) for function, names in skip["keywords"].items()}
    lists = {name: tuple(value) for name, value in document.items() if isinstance(value, list)}
    return Config(
        **{**document, **lists},
        skip=Skip(
            decorators=frozenset(skip["decorators"]),
            loggers=frozenset(skip["loggers"]),
            keywords=keywords,
        ),
    )


def load_accepted(path: Path = FOLDER / "equivalent.toml") -> tuple[Accepted, ...]:
    """Read the accepted survivors; each must give its reason."""
    entries = tomllib.loads(path.read_text()).get("survivor", [])
    accepted = tuple(Accepted(**entry) for entry in entries)
    for entry in accepted:
        if not entry.reason.strip():
            raise ValueError(f"{path.name}: the entry for {entry.line!r} has no reason")
    return accepted
