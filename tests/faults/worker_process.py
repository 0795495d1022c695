"""A fake worker as a process of its own, so that a test can kill it. Faults come by its port."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.fake_worker import FAULT_PATH, FakeWorker
from tests.gateway.serving import Gateway, serving

_ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """A running worker process."""

    def __init__(self, worker_id: str, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.worker_id = worker_id
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def fault(self, **script: Any) -> None:
        """Set the fields of `Script` for the answers from now on."""
        httpx.post(f"{self.url}{FAULT_PATH}", json=script).raise_for_status()

    def join(self, gateway: Gateway) -> None:
        report = FakeWorker(worker_id=self.worker_id)
        report.socket.close()
        assert gateway.join(report, url=self.url).status_code == 200

    def answering(self) -> int:
        """Count the rows that are taken, as the worker sees it."""
        count: int = httpx.get(f"{self.url}/v1/status").json()["answering"]
        return count

    def kill(self) -> None:
        """End the process as a failed allocation on Metal does: at once, with all its answers."""
        self._process.kill()
        self._process.wait()


@contextmanager
def worker_process(worker_id: str = "killable") -> Iterator[WorkerProcess]:
    """Run a fake worker until the context ends, or the test kills it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.worker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    ) as process:
        running = WorkerProcess(worker_id, process)
        try:
            yield running
        finally:
            running.kill()


def main() -> None:
    """Serve until standard input closes, or the process is killed."""
    worker = FakeWorker()
    with serving(worker, sockets=[worker.socket]):
        sys.stdout.write(worker.url + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
