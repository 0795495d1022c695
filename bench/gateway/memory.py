"""Memory of the gateway over a million requests.

`python -m bench.gateway.memory` sends requests, streamed and not, through the gateway to a worker
with prepared answers, and samples the memory of its process. The gateway runs with a key and all
defaults (policy, accounting, metrics).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import Progress

from bench.gateway.contenders import OURS, gateway_parser, running, running_backend
from bench.gateway.load import Question, send_requests
from bench.harness.process_cost import resident_bytes
from bench.harness.tables import Grid, Target, provenance, write_page
from bench.harness.tables import targets as targets_grid
from gateway.event_loop import run

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
    parser = gateway_parser("bench.gateway.memory", __doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="half of them streams")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with Progress(console=console) as progress:
        count = QUICK_REQUESTS if options.quick else options.requests
        samples = run(measure(count, options.log_dir, progress))
    grids = (table(samples), target_table(samples))
    for grid in grids:
        console.print(grid.to_table())
    if options.quick:
        return
    about = (
        f"{provenance()}. {_CONCURRENCY} requests at a time, half of them streams, answers of 64 "
        "words."
    )
    write_page(RESULTS, "Memory of the gateway", about, *grids)


if __name__ == "__main__":
    main()
