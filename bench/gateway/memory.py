"""Memory of the gateway over a million requests.

`python -m bench.gateway.memory` sends requests, streamed and not, through the gateway to a worker
with prepared answers, and samples the memory of its process. The gateway runs with a key and all
defaults (policy, accounting, metrics).
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
from bench.gateway.load import Question, send_requests
from bench.harness.process_cost import resident_bytes
from bench.harness.tables import Grid, Target
from bench.harness.tables import targets as targets_grid
from gateway.server import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "gateway_memory.md"
REQUESTS: Final = 1_000_000
QUICK_REQUESTS: Final = 1000
_POINTS: Final = 20
_CONCURRENCY: Final = 16
_BAR_WIDTH: Final = 20
_KINDS: Final = (Question(stream=False), Question(stream=True))


class Sample(NamedTuple):
    """Memory of the process after a number of requests."""

    requests: int
    resident_bytes: int


async def measure(requests: int, home: Path, progress: Progress) -> list[Sample]:
    """Send requests, half of them streams, and sample the memory of the gateway."""
    bar = progress.add_task("requests", total=requests)
    samples = []
    async with (
        running_backend() as worker_port,
        running(OURS, venvs=home, worker_port=worker_port) as gateway,
    ):
        assert gateway.process_id is not None
        sent = 0
        for point in range(1, _POINTS + 1):
            share = (requests * point // _POINTS - sent) // len(_KINDS)
            for question in _KINDS:
                sent += await send_requests(
                    gateway.port,
                    question,
                    requests=share,
                    concurrency=_CONCURRENCY,
                    budget_s=float("inf"),
                )
                progress.update(bar, completed=sent)
            samples.append(Sample(sent, resident_bytes(gateway.process_id)))
    return samples


def table(samples: Sequence[Sample]) -> Grid:
    """Return the samples as a table."""
    maximum_bytes = max(sample.resident_bytes for sample in samples)
    rows = (
        (
            "█" * round(_BAR_WIDTH * sample.resident_bytes / maximum_bytes),
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


def target_table(samples: Sequence[Sample]) -> Grid:
    """Return the targets: a small memory that does not grow in the second half."""
    sizes = [sample.resident_bytes for sample in samples]
    half = len(sizes) // 2
    return targets_grid([
        Target(
            name="memory at the end, MB", reached=sizes[-1] / 1e6, bound=120, at_least=False
        ),
        Target(
            name="most memory of the second half over the first's",
            reached=max(sizes[half:]) / max(sizes[:half]),
            bound=1.05,
            at_least=False,
        ),
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="half of them streams")
    parser.add_argument(
        "--quick", action="store_true", help="check that everything runs; write no results"
    )
    parser.add_argument("--log-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    home = options.log_dir.resolve()
    home.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with Progress(console=console) as progress:
        count = QUICK_REQUESTS if options.quick else options.requests
        samples = run(measure(count, home, progress))
    grids = (table(samples), target_table(samples))
    for grid in grids:
        console.print(grid.to_table())
    if options.quick:
        return
    about = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.system()} {platform.machine()}, "
        f"{cpu_count()} cores, Python {platform.python_version()}. {_CONCURRENCY} requests "
        "at a time, half of them streams, answers of 64 words."
    )
    page = ["# Memory of the gateway", about, *(grid.to_markdown() for grid in grids)]
    RESULTS.write_text("\n\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    main()
