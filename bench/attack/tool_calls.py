"""Tool calls through the chat templates of published models, and back.

`python -m bench.attack.tool_calls` takes the templates of `bench.attack.templates`. Random calls,
of which a careless reader would make others, become an answer by each template, and the worker's
parser reads that text back: whole, in random pieces and letter by letter. Each call must be the
same again.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

from bench.attack.templates import SOURCE, family_of, fetch
from bench.harness.options import parser
from bench.harness.tables import Grid, provenance, report, show
from tests.support.tool_call_text import format_name, round_trips

_CALLS: Final = 300


def main() -> None:
    options = parser("attack.tool_calls", __doc__).parse_args()
    logging.disable(logging.ERROR)
    calls = 20 if options.quick else _CALLS
    rows, failed = [], 0
    for name, template in fetch(options.folder / "templates").items():
        try:
            result = f"{round_trips(name, template, calls):,}"
        except AssertionError as error:
            failed += 1
            result = "another call"
            show(f"{name}: {error!s:.600}")
        rows.append((family_of(name), name, format_name(template) or "none", result))
        show(f"{name}: {result}")
    title = f"About {calls} calls per template, each the same after render and parse"
    grid = Grid(title, ("family", "template", "format", "calls"), sorted(rows))
    about = f"{provenance()}. Templates of {SOURCE}. 0: the template renders no calls of"
    about += " its own, or Transformers cannot render it."
    report("tool_calls.md", "Tool calls", about, grid, write=not options.quick)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
