"""Unmodified third-party clients against a gateway with the demo model.

`python -m bench.clients` installs each client in an environment of its own, starts `paceline up` on
a free port, runs the cases of each client and writes `bench/results/clients.md`. `--clients` runs
some of them and prints their results; with `--write` too, they take the place of their earlier
ones on that page. A client has an empty environment and a home of its own; once all are installed,
`unshare -n sh -c "ip link set lo up; ..."` shows that none needs a network.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.clients.client import Client, Result, clients
from bench.clients.scripted import MODEL as SCRIPTED_MODEL
from bench.clients.scripted import running_scripted
from bench.harness.tables import Grid, provenance, write_page
from tests.support.paceline_process import running_up
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "clients.md"
_CELL_CHARS: Final = 200
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
Record = dict[str, Any]
"""The packages of a client, when and against which model it ran, and its results."""


def record_of(client: Client, results: Sequence[Result]) -> Record:
    """Return what a run of a client found."""
    return {
        "packages": client.packages,
        "model": "script" if client.scripted else "demo",
        "ran": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "network": "none" if [name for _, name in socket.if_nameindex()] == ["lo"] else "yes",
        "results": [asdict(result) for result in results],
    }


def summary(records: Mapping[str, Record]) -> Grid:
    """Return the table of all clients."""
    return Grid(
        title="Clients and versions",
        columns=("client", "packages", "model", "network", "ran (UTC)", "cases that work"),
        rows=tuple(
            (
                name,
                record["packages"] or "as installed",
                record["model"],
                record["network"],
                record["ran"],
                f"{sum(one['works'] for one in record['results'])} of {len(record['results'])}",
            )
            for name, record in sorted(records.items())
        ),
    )


def render(records: Mapping[str, Record]) -> Grid:
    """Return the table of all cases."""
    return Grid(
        title="Their cases",
        columns=("client", "case", "works", "runs", "result"),
        rows=tuple(
            (
                name,
                result["case"],
                "yes" if result["works"] else "NO",
                ", ".join(result["runs"]),
                _cell(result["result"]),
            )
            for name, record in sorted(records.items())
            for result in record["results"]
        ),
    )


def write_results(new: Mapping[str, Record], known: Sequence[str]) -> None:
    """Put new results in the place of earlier ones, in a record and on the page."""
    path = RESULTS.with_suffix(".json")
    earlier = json.loads(path.read_text()) if path.exists() else {}
    records = {name: one for name, one in {**earlier, **new}.items() if name in known}
    path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    about = (
        f"{provenance()}; {len(records)} of {len(known)} clients, each unmodified. `script` is a "
        "worker that plays a model by a script, for the loops of agents, behind the same gateway."
    )
    write_page(RESULTS, "Clients", about, summary(records), render(records))


def _cell(text: str) -> str:
    return " ".join(_COLOURS.sub("", text).split()).replace("|", "\\|")[:_CELL_CHARS]


def main(arguments: Sequence[str] | None = None) -> int:
    known = clients()
    names = [client.name for client in known]
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    add = parser.add_argument
    add("--clients", help=f"comma-separated: {', '.join(names)}; all of them write {RESULTS.name}")
    add("--write", action="store_true", help=f"renew these clients in {RESULTS.name}")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    add("--url", help="a running gateway to use, in place of a new one")
    add("--model", default="demo", help="the model that this gateway serves")
    options = parser.parse_args(arguments)
    chosen = options.clients.split(",") if options.clients else names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    failed = False

    def run_all(url: str, model: str, *, scripted: bool = False, **keys: str) -> None:
        nonlocal failed
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
                failed = failed or not all(result.works for result in results)
                record = {client.name: record_of(client, results)}
                console.print(render(record).to_table())
                if options.write or not options.clients:
                    write_results(record, names)

    if any(client.scripted and client.name in chosen for client in known):
        with running_scripted() as at:
            own = {"BENCH_KEY": at.key, "BENCH_LIMITED_KEY": at.limited_key}
            run_all(at.url, SCRIPTED_MODEL, scripted=True, BENCH_WORKER_URL=at.worker_url, **own)
    if options.url:
        run_all(options.url, options.model)
    elif any(not client.scripted and client.name in chosen for client in known):
        with (
            tempfile.TemporaryDirectory(prefix="paceline-clients-") as folder,
            running_up(Path(folder)) as process,
        ):
            run_all(process.url, process.model)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
