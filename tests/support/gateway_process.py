"""A gateway as a process of its own, so that a test can send it signals, kill it or starve it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.support.paceline_process import PATIENCE_S, Paceline, paceline
from tests.support.scripted_worker import TOKEN, FakeWorker


@contextlib.contextmanager
def gateway_process(
    folder: Path, worker: FakeWorker, **settings: str
) -> Iterator[tuple[Paceline, httpx.Client]]:
    """Run `paceline gateway` with a worker that has joined it."""
    environment = {f"PACELINE_{name}": value for name, value in settings.items()}
    environment["PACELINE_JOIN_TOKEN"] = TOKEN
    with paceline("gateway", "--port", "0", environment=environment, folder=folder) as process:
        running = Paceline(process)
        url = running.wait_for(r"Paceline listens on (\S+)")[1]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            report = worker.report().model_dump(mode="json")
            headers = {"authorization": f"Bearer {TOKEN}"}
            client.put(f"/admin/v1/workers/{worker.worker_id}", json=report, headers=headers)
            yield running, client
