"""Streams that go on at another worker: workers killed, asleep and cut off, and the price.

`python -m bench.failover` kills real workers with the demo model while they stream, cuts their
connections at chosen bytes by a proxy, stops their processes as sleep does, cuts their links in a
network namespace (as root on Linux), and kills one of two gateways behind nginx. Each stream must
equal the one without a failure: its texts, ids, usage and draft counts. It also measures the first
token after a kill beside the survivor's own, and what the gateway pays while nobody dies.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from bench.failover.cuts import cut_streams
from bench.failover.gateways import kill_gateways
from bench.failover.kills import kill_workers
from bench.failover.price import measure_price
from bench.failover.silence import Silence, can_cut_links, cut_links, sleeping_workers
from bench.failover.streams import Comparison
from bench.gateway.contenders import gateway_parser
from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import MISSING, Grid, provenance, write_page

RESULTS: Final = Path(__file__).parents[1] / "results" / "failover.md"
KEPT: Final = RESULTS.with_suffix(".json")
"""The last result of each part, since the parts may run at different times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number, and whether it reaches its target."""

    name: str
    reached: str
    target: str = MISSING
    met: bool | None = None


@dataclass(slots=True, kw_only=True)
class Part:
    """The results of one part."""

    measured: str = ""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, name: str, reached: str, target: str = MISSING, *, met: bool | None = None
    ) -> None:
        """Add a row."""
        self.rows.append(Row(name=name, reached=reached, target=target, met=met))

    def compared(self, name: str, compared: Comparison) -> None:
        """Add how many streams were equal."""
        reached = f"{compared.equal} of {compared.streams}"
        self.add(f"{name}: streams equal", reached, "all", met=not compared.unlike)
        self.notes += compared.unlike


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The sizes of a run."""

    log_dir: Path
    kills: int
    cuts: int
    turns: int
    silences: int = 3
    gateways: int = 4


Measure = Callable[[Options, Path, Callable[[], None]], Coroutine[Any, Any, Part]]


async def _kills(options: Options, home: Path, advance: Callable[[], None]) -> Part:
    part = Part()
    rng = random.Random(7)  # chooses when
    seen = await kill_workers(options.kills, rng, home, advance)
    part.compared("workers killed in a stream", seen.compared)
    if seen.gaps_s:
        gaps = sorted(seen.gaps_s)
        over = sorted(seen.over_s)
        within = sum(one <= 0.2 for one in over)
        part.add(
            "from the end of its connections to the next text, median", f"{median(gaps):.3f} s"
        )
        part.add("the same, worst", f"{gaps[-1]:.3f} s")
        ratio = f"{median(seen.ratios):.2f}"
        part.add("the same beside the survivor's TTFT for that prefix, median ratio", ratio)
        part.add(
            "the same less 1.2 x that TTFT, median", f"{median(over):.3f} s", "<= 0.2 s",
            met=median(over) <= 0.2,
        )  # fmt: skip
        part.add("kills with at most 1.2 x that TTFT + 0.2 s", f"{within} of {len(over)}")
    if seen.line_bytes:
        kept = max(seen.line_bytes)
        part.add("bytes kept of a token", f"{kept:.1f}", "<= 16", met=kept <= 16)
    return part


async def _cuts(options: Options, home: Path, advance: Callable[[], None]) -> Part:
    part = Part()
    seen = await cut_streams(options.cuts, random.Random(7), home, advance)
    part.compared("connections cut at a chosen byte", seen.compared)
    part.add("of these, cut before their end", str(seen.reached))
    return part


def _silence(part: Part, name: str, seen: Silence) -> Part:
    part.compared(name, seen.compared)
    if seen.gaps_s:
        worst = max(seen.gaps_s)
        part.add(f"{name}: to the next text, median", f"{median(seen.gaps_s):.1f} s")
        part.add(f"{name}: worst", f"{worst:.1f} s", "<= 10 s", met=worst <= 10)
    if seen.backs_s:
        worst = max(seen.backs_s)
        part.add(
            f"{name}: back until used again, worst", f"{worst:.1f} s", "<= 10 s", met=worst <= 10
        )
    return part


async def _sleeps(options: Options, home: Path, advance: Callable[[], None]) -> Part:
    seen = await sleeping_workers(options.silences, home, advance)
    return _silence(Part(), "workers asleep (SIGSTOP)", seen)


