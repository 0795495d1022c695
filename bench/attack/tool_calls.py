"""Tool calls through the chat templates of published models, and back.

`python -m bench.attack.tool_calls` takes the templates of `bench.attack.templates`. Random calls,
of which a careless reader would make others, become an answer by each template, and the worker's
parser reads that text back: whole, in random pieces and letter by letter. Each call must be the
same again.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.attack.templates import SOURCE, family_of, fetch
from bench.gateway.contenders import gateway_parser
from bench.harness import tables
from tests.support.tool_call_text import format_name, round_trips

RESULTS: Final = Path(__file__).parents[1] / "results" / "tool_calls.md"
_CALLS: Final = 300


def main(arguments: Sequence[str] | None = None) -> None:
    parser = gateway_parser("bench.attack.tool_calls", __doc__)
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    calls = 20 if options.quick else _CALLS
    rows, failed = [], 0
    for name, template in fetch(options.log_dir / "templates").items():
        begun_s = time.monotonic()
        try:
            result = f"{round_trips(name, template, calls):,}"
        except AssertionError as error:
            failed += 1
            result = "another call"
            console.print(f"{name}: {error!s:.600}", markup=False)
        rows.append((family_of(name), name, format_name(template) or "none", result))
        console.print(f"{name}: {result}, {time.monotonic() - begun_s:.0f} s", markup=False)
    grid = tables.Grid(
        title=f"About {calls} calls per template, each the same after render and parse",
        columns=("family", "template", "format", "calls"),
        rows=tuple(sorted(rows)),
    )
    console.print(grid.to_table())
    if not options.quick:
        page = f"{tables.provenance()}. Templates of {SOURCE}. 0: the template renders no calls of"
        page += " its own, or Transformers cannot render it."
        tables.write_page(RESULTS, "Tool calls", page, grid)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
