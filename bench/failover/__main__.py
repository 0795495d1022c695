"""Streams that go on at another worker: workers killed, asleep and cut off.

`python -m bench.failover` kills real workers with the demo model while they stream, cuts their
connections at chosen bytes by a proxy, stops their processes as sleep does, and cuts their links in
a network namespace (as root on Linux). Each stream must equal the one without a failure: its texts,
ids, usage and draft counts. It also measures the first token after a kill, beside that of the
survivor itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from bench.failover import failures
from bench.failover.failures import Advance, Seen
from bench.failover.streams import Comparison
from bench.harness.blas import restart_with_fast_blas
from bench.harness.options import parser
from bench.harness.tables import MISSING, RESULTS, Grid, provenance, show, write_page

_KEPT: Final = RESULTS / "failover.json"
"""The last result of each part, since the parts may run at different times."""


@dataclass(slots=True)
class Part:
    """The results of one part: rows of a name, a number, its target and whether it is met."""

    measured: str = ""
    rows: list[tuple[str, str, str, bool | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, name: str, reached: str, target: str = MISSING, *, met: bool | None = None
    ) -> None:
        self.rows.append((name, reached, target, met))

    def at_most(self, name: str, reached: float, bound: float, form: str) -> None:
        self.add(name, form.format(reached), f"<= {bound:g}", met=reached <= bound)

    def compared(self, name: str, compared: Comparison) -> None:
        reached = f"{compared.equal} of {compared.streams}"
        self.add(f"{name}: streams equal", reached, "all", met=not compared.unlike)
        self.notes += compared.unlike


async def _kills(size: int, home: Path, advance: Advance) -> Part:
    part = Part()
    seen = await failures.kill_workers(size, home, advance)
    part.compared("workers killed in a stream", seen.compared)
    if seen.gaps_s:
        pairs = [*zip(seen.gaps_s, seen.ttfts_s, strict=True)]
        over_s = [gap_s - 1.2 * ttft_s for gap_s, ttft_s in pairs]
        gap_s, ratio = median(seen.gaps_s), median(gap / ttft for gap, ttft in pairs)
        part.add("from the end of its connections to the next text, median", f"{gap_s:.3f} s")
        part.add("the same, worst", f"{max(seen.gaps_s):.3f} s")
        name = "the same beside the survivor's TTFT for that prefix, median ratio"
        part.add(name, f"{ratio:.2f}")
        part.at_most("the same less 1.2 x that TTFT, median", median(over_s), 0.2, "{:.3f} s")
        within = sum(one <= 0.2 for one in over_s)
        part.add("kills with at most 1.2 x that TTFT + 0.2 s", f"{within} of {len(over_s)}")
    if seen.line_bytes:
        part.at_most("bytes kept of a token", max(seen.line_bytes), 16, "{:.1f}")
    return part


async def _cuts(size: int, home: Path, advance: Advance) -> Part:
    part = Part()
    seen = await failures.cut_streams(size, home, advance)
    part.compared("connections cut at a chosen byte", seen.compared)
    part.add("of these, cut before their end", str(seen.reached))
    return part


async def _silence(
    name: str,
    fail: Callable[[int, Path, Advance], Coroutine[Any, Any, Seen]],
    size: int,
    home: Path,
    advance: Advance,
) -> Part:
    if fail is failures.cut_links and not failures.can_cut_links():
        return Part(notes=["links were not cut: that needs root on Linux"])
    part = Part()
    seen = await fail(size, home, advance)
    part.compared(name, seen.compared)
    if seen.gaps_s:
        part.add(f"{name}: to the next text, median", f"{median(seen.gaps_s):.1f} s")
        part.at_most(f"{name}: worst", max(seen.gaps_s), 10, "{:.1f} s")
    if seen.backs_s:
        title = f"{name}: back until used again, worst"
        part.at_most(title, max(seen.backs_s), 10, "{:.1f} s")
    return part


Measure = Callable[[int, Path, Advance], Coroutine[Any, Any, Part]]
_ASLEEP: Final = partial(_silence, "workers asleep (SIGSTOP)", failures.sleeping_workers)
_CUT_OFF: Final = partial(_silence, "links cut (network namespace)", failures.cut_links)
PARTS: Final[Mapping[str, tuple[str, int, int, Measure]]] = {
    "kills": ("kills", 100, 2, _kills),
    "cuts": ("cuts", 900, 4, _cuts),
    "sleeps": ("silences", 3, 1, _ASLEEP),
    "links": ("silences", 3, 1, _CUT_OFF),
}
"""The option of the size of each part, the size in a whole and in a quick run, and the part."""


def grid_of(parts: Mapping[str, Part]) -> Grid:
    words = {True: "yes", False: "NO", None: ""}
    rows = [(*row[:3], words[row[3]]) for part in parts.values() for row in part.rows]
    return Grid("Streams that go on", ("", "reached", "target", "met"), rows)


def _write(name: str, part: Part) -> None:
    """Keep the result of a part, and write the page of all."""
    kept = json.loads(_KEPT.read_text()) if _KEPT.exists() else {}
    kept[name] = asdict(part)
    parts = {one: Part(**kept[one]) for one in PARTS if one in kept}
    _KEPT.write_text(json.dumps({one: kept[one] for one in parts}, indent=1) + "\n")
    about = "Demo checkpoint in float32, by `python -m bench.failover`:\n\n"
    about += "\n".join(f"- {one}: {found.measured}" for one, found in parts.items())
    notes = [f"- {one}: {note}" for one, found in parts.items() for note in found.notes]
    write_page("failover.md", "Failover", about, grid_of(parts), "\n".join(notes))


def main() -> int:
    made = parser("failover", __doc__)
    for name, size, _, _ in PARTS.values():
        if name != "silences":
            made.add_argument(f"--{name}", type=int, default=size, metavar="N")
    made.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    options = made.parse_args()
    chosen = options.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        made.error(f"unknown: {', '.join(sorted(unknown))}")
    parts: dict[str, Part] = {}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name in chosen:
            option, whole, quick, measure = PARTS[name]
            size = quick if options.quick else getattr(options, option, whole)
            task = progress.add_task(name, total=size)
            with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home:
                advance = partial(progress.advance, task)
                parts[name] = asyncio.run(measure(size, Path(home), advance))
            parts[name].measured = provenance()
            if not options.quick:
                _write(name, parts[name])
    show(grid_of(parts), *(note for part in parts.values() for note in part.notes))
    return any(row[3] is False for part in parts.values() for row in part.rows)


if __name__ == "__main__":
    restart_with_fast_blas("bench.failover")
    sys.exit(main())
