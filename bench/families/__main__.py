"""Check every model family in every format, and write the table in `docs/models.md`.

`python -m bench.families` makes a tiny random checkpoint of each family with its published
configuration, in bfloat16, 4 bits with two group sizes, 8 bits and mxfp4, and prints what each
does. It also renders and reads tool calls and reasoning by the family's published chat template
(`bench.attack.templates` has the collections, which are downloaded once). With `--family` it checks
some of them and leaves the rows of the others; with `--chat` it checks the chat templates alone and
leaves the other columns; with `--format` it writes nothing.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.attack.templates import fetch, fetch_further
from bench.families.chat import ChatChecks, check_chat
from bench.families.checkpoints import FORMATS, Format, write_checkpoint
from bench.families.checks import Checks, check_checkpoint
from bench.families.configs import FAMILIES, Family
from bench.families.heads import HEADED, write_head
from bench.gateway.contenders import CACHE
from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN: Final = "<!-- families: written by `python -m bench.families` -->"
END: Final = "<!-- end of families -->"
COLUMNS: Final = (
    "family",
    "configuration",
    "loads in",
    "batches",
    "window",
    "drafts accepted",
    "next turn cached",
    "exact",
    "equals mlx-lm",
    "tools",
    "reasoning",
)
_CHAT_COLUMNS: Final = 2
"""The last ones."""
_SHORT: Final[dict[str, Any]] = {"prompt_lengths": (24, 40), "answer_tokens": 6}
"""Of quantised formats, whose products are slow on a CPU."""
_WINDOW_TOKENS: Final = 48
"""Of the further case in which rows go round their rings many times."""


@dataclass(frozen=True, slots=True)
class Result:
    """The checks of one family: by format, and in bfloat16 with a small window and with a head.

    `chat` are those of its chat template; None if there is none to check.
    """

    family: Family
    by_format: dict[str, Checks | str]
    small_window: Checks | str | None
    head: Checks | str | None
    chat: ChatChecks | None

    @property
    def first(self) -> Checks | str:
        """Return the result in the first of the formats: bfloat16, unless others were asked for."""
        return next(iter(self.by_format.values()))

    @property
    def problems(self) -> list[str]:
        """Return what went wrong, with its format."""
        cases = {**self.by_format, "small window": self.small_window, "MTP head": self.head}
        found = [f"{self.family.name}: {one}" for one in self.chat.problems] if self.chat else []
        for name, checks in cases.items():
            problems = [checks] if isinstance(checks, str) else checks.problems if checks else []
            found += [f"{self.family.name}, {name}: {problem}" for problem in problems]
        return found


def check_family(
    family: Family, templates: Mapping[str, str], formats: Sequence[Format] = FORMATS
) -> Result:
    """Check a family in each format, and the chat template that it has among these."""
    by_format = {one.name: _check(family, one) for one in formats}
    small = _check(family, formats[0], window_tokens=_WINDOW_TOKENS) if family.window else None
    head = _check(family, formats[0], head=True) if family.name in HEADED else None
    return Result(family, by_format, small, head, _chat_of(family, templates))


def _chat_of(family: Family, templates: Mapping[str, str]) -> ChatChecks | None:
    template = templates[family.template] if family.template else None
    return None if template is None else check_chat(family.template, template)


def _check(
    family: Family, weights: Format, window_tokens: int | None = None, *, head: bool = False
) -> Checks | str:
    """Return the checks of a checkpoint, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="paceline-family-") as name:
        folder = Path(name) / "model"
        try:
            write_checkpoint(folder, family, weights, window_tokens=window_tokens)
            sizes = _SHORT if weights.quantization else {}
            mtp = Path(name) / "head" if head else None
            if mtp is not None:
                write_head(mtp, family)
            compiled = weights.quantization is None
            return check_checkpoint(
                folder, mlx_lm=family.mlx_lm, mtp=mtp, compiled=compiled, **sizes
            )
        except Exception as error:  # noqa: BLE001 - the table says what a family raises
            return f"{type(error).__name__}: {str(error)[:200]}"