async def _links(options: Options, home: Path, advance: Callable[[], None]) -> Part:
    if not can_cut_links():
        return Part(notes=["links were not cut: that needs root on Linux"])
    seen = await cut_links(options.silences, home, advance)
    return _silence(Part(), "links cut (network namespace)", seen)


async def _gateways(options: Options, home: Path, advance: Callable[[], None]) -> Part:
    part = Part()
    seen = await asyncio.to_thread(kill_gateways, options.gateways, home, advance)
    worst = max(seen.next_s)
    part.add("one of two gateways killed: kills", str(options.gateways))
    part.add(
        "until the next request was answered, worst", f"{worst:.3f} s", "<= 1 s", met=worst <= 1
    )
    part.add(
        "requests begun in the 3 s after a kill that failed", f"{seen.failed} of {seen.begun}", "0",
        met=not seen.failed,
    )  # fmt: skip
    part.add("requests of the killed gateways that failed", str(seen.interrupted))
    part.notes += seen.notes
    return part


async def _price(options: Options, _home: Path, advance: Callable[[], None]) -> Part:
    part = Part()
    price = await measure_price(options.turns, options.log_dir, advance)
    without, told = price["without lines"], price["with lines"]
    part.add(
        "CPU of the gateway per event of paced streams, no tokens told", f"{without * 1e6:.1f} us"
    )
    part.add(
        f"the same with tokens told, medians of {options.turns} in turns",
        f"{told * 1e6:.1f} us ({told / without - 1:+.1%})", "<= +10%", met=told <= 1.1 * without,
    )  # fmt: skip
    return part


PARTS: Final[Mapping[str, tuple[str, Measure]]] = {
    "kills": ("kills", _kills),
    "cuts": ("cuts", _cuts),
    "sleeps": ("silences", _sleeps),
    "links": ("silences", _links),
    "gateways": ("gateways", _gateways),
    "price": ("turns", _price),
}
"""The name of the size of each part, and the part."""


def grid_of(parts: Mapping[str, Part]) -> Grid:
    """Return the table of all parts."""
    words = {True: "yes", False: "NO", None: ""}
    return Grid(
        title="Streams that go on",
        columns=("", "reached", "target", "met"),
        rows=tuple(
            (row.name, row.reached, row.target, words[row.met])
            for part in parts.values()
            for row in part.rows
        ),
    )


def _kept() -> dict[str, Part]:
    if not KEPT.exists():
        return {}
    loaded: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())
    return {
        name: Part(**{**part, "rows": [Row(**row) for row in part["rows"]]})
        for name, part in loaded.items()
    }


def _write(parts: Mapping[str, Part]) -> None:
    ordered = {name: parts[name] for name in PARTS if name in parts}
    KEPT.write_text(
        json.dumps({name: asdict(part) for name, part in ordered.items()}, indent=1) + "\n"
    )
    about = "Demo checkpoint in float32, by `python -m bench.failover`:\n\n"
    about += "\n".join(f"- {name}: {part.measured}" for name, part in ordered.items())
    notes = [f"- {name}: {note}" for name, part in ordered.items() for note in part.notes]
    write_page(RESULTS, "Failover", about, grid_of(ordered), "\n".join(notes))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = gateway_parser("bench.failover", __doc__)
    add = parser.add_argument
    for name, size in (("kills", 100), ("cuts", 900), ("turns", 9)):
        add(f"--{name}", type=int, default=size, metavar="N")
    add("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    given = parser.parse_args(arguments)
    chosen = given.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    options = Options(log_dir=given.log_dir, kills=given.kills, cuts=given.cuts, turns=given.turns)
    if given.quick:
        options = replace(options, kills=2, cuts=4, turns=1, silences=1, gateways=1)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    parts: dict[str, Part] = {}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name in chosen:
            size_name, measure = PARTS[name]
            task = progress.add_task(name, total=getattr(options, size_name))
            with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home:
                advance = lambda task=task: progress.advance(task)  # noqa: E731
                parts[name] = asyncio.run(measure(options, Path(home), advance))
            parts[name].measured = provenance()
            if not given.quick:
                _write({**_kept(), name: parts[name]})
    console.print(grid_of(parts).to_table())
    for note in (note for part in parts.values() for note in part.notes):
        console.print(note)
    return any(row.met is False for part in parts.values() for row in part.rows)


if __name__ == "__main__":
    restart_with_fast_blas("bench.failover")
    sys.exit(main())
