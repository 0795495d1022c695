"""Tables in Markdown, and targets beside what was reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One promise: a ratio or a difference, and the bound it has to keep."""

    promise: str
    reached: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Say whether the promise was kept in this run."""
        return self.reached >= self.bound if self.at_least else self.reached <= self.bound


MISSING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as text; the first column is a label."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def drawn(self) -> Table:
        """Return it for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return it for a page."""
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{table}\n"


def targets(judged: Sequence[Target]) -> Grid:
    """Show every promise beside what was reached."""
    return Grid(
        title="Targets",
        columns=("", "reached", "wanted", "met"),
        rows=tuple(
            (
                target.promise,
                f"{target.reached:.2f}",
                f"{'>=' if target.at_least else '<='} {target.bound:.2f}",
                "yes" if target.met else "NO",
            )
            for target in judged
        ),
    )
