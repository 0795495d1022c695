"""What signals do to a real gateway process."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests.support.gateway_process import gateway_process
from tests.support.running_gateway import chat_body, eventually
from tests.support.scripted_worker import DONE, FakeWorker


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
