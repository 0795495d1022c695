"""Empty the prefix caches of workers."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from gateway.cli.client import connect, print_output

_WORKERS = "/admin/v1/workers"


def clear(*, workers: Sequence[str], url: str) -> int:
    """Empty the prefix caches of these workers, in memory and on disk; without any, of all."""
    gateway = connect(url, admin=True)
    here = (one for one in gateway.read("GET", _WORKERS)["workers"] if one["state"] != "gone")
    for name in workers or [one["worker_id"] for one in here if one["kind"] == "paceline"]:
        gateway.send("DELETE", f"{_WORKERS}/{quote(name, safe='')}/prefix-cache")
        print_output(f"Emptied the prefix cache of {name}.")
    return 0
