"""A scripted worker in a process that a test can kill; its port accepts scripts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import SecretStr

from tests.support.http_server import serve_connections
from tests.support.scripted_worker import FAULT_PATH, JOIN_TOKEN, USAGE, ScriptedWorker, lane_report
from workers.heartbeat import Membership, joined
from workers.protocol import WorkerReport

if TYPE_CHECKING:  # of all that a worker does not need, a gateway takes longest to load
    from tests.support.running_gateway import RunningGateway

_ROOT = Path(__file__).parents[2]


class ScriptedWorkerProcess:
    """A running worker process."""

    def __init__(self, worker_id: str, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.worker_id = worker_id
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def fault(self, **script: Any) -> None:
        """Set the fields of `Script` for further answers."""
        httpx.post(f"{self.url}{FAULT_PATH}", json=script, timeout=60).raise_for_status()

    def join(self, gateway: RunningGateway) -> None:
        report = ScriptedWorker(worker_id=self.worker_id)
        report.socket.close()
        assert gateway.send_heartbeat(report, url=self.url).status_code == 200

    def answering(self) -> int:
        """Return the number of used rows, as reported by the worker."""
        count: int = httpx.get(f"{self.url}/v1/status", timeout=60).json()["answering"]
        return count

    def kill(self) -> None:
        """Kill the process, as a failed Metal allocation does, with all its answers."""
        self._process.kill()
        self._process.wait()


class CountingWorker(ScriptedWorker):
    """A scripted worker that reports the counts of the answers of its boot."""

    def report(self, **changes: Any) -> WorkerReport:
        answers = sum(request.generated for request in self.requests)
        lane = lane_report(
            "vlm",
            slots=64,
            running=self.in_flight,
            requests=answers,
            prompt_tokens=answers * USAGE["prompt_tokens"],
            completion_tokens=answers * USAGE["completion_tokens"],
        )
        return super().report(lanes=[lane.model_dump()], **changes)


@contextlib.contextmanager
def scripted_worker_process(
    worker_id: str = "killable", joins: str = "", port: int = 0
) -> Iterator[ScriptedWorkerProcess]:
    """Run a scripted worker until the context ends or the test kills it.

    With `joins`, the URL of a gateway, it sends heartbeats there.
    """
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.scripted_worker_process",
            worker_id,
            joins,
            str(port),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    ) as process:
        running = ScriptedWorkerProcess(worker_id, process)
        try:
            yield running
        finally:
            running.kill()


async def main() -> None:
    """Serve until standard input closes, or the process is killed."""
    worker_id, gateway_url, port = sys.argv[1:]
    worker = ScriptedWorker(worker_id=worker_id)
    if gateway_url:
        worker = CountingWorker(worker_id, boot_id=secrets.token_hex(4), port=int(port))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serve_connections(worker.socket, worker))
        sys.stdout.write(worker.url + "\n")
        sys.stdout.flush()
        if gateway_url:  # as real workers do
            membership = Membership(
                gateway_url=gateway_url,
                token=SecretStr(JOIN_TOKEN),
                worker_id=worker.worker_id,
                report=worker.report,
                changed=asyncio.Event(),
            )
            await stack.enter_async_context(joined(membership))
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
