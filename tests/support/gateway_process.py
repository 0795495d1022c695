"""A gateway in a process, which a test can signal, kill or stop."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.support.heartbeats import repeated
from tests.support.paceline_process import TIMEOUT_S, PacelineProcess, start_paceline
from tests.support.running_gateway import ADMIN_KEY
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker


@contextlib.contextmanager
def running_gateway_process(
    folder: Path, worker: ScriptedWorker, **settings: str
) -> Iterator[tuple[PacelineProcess, httpx.Client]]:
    """Run `start_paceline gateway` with a worker that joins it and sends heartbeats."""
    environment = {f"PACELINE_{name}": value for name, value in settings.items()}
    environment |= {"PACELINE_JOIN_TOKEN": JOIN_TOKEN, "PACELINE_ADMIN_KEY": ADMIN_KEY}
    with start_paceline(
        "gateway", "--port", "0", environment=environment, folder=folder
    ) as process:
        running = PacelineProcess(process)
        url = running.wait_for(r"Paceline listens on (\S+)")[1]
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            path = f"/admin/v1/workers/{worker.worker_id}"
            headers = {"authorization": f"Bearer {JOIN_TOKEN}"}

            def send_heartbeat() -> httpx.Response:
                report = worker.report().model_dump(mode="json")
                return httpx.put(url + path, json=report, headers=headers, timeout=TIMEOUT_S)

            with repeated(send_heartbeat):
                yield running, client
