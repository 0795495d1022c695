"""Attacks on a running gateway and its worker, with what they cost.

`python -m bench.attack` starts a gateway, and attacks its port with floods that need no key: 50 MB
of trailers, 500,000 pipelined requests, and 1,000 connections whose bodies never end. A neighbour
sends requests meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.attack.connections import Flood, Target, run_floods
from bench.gateway.contenders import OURS, gateway_parser, running, running_backend
from bench.harness import tables
from gateway.server import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "attack.md"
_GROWTH_MB: Final = 10.0
_CONNECTION_KB: Final = 20.0
_NEIGHBOUR_MS: Final = 50.0


async def measure(home: Path, *, scale: float) -> list[Flood]:
    """Attack a gateway of its own, which has a worker."""
    async with (
        running_backend() as worker_port,
        running(OURS, venvs=home, worker_port=worker_port) as gateway,
    ):
        assert gateway.process_id is not None
        return await run_floods(Target(gateway.port, gateway.process_id), scale=scale)


def table(floods: Sequence[Flood]) -> tables.Grid:
    """Return the effect of every flood."""
    return tables.Grid(
        title="Floods at the port of a gateway",
        columns=("sent", "count", "memory, MB", "kept, MB", "neighbour p99, ms", "closed"),
        rows=tuple(
            (
                flood.name,
                f"{flood.sent:,}",
                f"{flood.grown_mb:+.1f}",
                f"{flood.kept_mb:+.1f}",
                f"{flood.neighbour_p99_ms:.1f}",
                "yes" if flood.closed else "NO",
            )
            for flood in floods
        ),
    )


def targets(floods: Sequence[Flood]) -> tables.Grid:
    """Return the bounds of every flood: memory, and the wait of a neighbour."""
    bounds = []
    for flood in floods:
        of_connections = flood.sent * _CONNECTION_KB / 1000 if "bodies" in flood.name else 0.0
        bound_mb = of_connections or _GROWTH_MB
        bounds += [
            tables.Target(
                name=f"{flood.name}: memory, MB",
                reached=flood.grown_mb,
                bound=bound_mb,
                at_least=False,
            ),
            tables.Target(
                name=f"{flood.name}: neighbour p99, ms",
                reached=flood.neighbour_p99_ms,
                bound=_NEIGHBOUR_MS,
                at_least=False,
            ),
        ]
    return tables.targets(bounds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = gateway_parser("bench.attack", __doc__)
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with console.status("attacking"):
        floods = run(measure(options.log_dir, scale=0.02 if options.quick else 1.0))
    grids = (table(floods), targets(floods))
    for grid in grids:
        console.print(grid.to_table())
    if options.quick:
        return
    tables.write_page(RESULTS, "Attacks", f"{tables.provenance()}.", *grids)


if __name__ == "__main__":
    main()
