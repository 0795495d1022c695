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
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.attack.templates import fetch, fetch_further
from bench.families.chat import ChatChecks, check_chat
from bench.families.checkpoints import FORMATS, Format, write_checkpoint
from bench.families.checks import Checks, check_checkpoint
from bench.families.configs import FAMILIES, Family
from bench.families.heads import HEADED, write_head
from bench.harness.blas import restart_with_fast_blas
from bench.harness.options import CACHE
from bench.harness.tables import Grid, provenance, show

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN: Final = "<!-- families: written by `python -m bench.families` -->"
END: Final = "<!-- end of families -->"
_COLUMNS: Final = (
    *("family", "configuration", "loads in", "batches", "compiled", "window", "lookup", "head"),
    *("next turn cached", "exact", "ties", "equals mlx-lm", "tools", "reasoning"),
)
_CHAT_COLUMNS: Final = 2
"""The last ones."""
_SHORT: Final[dict[str, Any]] = {"prompt_lengths": (24, 40), "answer_tokens": 6}
"""Of quantised formats, whose products are slow on a CPU."""
_COMPILED: Final = {
    (True, True): "yes",
    (True, False): "steps without drafts",
    (False, True): "verifies",
    (False, False): "no",
}
"""By whether passes of one token and of several are."""
_WINDOW_TOKENS: Final = 48
"""Of the further case in which rows go round their rings many times."""

Row = tuple[str, ...]
Found = Checks | str
"""The checks of a checkpoint, or why there are none."""


class Result(NamedTuple):
    """The checks of one family: by format, and in bfloat16 with a small window and with a head.

    `chat` are those of its chat template; None if there is none to check.
    """

    family: Family
    by_format: dict[str, Found]
    small_window: Found | None
    head: Found | None
    chat: ChatChecks | None

    @property
    def problems(self) -> list[str]:
        cases = {**self.by_format, "small window": self.small_window, "MTP head": self.head}
        found = [f"{self.family.name}: {one}" for one in self.chat.problems] if self.chat else []
        for name, checks in cases.items():
            problems = [checks] if isinstance(checks, str) else checks.problems if checks else []
            found += [f"{self.family.name}, {name}: {problem}" for problem in problems]
        return found

    def row(self) -> Row:
        """Return the row of the family, by bfloat16 unless other formats were asked for."""
        name, source = self.family.name, self.family.source
        checks = next(iter(self.by_format.values()))
        if isinstance(checks, str):
            return (name, source, "no", *["-"] * (len(_COLUMNS) - 3))
        formats = [form for form, one in self.by_format.items() if isinstance(one, Checks)]
        looked_up = checks.drafted - checks.drafted_by_head
        found = checks.accepted - checks.accepted_by_head
        head = self.head if isinstance(self.head, Checks) else checks
        small = self.small_window
        window = f"{checks.window_tokens:,}" if checks.window_tokens else "none"
        if checks.window_tokens and isinstance(small, Checks):
            window += f", {small.window_tokens}"
        return (
            *(name, f"`{source}`", ", ".join(formats)),
            *("yes" if checks.batches else "row by row", _COMPILED[checks.compiles], window),
            f"{found} of {looked_up}" if looked_up else "none",
            f"{head.accepted_by_head} of {head.drafted_by_head}" if head.mtp else "none",
            f"{checks.cached_tokens / checks.prompt_tokens:.0%}",
            "NO" if self.problems else "yes",
            f"{checks.ties} of {checks.tokens}",
            "yes" if checks.compared_with_mlx_lm else "not there",
            *_chat_cells(self.chat),
        )


def check_family(family: Family, templates: Mapping[str, str], formats: Sequence[Format]) -> Result:
    """Check a family in each format, and the chat template that it has among these."""
    by_format = {one.name: _check(family, one) for one in formats}
    small = _check(family, formats[0], window_tokens=_WINDOW_TOKENS) if family.window else None
    head = _check(family, formats[0], head=True) if family.name in HEADED else None
    return Result(family, by_format, small, head, _chat_of(family, templates))


def _chat_of(family: Family, templates: Mapping[str, str]) -> ChatChecks | None:
    if not family.template:
        return None
    return check_chat(family.template, templates[family.template])


def _check(
    family: Family, weights: Format, window_tokens: int | None = None, *, head: bool = False
) -> Found:
    with tempfile.TemporaryDirectory(prefix="paceline-family-") as name:
        folder = Path(name) / "model"
        try:
            write_checkpoint(folder, family, weights, window_tokens=window_tokens)
            options = _SHORT if weights.quantization else {"compiled": True}
            mtp = Path(name) / "head" if head else None
            if mtp is not None:
                write_head(mtp, family)
            return check_checkpoint(folder, mlx_lm=family.mlx_lm, mtp=mtp, **options)
        except Exception as error:  # noqa: BLE001 - the table says what a family raises
            return f"{type(error).__name__}: {str(error)[:200]}"


def _chat_cells(chat: ChatChecks | None) -> Row:
    if chat is None:
        return ("no template",) * _CHAT_COLUMNS
    return tuple(cell.replace("|", "\\|") for cell in (chat.tools, chat.reasoning))


def write_table(header: str, new: Mapping[str, Row]) -> None:
    """Write rows into the table of the page; families that are not among them keep theirs."""
    page = PAGE.read_text()
    rows = {**_written()[1], **new}
    known = [rows[family.name] for family in FAMILIES if family.name in rows]
    table_text = Grid("Families", _COLUMNS, known).to_markdown().strip()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{header}\n\n{table_text}\n\n{END}{after}")


def _written() -> tuple[str, dict[str, Row]]:
    """Return the line above the table of the page, and its rows by family."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = []
    for line in lines[1:]:
        if line.startswith("|"):  # a backslash precedes each bar of a text
            cells = re.split(r"(?<!\\)\|", line.strip().strip("| "))
            rows.append(tuple(cell.strip() for cell in cells))
    return lines[0], {row[0]: row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    names, formats_known = [one.name for one in FAMILIES], [one.name for one in FORMATS]
    only: dict[str, Any] = {"action": "append", "help": "repeatable"}
    parser.add_argument("--family", choices=names, metavar="NAME", **only)
    parser.add_argument("--format", choices=formats_known, **only)
    parser.add_argument("--chat", action="store_true", help="check the chat templates alone")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    families = [one for one in FAMILIES if not options.family or one.name in options.family]
    formats = [one for one in FORMATS if not options.format or one.name in options.format]
    templates = {**fetch(CACHE / "templates"), **fetch_further(CACHE / "templates")}
    problems: list[str] = []
    if options.chat:
        header, rows = _written()
        for one in families:
            chat = _chat_of(one, templates)
            problems += chat.problems if chat else []
            if one.name in rows:
                kept = rows[one.name][: len(_COLUMNS) - _CHAT_COLUMNS]
                rows[one.name] = (*kept, *_chat_cells(chat))
        write_table(header, rows)
    else:
        results = []
        for one in families:
            results.append(check_family(one, templates, formats))
            problems += results[-1].problems
            sys.stderr.write(f"{one.name}: {results[-1].problems or 'as expected'}\n")
        rows = {result.family.name: result.row() for result in results}
        show(Grid("Families", _COLUMNS, [*rows.values()]))
        if not options.format:
            header = (
                f"{provenance()}. A CPU computes in float32, so this shows what is computed, and "
                "not how a GPU rounds it."
            )
            write_table(header, rows)
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    restart_with_fast_blas("bench.families")
    sys.exit(main())
