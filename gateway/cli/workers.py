"""List the workers of a gateway; cordon, uncordon and drain them, and empty their caches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gateway.cli import CommandError
from gateway.cli.client import connect, local_time, plain_table, print_answer, print_output
from paceline.pairing import PAIRING_PATH

_PATH = "/admin/v1/workers"
# The gateway waits for as long as the command says.
_MARGIN_S = 30.0


def list_all(*, url: str, as_json: bool) -> int:
    """List all workers that have joined or are cordoned."""
    answer = connect(url, admin=True).read("GET", _PATH)
    table = plain_table("Worker", "State", "Models", "URL", "Connection", numbers=("Busy",))
    for worker in answer["workers"]:
        models = ", ".join(worker.get("models", ())) or "-"
        connection = {True: "TLS", False: "plain"}.get(worker.get("tls"), "-")
        place = (models, worker.get("url", "-"), connection, str(worker["in_flight"]))
        table.add_row(worker["worker_id"], _state(worker), *place)
    return print_answer(answer, table, as_json=as_json)


def cordon(*, worker: str, url: str) -> int:
    """Let a worker get no new requests."""
    connect(url, admin=True).send("PUT", _place(worker, "cordon"))
    return print_output(f"{worker} gets no new requests; `paceline workers uncordon` resumes them.")


def uncordon(*, worker: str, url: str) -> int:
    """Resume requests to a worker."""
    connect(url, admin=True).send("DELETE", _place(worker, "cordon"))
    return print_output(f"{worker} gets requests again.")


def pair(*, url: str) -> int:
    """Show a pairing code."""
    answer = connect(url, admin=True).read("POST", f"{PAIRING_PATH}/code")
    code, minutes = answer["code"], round(answer["valid_s"] / 60)
    return print_output(
        f"{code[:4]}-{code[4:]}\n\nRun `paceline join` on the other Mac, and enter this code "
        f"within {minutes} minutes. It is good for one try."
    )


def unpair(*, worker: str, url: str) -> int:
    """End the pairing of a worker."""
    connect(url, admin=True).send("DELETE", f"{PAIRING_PATH}/workers/{quote(worker, safe='')}")
    return print_output(f"{worker} is no longer paired; `paceline join` pairs it again.")


def drain(*, worker: str, timeout_s: int, move: bool, url: str) -> int:
    """Cordon a worker and wait for its requests to end."""
    query = {"timeout_s": timeout_s, "move": move}
    answer = connect(url, admin=True).read(
        "POST", _place(worker, "drain"), params=query, timeout=timeout_s + _MARGIN_S
    )
    if not answer["drained"]:
        raise CommandError(
            f"{worker} gets no new requests, but {answer['in_flight']} are still running."
        )
    moved = f"; {answer['moved']} streams continued at other workers" if answer["moved"] else ""
    return print_output(f"{worker} has no running requests{moved}, and gets none until uncordoned.")


def clear_caches(*, workers: Sequence[str], url: str) -> int:
    """Empty the prefix caches of these workers, in memory and on disk; without any, of all.

    One that fails keeps none of the others from it.
    """
    gateway = connect(url, admin=True)
    here = (one for one in gateway.read("GET", _PATH)["workers"] if one["state"] != "gone")
    failed = 0
    for name in workers or [one["worker_id"] for one in here if one["kind"] == "paceline"]:
        try:
            gateway.send("DELETE", _place(name, "prefix-cache"))
            print_output(f"Cleared the prefix cache of {name}.")
        except CommandError as error:
            failed = 1
            sys.stderr.write(f"{name}: {error}\n")
    return failed


def _place(worker: str, action: str) -> str:
    return f"{_PATH}/{quote(worker, safe='')}/{action}"


def _state(worker: Mapping[str, Any]) -> str:
    """Return the state, its reason, and who has cordoned the worker when."""
    words = [worker["state"], worker.get("problem", "")]
    if "gone_since" in worker:
        words.append(f"({worker['gone_because']}) since {local_time(worker['gone_since'])}")
    if "cordoned_since" in worker:
        words.append(f"by {worker['cordoned_by']} since {local_time(worker['cordoned_since'])}")
    if "paired_since" in worker:
        seen = f", last seen {local_time(worker['last_seen'])}" if "last_seen" in worker else ""
        words.append(f"(paired since {local_time(worker['paired_since'])}{seen})")
    return " ".join(filter(None, words))
