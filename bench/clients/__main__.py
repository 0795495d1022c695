"""Unmodified third-party clients against a gateway with the demo model.

`python -m bench.clients` installs each client in an environment of its own, starts `paceline up` on
a free port, runs the cases of each client and writes `bench/results/clients.md`. `--clients` runs
some of them and prints their results; with `--write` too, they take the place of their earlier
ones on that page. A client has an empty environment and a home of its own; once all are installed,
`unshare -n sh -c "ip link set lo up; ..."` shows that none needs a network.
"""

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

from bench.clients.client import Client, Result, clients
from bench.clients.scripted import MODEL as SCRIPTED_MODEL
from bench.clients.scripted import running_scripted
from bench.harness.options import parser
from bench.harness.tables import RESULTS, Grid, provenance, show, write_page
from tests.support.paceline_process import running_up
from workers.demo import CHECKPOINT

_CELL_CHARS: Final = 200
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
Record = dict[str, Any]
"""The packages of a client, when and against which model it ran, and its results."""


def record_of(client: Client, results: Sequence[Result]) -> Record:
    return {
        "packages": client.packages,
        "model": "script" if client.scripted else "demo",
        "ran": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "network": "none" if [name for _, name in socket.if_nameindex()] == ["lo"] else "yes",
        "results": [asdict(result) for result in results],
    }


def summary(records: Mapping[str, Record]) -> Grid:
    rows = []
    for name, record in sorted(records.items()):
        results = record["results"]
        works = f"{sum(one['works'] for one in results)} of {len(results)}"
        about = (record[field] for field in ("model", "network", "ran"))
        rows.append((name, record["packages"] or "as installed", *about, works))
    columns = ("client", "packages", "model", "network", "ran (UTC)", "cases that work")
    return Grid("Clients and versions", columns, rows)


def render(records: Mapping[str, Record]) -> Grid:
    rows = []
    for name, record in sorted(records.items()):
        for one in record["results"]:
            works, runs = "yes" if one["works"] else "NO", ", ".join(one["runs"])
            text = " ".join(_COLOURS.sub("", one["result"]).split()).replace("|", "\\|")
            rows.append((name, one["case"], works, runs, text[:_CELL_CHARS]))
    return Grid("Their cases", ("client", "case", "works", "runs", "result"), rows)


def write_results(new: Mapping[str, Record], known: Sequence[str]) -> None:
    """Put new results in the place of earlier ones, in a record and on the page."""
    path = RESULTS / "clients.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    records = {name: one for name, one in {**earlier, **new}.items() if name in known}
    path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    about = (
        f"{provenance()}; {len(records)} of {len(known)} clients, each unmodified. `script` is a "
        "worker that plays a model by a script, for the loops of agents, behind the same gateway."
    )
    write_page("clients.md", "Clients", about, summary(records), render(records))


def main() -> int:
    known = clients()
    names = [client.name for client in known]
    made = parser("clients", __doc__, quick=False)
    listed = ", ".join(names)
    made.add_argument("--clients", help=f"comma-separated: {listed}; all of them write the page")
    made.add_argument("--write", action="store_true", help="renew these clients on the page")
    made.add_argument("--url", help="a running gateway to use, in place of a new one")
    made.add_argument("--model", default="demo", help="the model that this gateway serves")
    options = made.parse_args()
    chosen = options.clients.split(",") if options.clients else names
    if unknown := set(chosen) - set(names):
        made.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = False

    def run_all(url: str, model: str, *, scripted: bool = False, **keys: str) -> None:
        nonlocal failed
        at = {"BENCH_URL": url, "BENCH_MODEL": model, "BENCH_CHECKPOINT": str(CHECKPOINT)}
        for client in known:
            if client.name in chosen and client.scripted is scripted:
                show(f"{client.name}, installed if it is missing")
                results = [*client.run(options.folder, {**at, **keys})]
                failed = failed or not all(result.works for result in results)
                record = {client.name: record_of(client, results)}
                show(render(record))
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
