"""A scripted worker in a process that a test can kill; its port accepts scripts."""

import asyncio
import multiprocessing
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from paceline.protocol import WorkerReport
from tests.support.running_gateway import RunningGateway, running_server
from tests.support.scripted_worker import FAULT_PATH, JOIN_TOKEN, USAGE, ScriptedWorker, lane_report
from workers.heartbeat import Membership, joined

_ROOT = Path(__file__).parents[2]
_FORKS = multiprocessing.get_context("forkserver")
"""Imports this module once: a process of its own would take a second of CPU time to start."""
_FORKS.set_forkserver_preload([__name__, "pytest"])


class ScriptedWorkerProcess:
    def __init__(self, worker_id: str, process: ForkServerProcess, url: str) -> None:
        self._process = process
        self.worker_id = worker_id
        self.url = url

    def fault(self, **script: Any) -> None:
        """Set the fields of `Script` for further answers."""
        httpx.post(f"{self.url}{FAULT_PATH}", json=script, timeout=60).raise_for_status()

    def join(self, gateway: RunningGateway) -> None:
        report = ScriptedWorker(worker_id=self.worker_id)
        report.socket.close()
        assert gateway.send_heartbeat(report, url=self.url).status_code == 200

    def answering(self) -> int:
        """Return the number of used rows, as reported by the worker."""
        return httpx.get(f"{self.url}/v1/status", timeout=60).json()["answering"]

    def kill(self) -> None:
        """Kill the process, as a failed Metal allocation does, with all its answers."""
        self._process.kill()
        self._process.join()


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


@contextmanager
def scripted_worker_process(
    worker_id: str = "killable", joins: str = "", port: int = 0
) -> Iterator[ScriptedWorkerProcess]:
    """Run a scripted worker until the context ends or the test kills it.

    With `joins`, the URL of a gateway, it sends heartbeats there.
    """
    ours, theirs = _FORKS.Pipe()
    process = _FORKS.Process(target=_serve, args=(theirs, worker_id, joins, port))
    with ours, _importable():
        process.start()
        theirs.close()
        running = ScriptedWorkerProcess(worker_id, process, ours.recv())
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def _importable() -> Iterator[None]:
    """Let the server of forks import this module, wherever the test runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(_ROOT))
        yield


def _serve(parent: Connection, worker_id: str, gateway_url: str, port: int) -> None:
    """Serve until the process is killed, or its parent ends."""
    worker = ScriptedWorker(worker_id=worker_id)
    if gateway_url:
        worker = CountingWorker(worker_id, boot_id=secrets.token_hex(4), port=port)
    with running_server(worker, sockets=[worker.socket]):
        parent.send(worker.url)
        if gateway_url:
            asyncio.run(_send_heartbeats(worker, gateway_url, parent))
        _await_end(parent)


def _await_end(parent: Connection) -> None:
    with suppress(EOFError):
        parent.recv()


async def _send_heartbeats(worker: ScriptedWorker, gateway_url: str, parent: Connection) -> None:
    """Send heartbeats as real workers do, until the parent ends."""
    membership = Membership(
        gateway_url=gateway_url,
        token=SecretStr(JOIN_TOKEN),
        worker_id=worker.worker_id,
        report=worker.report,
        changed=asyncio.Event(),
    )
    async with joined(membership):
        await asyncio.to_thread(_await_end, parent)
