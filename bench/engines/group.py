"""Groups of ranks on this machine under faults: `python -m bench.engines.group`.

Two ranks have a part of each layer, four have some of the layers each. Kills, stops and cuts off
each rank within a stream, and leaves each kind of request. Prints after how many seconds the stream
ended, and the group answered again, and writes the page of results. Links are cut in a network
namespace, as root on Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console

from bench.failover.failures import can_cut_links
from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import MISSING, Grid, provenance, report
from tests.support.openai_requests import LONG_TEXT, text_body
from tests.support.worker_process import WorkerProcess, wait_until_ready, worker_process
from workers.settings import Split

_CHAT = "/v1/chat/completions"
_WITHIN_S = 120.0
_LEFT: tuple[dict[str, object], ...] = (
    {"temperature": 0, "stream": True},
    {"temperature": 1.0, "stream": True, "seed": 5},
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
)
"""The requests that a client leaves."""
_GROUPS: Final = ((2, Split.TENSOR), (4, Split.PIPELINE))
_NEW_NETWORK: Final = 0x40000000
"""`CLONE_NEWNET` of Linux."""
_Fault = Callable[[int], None]
"""What befalls a rank."""


def _ranks(worker: WorkerProcess) -> list[int]:
    command = ["pgrep", "-P", str(worker.process.pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return sorted(map(int, found.stdout.split()))


def _answers(client: httpx.Client) -> bool:
    body = text_body("demo", temperature=0, max_tokens=2)
    return client.post(_CHAT, json=body).status_code == 200


def _answered_after_s(client: httpx.Client, since_s: float) -> float:
    """Return after how many seconds the group answers; infinite if it does not in time."""
    while time.monotonic() - since_s < _WITHIN_S:
        if _answers(client):
            return time.monotonic() - since_s
        time.sleep(0.1)
    return float("inf")


def _ended_after_s(worker: WorkerProcess, client: httpx.Client, rank: int, fault: _Fault) -> float:
    """Let a fault befall a rank in a stream; return after how many seconds the stream ended."""
    body = text_body("demo", LONG_TEXT, temperature=0, stream=True)
    with client.stream("POST", _CHAT, json=body) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"content":"' in line)
        at_s = time.monotonic()
        fault(rank)
        rest = [line for line in lines if line]
    assert "error" in rest[-1], rest[-1]
    return time.monotonic() - at_s


def _leave(client: httpx.Client, **fields: object) -> float:
    """Leave a request after its first bytes; return when the group has answered another one."""
    body = text_body("demo", LONG_TEXT, max_tokens=64, **fields)
    try:
        with client.stream("POST", _CHAT, json=body, timeout=1.0) as response:
            next(response.iter_lines())
    except httpx.ReadTimeout:
        pass  # an answer that is not streamed has no first bytes
    return _answered_after_s(client, time.monotonic())


def _address(rank: int) -> str:
    return f"10.213.8.{rank + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _enter_namespace() -> None:
    """Give this process and its children a network of their own, with an address for each rank."""
    if ctypes.CDLL(None).unshare(_NEW_NETWORK):
        raise OSError("this process may have no network of its own")
    _ip("link", "set", "lo", "up")
    for rank in range(max(ranks for ranks, _ in _GROUPS)):
        _link(rank, up=True)


def _link(rank: int, *, up: bool) -> None:
    """Cut a rank off from the others, or restore its link."""
    _ip("address", "add" if up else "delete", f"{_address(rank)}/32", "dev", "lo")


def _try_group(ranks: int, split: Split, folder: Path, *, cuts: bool, console: Console) -> Grid:
    rows: list[tuple[str, str, str]] = []

    def add(*row: str) -> None:
        rows.append((row[0], row[1], row[2]))
        console.print(f"{ranks} ranks: {row[0]}: {row[1]}, {row[2]}")

    hosts = folder / f"{ranks}.json"
    addresses = [_address(rank) if cuts else "127.0.0.1" for rank in range(ranks)]
    hosts.write_text(json.dumps([{"ips": [address]} for address in addresses]))
    with contextlib.ExitStack() as stack:
        flags = ("--group", str(hosts), "--split", split, "--port", "0")
        worker = wait_until_ready(stack.enter_context(worker_process(*flags)))
        client = stack.enter_context(httpx.Client(base_url=worker.url, timeout=_WITHIN_S))

        def send(number: signal.Signals) -> _Fault:
            return lambda rank: os.kill(_ranks(worker)[rank], number)

        faults = {f"{one.name} of": send(one) for one in (signal.SIGKILL, signal.SIGSTOP)}
        if cuts:
            faults["cut link of"] = lambda rank: _link(rank, up=False)
        for fields in _LEFT:
            before = _ranks(worker)
            answered_s = _leave(client, **fields)
            assert _ranks(worker) == before, "the group died"
            add(f"a client leaves {json.dumps(fields)}", MISSING, f"{answered_s:.1f} s")
        for name, fault in faults.items():
            for rank in range(ranks):
                ended_s = _ended_after_s(worker, client, rank, fault)
                since_s = time.monotonic()
                if name.startswith("cut"):
                    _link(rank, up=True)
                again_s = _answered_after_s(client, since_s)
                add(f"{name} rank {rank}", f"{ended_s:.1f} s", f"{again_s:.1f} s")
    columns = ("fault", "stream ended after", "and answered again after")
    return Grid(f"{ranks} ranks, split by {split}", columns, rows)


def main() -> None:
    console = Console(stderr=True, highlight=False)
    cuts = can_cut_links()
    if cuts:
        _enter_namespace()
    with tempfile.TemporaryDirectory() as folder:
        grids = [
            _try_group(ranks, split, Path(folder), cuts=cuts, console=console)
            for ranks, split in _GROUPS
        ]
    about = f"Measured {provenance()}, demo checkpoint, by `python -m bench.engines.group`."
    report("group.md", "A group of ranks", about, *grids)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engines.group")
    main()
