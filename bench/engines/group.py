"""A group of two ranks on this machine under faults: `python -m bench.engines.group`.

Kills and stops each rank within a stream, and leaves each kind of request. Prints after how many
seconds the stream ended, and the group answered again, and writes the page of results.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import MISSING, Grid, provenance, write_page
from tests.support.openai_requests import LONG_TEXT, text_body
from tests.support.worker_process import RunningWorker, wait_until_ready, worker_process

RESULTS = Path(__file__).parents[1] / "results" / "group.md"
_CHAT = "/v1/chat/completions"
_WITHIN_S = 120.0
_LEFT: tuple[dict[str, object], ...] = (
    {"temperature": 0, "stream": True},
    {"temperature": 1.0, "stream": True, "seed": 5},
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
)
"""The requests that a client leaves."""
_SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


def _ranks(worker: RunningWorker) -> list[int]:
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


def _fault(
    worker: RunningWorker, client: httpx.Client, rank: int, number: int
) -> tuple[float, float]:
    """Send a signal to a rank in a stream; return when the stream ended, and the next answer."""
    body = text_body("demo", LONG_TEXT, temperature=0, stream=True)
    with client.stream("POST", _CHAT, json=body) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"content":"' in line)
        at_s = time.monotonic()
        os.kill(_ranks(worker)[rank], number)
        rest = [line for line in lines if line]
    assert "error" in rest[-1], rest[-1]
    ended_s = time.monotonic() - at_s
    return ended_s, _answered_after_s(client, at_s)


def _leave(client: httpx.Client, **fields: object) -> float:
    """Leave a request after its first bytes; return when the group has answered another one."""
    body = text_body("demo", LONG_TEXT, max_tokens=64, **fields)
    try:
        with client.stream("POST", _CHAT, json=body, timeout=1.0) as response:
            next(response.iter_lines())
    except httpx.ReadTimeout:
        pass  # an answer that is not streamed has no first bytes
    return _answered_after_s(client, time.monotonic())


def main() -> None:
    rows: list[tuple[str, str, str]] = []
    progress = Progress(console=Console(stderr=True))
    with tempfile.TemporaryDirectory() as folder, progress:
        task = progress.add_task("group", total=len(_LEFT) + 2 * len(_SIGNALS))
        hosts = Path(folder, "hosts.json")
        hosts.write_text(json.dumps([{"ips": ["127.0.0.1"]}] * 2))
        with worker_process("--group", str(hosts), "--port", "0") as process:
            worker = wait_until_ready(process)
            with httpx.Client(base_url=worker.url, timeout=_WITHIN_S) as client:
                for fields in _LEFT:
                    before = _ranks(worker)
                    answered_s = _leave(client, **fields)
                    assert _ranks(worker) == before, "the group died"
                    name = f"a client leaves {json.dumps(fields)}"
                    rows.append((name, MISSING, f"{answered_s:.1f} s"))
                    progress.advance(task)
                for number in _SIGNALS:
                    for rank in (0, 1):
                        ended_s, again_s = _fault(worker, client, rank, number)
                        name = f"{number.name} of rank {rank}"
                        rows.append((name, f"{ended_s:.1f} s", f"{again_s:.1f} s"))
                        progress.advance(task)
    columns = ("fault", "stream ended after", "answered again after")
    grid = Grid(title="Two ranks under faults", columns=columns, rows=tuple(rows))
    Console().print(grid.to_table())
    about = f"Measured {provenance()}, demo checkpoint, by `python -m bench.engines.group`."
    write_page(RESULTS, "A group of ranks", about, grid)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engines.group")
    main()
