"""Does the memory of our gateway stay where it was over a million requests?

`python -m bench.gateway.memory` sends whole answers and streams through it to a worker that answers
from memory, and reads now and then what its process holds. The gateway runs with a key and all that
is on by default (policy, accounting, metrics).
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from os import cpu_count
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import Progress

from bench.gateway.contenders import OURS, running, running_backend
from bench.gateway.load import Question, ask_many
from bench.harness.process_cost import resident_bytes
from bench.harness.tables import Grid, Target
from bench.harness.tables import targets as targets_grid
from gateway.server import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "gateway_memory.md"
REQUESTS: Final = 1_000_000
QUICK_REQUESTS: Final = 1000
_POINTS: Final = 20
_AT_ONCE: Final = 16
_BAR_WIDTH: Final = 20
_KINDS: Final = (Question(stream=False), Question(stream=True))


class Sample(NamedTuple):
    """What the process held after so many requests."""

    requests: int
    resident_bytes: int


async def measure(requests: int, home: Path, progress: Progress) -> list[Sample]:
    """Send so many requests, half of them streams, and weigh the gateway on the way."""
    bar = progress.add_task("requests", total=requests)
    samples = []
    async with (
        running_backend() as worker_port,
        running(OURS, venvs=home, worker_port=worker_port) as line,
    ):
        assert line.process_id is not None
        sent = 0
        for point in range(1, _POINTS + 1):
            share = (requests * point // _POINTS - sent) // len(_KINDS)
            for question in _KINDS:
                sent += await ask_many(
                    line.port, question, requests=share, at_once=_AT_ONCE, budget_s=float("inf")
                )
                progress.update(bar, completed=sent)
            samples.append(Sample(sent, resident_bytes(line.process_id)))
    return samples


def table(samples: Sequence[Sample]) -> Grid:
    """Draw what the process held over its requests."""
    most = max(sample.resident_bytes for sample in samples)
    rows = (
        (
            "█" * round(_BAR_WIDTH * sample.resident_bytes / most),
            f"{sample.requests:,}",
            f"{sample.resident_bytes / 1e6:.1f}",
        )
        for sample in samples
    )
    return Grid(
        title="Memory of the gateway over its requests",
        columns=("process", "requests", "MB"),
        rows=tuple(rows),
    )


def judged(samples: Sequence[Sample]) -> Grid:
    """Hold it against what was promised: little, and no more in the second half."""
    held = [sample.resident_bytes for sample in samples]
    half = len(held) // 2
    return targets_grid([
        Target(
            promise="memory at the end, MB", reached=held[-1] / 1e6, bound=120, at_least=False
        ),
        Target(
            promise="most memory of the second half over the first's",
            reached=max(held[half:]) / max(held[:half]),
            bound=1.05,
            at_least=False,
        ),
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="half of them streams")
    parser.add_argument(
        "--quick", action="store_true", help="see that all of it runs; writes no results"
    )
    parser.add_argument("--log-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    home = options.log_dir.resolve()
    home.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with Progress(console=console) as progress:
        count = QUICK_REQUESTS if options.quick else options.requests
        samples = run(measure(count, home, progress))
    grids = (table(samples), judged(samples))
    for grid in grids:
        console.print(grid.drawn())
    if options.quick:
        return
    about = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.system()} {platform.machine()}, "
        f"{cpu_count()} cores, Python {platform.python_version()}. {_AT_ONCE} requests at a time, "
        "whole answers and streams of 64 words in equal parts."
    )
    page = ["# Memory of the gateway", about, *(grid.markdown() for grid in grids)]
    RESULTS.write_text("\n\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    main()
