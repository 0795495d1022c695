"""Tables and targets of a benchmark, for the terminal and as a page of results."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from os import cpu_count
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.harness.samples import Samples

RESULTS: Final = Path(__file__).parents[1] / "results"
MISSING: Final = "-"
_BAR_WIDTH: Final = 20


class Target(NamedTuple):
    """A ratio or a difference, and its bound: the most that is allowed, or the least."""

    name: str
    reached: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.reached >= self.bound if self.at_least else self.reached <= self.bound


class Grid(NamedTuple):
    """A table; the first column is a label."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def to_table(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*map(str, row))
        return table

    def to_markdown(self) -> str:
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows]
        table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        return f"### {self.title}\n\n{table}\n"


def targets(results: Iterable[Target]) -> Grid:
    rows = [
        (
            one.name,
            f"{one.reached:.2f}",
            f"{'>=' if one.at_least else '<='} {one.bound:.2f}",
            "yes" if one.met else "NO",
        )
        for one in results
    ]
    return Grid("Targets", ("", "reached", "target", "met"), rows)


def cell(value: float | None, scale: float = 1, form: str = ".0f") -> str:
    """Return a figure that may be missing."""
    return MISSING if value is None else format(value * scale, form)


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def bar(value: float, maximum: float) -> str:
    return "█" * round(_BAR_WIDTH * value / maximum)


def failures(all_samples: Mapping[str, Samples]) -> list[str]:
    """List the metrics that could not be measured, with the reason."""
    return [
        f"- {name}, {metric}: {reason}"
        for name, samples in all_samples.items()
        for metric, reason in samples.failures.items()
    ]


def provenance() -> str:
    """Return when and where a benchmark ran."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    machine = f"{platform.system()} {platform.machine()}, {cpu_count()} cores"
    return f"{now}, {machine}, Python {platform.python_version()}"


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def show(*parts: str | Grid) -> None:
    for part in parts:
        console().print(part if isinstance(part, str) else part.to_table(), markup=False)


def report(name: str, title: str, about: str, *parts: str | Grid, write: bool = True) -> None:
    """Print tables and texts, and write them to a page of results behind when and how it ran."""
    show(*parts)
    if write:
        write_page(name, title, about, *parts)


def write_page(name: str, title: str, *parts: str | Grid) -> None:
    texts = [part if isinstance(part, str) else part.to_markdown() for part in parts]
    (RESULTS / name).write_text("\n\n".join([f"# {title}", *texts]).rstrip() + "\n")
