"""What signals do to a real gateway process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.line_process import PATIENCE_S, Paceline, paceline
from tests.gateway.fake_worker import DONE, TOKEN, FakeWorker
from tests.gateway.serving import chat_body, eventually


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


def ready(client: httpx.Client) -> bool:
    return client.get("/readyz").status_code == 200


def test_f35_sigterm_is_told_at_once_and_new_requests_are_served_until_that_is_noticed(
    tmp_path: Path, worker: FakeWorker
) -> None:
    worker.script.hang_after = 2
    with gateway_process(tmp_path, worker, LAME_DUCK_S="3") as (gateway, client):
        assert ready(client)
        with client.stream(
            "POST", "/v1/chat/completions", json=chat_body(stream=True)
        ) as before_the_signal:
            pieces = before_the_signal.iter_raw()
            received = next(pieces)
            gateway.process.send_signal(signal.SIGTERM)
            eventually(lambda: not ready(client))
            assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
            worker.go_on.set()
            received += b"".join(pieces)
        assert received.endswith(DONE)
        assert gateway.wait_for_end() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_f36_a_second_signal_ends_it_now(
    tmp_path: Path, worker: FakeWorker, second: signal.Signals
) -> None:
    worker.script.hang_after = 2
    with gateway_process(tmp_path, worker, LAME_DUCK_S="600") as (gateway, client):
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as answer:
            pieces = answer.iter_raw()
            received = next(pieces)
            gateway.process.send_signal(signal.SIGTERM)
            eventually(lambda: not ready(client))
            gateway.process.send_signal(second)
            received += b"".join(pieces)
        assert b'"code":"gateway_stopping"' in received
        assert b"[DONE]" not in received
        assert gateway.wait_for_end() == 0


def test_f35_what_does_not_finish_in_time_gets_the_error_event(
    tmp_path: Path, worker: FakeWorker
) -> None:
    worker.script.hang_after = 2
    bounds = {"LAME_DUCK_S": "0", "DRAIN_TIMEOUT_S": "0.2"}
    with gateway_process(tmp_path, worker, **bounds) as (gateway, client):
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as answer:
            pieces = answer.iter_raw()
            received = next(pieces)
            gateway.process.send_signal(signal.SIGTERM)
            received += b"".join(pieces)
        assert b'"code":"gateway_stopping"' in received
        assert gateway.wait_for_end() == 0
