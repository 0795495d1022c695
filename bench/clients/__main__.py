"""Unmodified third-party clients against a gateway with the demo model.

`python -m bench.clients` installs each client in an environment of its own, starts `paceline up` on
a free port, runs the cases of each client and writes `bench/results/clients.md`. `--clients` runs
some of them and prints their results. A client has an empty environment and a home of its own; once
all are installed, `unshare -n sh -c "ip link set lo up; ..."` shows that none needs a network.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.clients.client import Client, Result, clients
from bench.clients.scripted import MODEL as SCRIPTED_MODEL
from bench.clients.scripted import running_scripted
from bench.harness.tables import Grid, provenance, write_page
from tests.support.paceline_process import running_up
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "clients.md"
_CELL_CHARS: Final = 200


def render(ran: Sequence[tuple[Client, Sequence[Result]]]) -> Grid:
    """Return the table of all cases."""
    return Grid(
        title="Third-party clients on the demo model",
        columns=("client", "case", "works", "runs", "result"),
        rows=tuple(
            (
                client.packages or client.name,
                result.case,
                "yes" if result.works else "NO",
                ", ".join(result.runs),
                _cell(result.result),
            )
            for client, results in ran
            for result in results
        ),
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:_CELL_CHARS]


def main(arguments: Sequence[str] | None = None) -> int:
    known = clients()
    names = [client.name for client in known]
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    add = parser.add_argument
    add("--clients", help=f"comma-separated: {', '.join(names)}; all of them write {RESULTS.name}")
    add("--write", action="store_true", help=f"write {RESULTS.name} though only some run")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    add("--url", help="a running gateway to use, in place of a new one")
    add("--model", default="demo", help="the model that this gateway serves")
    options = parser.parse_args(arguments)
    chosen = options.clients.split(",") if options.clients else names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    ran: list[tuple[Client, list[Result]]] = []

    def run_all(url: str, model: str, *, scripted: bool = False, **keys: str) -> None:
        variables = {
            "BENCH_URL": url,
            "BENCH_MODEL": model,
            "BENCH_CHECKPOINT": str(CHECKPOINT),
            **keys,
        }
        for client in known:
            if client.name in chosen and client.scripted is scripted:
                console.print(f"{client.name}, installed if it is missing")
                results = [*client.run(options.venv_dir.resolve(), variables)]
                ran.append((client, results))
                console.print(render(ran[-1:]).to_table())
                if options.write or not options.clients:
                    about = f"{provenance()}; {len(ran)} of {len(known)} clients, each unmodified."
                    write_page(RESULTS, "Clients", about, render(ran))

    if any(client.scripted and client.name in chosen for client in known):
        with running_scripted() as at:
            keys = {"BENCH_KEY": at.key, "BENCH_LIMITED_KEY": at.limited_key}
            run_all(at.url, SCRIPTED_MODEL, scripted=True, **keys)
    if options.url:
        run_all(options.url, options.model)
    elif any(not client.scripted and client.name in chosen for client in known):
        with (
            tempfile.TemporaryDirectory(prefix="paceline-clients-") as folder,
            running_up(Path(folder)) as process,
        ):
            run_all(process.url, process.model)
    return 0 if all(result.works for _, results in ran for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
