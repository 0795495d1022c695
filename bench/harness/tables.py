"""Tables in Markdown and for the terminal, and targets with their results."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import cpu_count
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target: a ratio or a difference, and its bound."""

    name: str
    reached: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Return whether this run met the target."""
        return self.reached >= self.bound if self.at_least else self.reached <= self.bound


MISSING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as text; the first column is a label."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_table(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """Return the table for a Markdown page."""
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{table}\n"


def provenance() -> str:
    """Return when and where a benchmark ran."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    machine = f"{platform.system()} {platform.machine()}, {cpu_count()} cores"
    return f"{now}, {machine}, Python {platform.python_version()}"


def write_page(path: Path, title: str, *parts: str | Grid) -> None:
    """Write a page of results: texts and tables."""
    texts = [part if isinstance(part, str) else part.to_markdown() for part in parts]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n\n".join([f"# {title}", *texts]).rstrip() + "\n")


def targets(results: Sequence[Target]) -> Grid:
    """Return a table of targets and results."""
    return Grid(
        title="Targets",
        columns=("", "reached", "target", "met"),
        rows=tuple(
            (
                target.name,
                f"{target.reached:.2f}",
                f"{'>=' if target.at_least else '<='} {target.bound:.2f}",
                "yes" if target.met else "NO",
            )
            for target in results
        ),
    )