def table(results: Sequence[Result]) -> Grid:
    """Return the table of families."""
    rows = []
    for result in results:
        checks = result.first
        if isinstance(checks, str):
            rows.append((result.family.name, result.family.source, "no", *["-"] * 8))
            continue
        exact = not result.problems
        rows.append(
            (
                result.family.name,
                f"`{result.family.source}`",
                ", ".join(
                    name for name, one in result.by_format.items() if isinstance(one, Checks)
                ),
                "yes" if checks.batches else "row by row",
                _window(result, checks),
                f"{checks.accepted} of {checks.drafted}" if checks.drafted else "none",
                f"{checks.cached_tokens / checks.prompt_tokens:.0%}",
                "yes" if exact else "NO",
                "yes" if checks.compared_with_mlx_lm else "not there",
                *_chat_cells(result.chat),
            )
        )
    return Grid(
        title="Families",
        columns=COLUMNS,
        rows=tuple(rows),
    )


def _window(result: Result, checks: Checks) -> str:
    if not checks.window_tokens:
        return "none"
    small = result.small_window
    return f"{checks.window_tokens:,}" + (
        f", {small.window_tokens}" if isinstance(small, Checks) else ""
    )


def _chat_cells(chat: ChatChecks | None) -> tuple[str, ...]:
    if chat is None:
        return ("no template",) * _CHAT_COLUMNS
    return tuple(cell.replace("|", "\\|") for cell in (chat.tools, chat.reasoning))


def write_chats(page: Path, chats: Mapping[str, ChatChecks | None]) -> None:
    """Write the columns of chat templates into the table of the page, by family."""
    header, rows = _written(page)
    first = len(COLUMNS) - _CHAT_COLUMNS
    known = {name: chat for name, chat in chats.items() if name in rows}
    replaced = [(*rows[name][:first], *_chat_cells(chat)) for name, chat in known.items()]
    write_table(page, header, Grid(title="Families", columns=COLUMNS, rows=tuple(replaced)))


def write_table(page: Path, header: str, grid: Grid) -> None:
    """Write the rows of a grid into the table of the page; families that it lacks keep theirs."""
    before, after = page.read_text().split(BEGIN)[0], page.read_text().split(END)[1]
    rows = _written(page)[1] | {row[0]: row for row in grid.rows}
    known = tuple(rows[family.name] for family in FAMILIES if family.name in rows)
    table_text = replace(grid, rows=known).to_markdown().strip()
    page.write_text(f"{before}{BEGIN}\n\n{header}\n\n{table_text}\n\n{END}{after}")


def _written(page: Path) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the line above the table of the page, and its rows by family."""
    lines = page.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [_cells(line) for line in lines if line.startswith("|")]
    return lines[0], {row[0]: row for row in rows}


def _cells(line: str) -> tuple[str, ...]:
    """Return the cells of a row, in which a backslash precedes each bar of a text."""
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("| ")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the families; return 1 if any answer is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument(
        "--family",
        action="append",
        choices=[one.name for one in FAMILIES],
        metavar="NAME",
        help="check this family alone; repeatable",
    )
    names = [one.name for one in FORMATS]
    parser.add_argument(
        "--format", action="append", choices=names, help="check this format alone; repeatable"
    )
    parser.add_argument("--chat", action="store_true", help="check the chat templates alone")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    families = [one for one in FAMILIES if not options.family or one.name in options.family]
    formats = [one for one in FORMATS if not options.format or one.name in options.format]
    templates = {**fetch(CACHE / "templates"), **fetch_further(CACHE / "templates")}
    if options.chat:
        chats = {one.name: _chat_of(one, templates) for one in families}
        write_chats(PAGE, chats)
        return _report([problem for chat in chats.values() if chat for problem in chat.problems])
    results = []
    for one in families:
        results.append(check_family(one, templates, formats))
        sys.stderr.write(f"{one.name}: {results[-1].problems or 'as expected'}\n")
    grid = table(results)
    Console(highlight=False, width=180).print(grid.to_table())
    if not options.format:
        header = (
            f"{provenance()}. A CPU computes in float32, so this shows what is computed, and not "
            "how a GPU rounds it."
        )
        write_table(PAGE, header, grid)
    return _report([problem for result in results for problem in result.problems])


def _report(problems: Sequence[str]) -> int:
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    restart_with_fast_blas("bench.families")
    sys.exit(main())
