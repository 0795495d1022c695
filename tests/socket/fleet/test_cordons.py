"""Cordons: a cordoned worker gets no new requests and finishes the running ones."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from pydantic import SecretStr

from tests.support.log_capture import LogCapture
from tests.support.running_gateway import RunningGateway, make_settings, status_and_code, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

PATH = "/admin/v1/workers"


def workers(gateway: RunningGateway) -> dict[str, dict[str, Any]]:
    entries = gateway.admin.get(PATH).json()["workers"]
    return {worker["worker_id"]: worker for worker in entries}


def cordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.put(f"{PATH}/{name}/cordon")


def uncordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.delete(f"{PATH}/{name}/cordon")


def requests_per_worker(gateway: RunningGateway, *fake_workers: ScriptedWorker) -> list[int]:
    """Send six requests and return the number that each worker received."""
    before = [len(fake.requests) for fake in fake_workers]
    assert [gateway.chat().status_code for _ in range(6)] == [200] * 6
    return [
        len(fake.requests) - earlier for fake, earlier in zip(fake_workers, before, strict=True)
    ]


def test_a_cordoned_worker_gets_no_request_until_it_is_uncordoned(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    response = cordon(gateway_with_worker)
    assert response.status_code == 200
    assert (response.json()["state"], response.json()["in_flight"]) == ("cordoned", 0)
    assert "cordoned_since" in response.json()
    assert requests_per_worker(gateway_with_worker, worker, second_worker) == [0, 6]
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "cordoned"
    assert uncordon(gateway_with_worker).status_code == 204
    assert "cordoned_since" not in workers(gateway_with_worker)["fake-a"]
    wait_until(lambda: requests_per_worker(gateway_with_worker, worker, second_worker)[0] > 0)


def test_a_cordon_records_its_time_and_author(tmp_path: Path, worker: ScriptedWorker) -> None:
    settings = make_settings(tmp_path)
    settings_with_key = settings.model_copy(update={"admin_key": SecretStr("admin-key")})
    author = {"x-paceline-author": quote("Jörg")}
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        cordon(gateway)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "admin"
        gateway.admin.put(f"{PATH}/fake-a/cordon", headers=author)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "admin", (
            "a second cordon does not change the author"
        )
        uncordon(gateway)
        gateway.admin.post(f"{PATH}/fake-a/drain", headers=author)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "Jörg"
    with RunningGateway(settings_with_key) as gateway:
        gateway.send_heartbeat(worker)
        entry = workers(gateway)["fake-a"]
        assert entry["cordoned_by"] == "Jörg"
        assert datetime.fromisoformat(entry["cordoned_since"]).utcoffset() == timedelta(0)
        uncordon(gateway)
        assert "cordoned_by" not in workers(gateway)["fake-a"]
        cordon(gateway)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "admin"
        invalid = gateway.admin.put(f"{PATH}/fake-a/cordon", headers={"x-paceline-author": "a%0Ab"})
        assert status_and_code(invalid) == (400, "invalid_value")


def test_a_stored_cordon_without_an_author_stays_in_force(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    state = '{"cordons": {"fake-a": {"since": "2026-11-01T08:00:00Z"}}}'
    (tmp_path / "state.json").write_text(state)
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "unknown"
        assert workers(gateway)["fake-a"]["state"] == "cordoned"


def test_a_running_stream_on_a_cordoned_worker_completes(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        assert cordon(gateway_with_worker).json()["in_flight"] == 1
        worker.resume.set()
        assert "data: [DONE]" in list(lines)


def test_with_all_workers_cordoned_requests_return_503(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    cordon(gateway_with_worker)
    assert status_and_code(gateway_with_worker.chat()) == (503, "no_worker")
    assert gateway_with_worker.client.get("/readyz").status_code == 503
    assert not worker.requests


def test_a_queued_request_is_served_after_the_worker_is_uncordoned(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """The fifth request finds no free slot and queues; a cordon does not reject it."""
    worker.script = Script(hang=True)
    with ThreadPoolExecutor(5) as executor:
        responses = [executor.submit(gateway_with_worker.chat) for _ in range(5)]
        wait_until(lambda: gateway_with_worker.status()["pools"]["vlm"]["waiting"] == 1)
        cordon(gateway_with_worker)
        worker.resume.set()
        wait_until(lambda: sum(response.done() for response in responses) == 4)
        assert len(worker.requests) == 4
        uncordon(gateway_with_worker)
        assert [response.result().status_code for response in responses] == [200] * 5


def test_a_cordon_survives_restarts_of_worker_and_gateway(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """An admin cordons a worker to stop, change and start it again."""
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        cordon(gateway)
        gateway.remove_worker(worker)
        removed = workers(gateway)["fake-a"]
        assert (removed["state"], removed["lanes"]) == ("gone", [])
        gateway.send_heartbeat(worker, boot_id="boot-2")
        assert workers(gateway)["fake-a"]["state"] == "cordoned"
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        assert status_and_code(gateway.chat()) == (503, "no_worker")
        assert uncordon(gateway).status_code == 204
        assert gateway.chat().status_code == 200


def test_gateways_with_shared_state_share_cordons(tmp_path: Path, worker: ScriptedWorker) -> None:
    settings = make_settings(tmp_path)
    with RunningGateway(settings) as first, RunningGateway(settings) as second:
        first.send_heartbeat(worker)
        second.send_heartbeat(worker)
        cordon(first)
        wait_until(lambda: workers(second)["fake-a"]["state"] == "cordoned")
        uncordon(second)
        wait_until(lambda: workers(first)["fake-a"]["state"] == "ready")


def test_drain_returns_once_no_request_is_running(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        immediate = gateway_with_worker.admin.post(f"{PATH}/fake-a/drain?timeout_s=0").json()
        assert (immediate["drained"], immediate["in_flight"], immediate["state"]) == (
            False,
            1,
            "cordoned",
        )
        responses: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: responses.append(
                gateway_with_worker.admin.post(f"{PATH}/fake-a/drain").json()
            )
        )
        thread.start()
        time.sleep(0.3)  # the drain has found the request at least once
        assert not responses
        worker.resume.set()
        list(lines)
        thread.join(timeout=30)
    assert (responses[0]["drained"], responses[0]["in_flight"]) == (True, 0)


def test_an_idle_worker_is_drained_without_a_wait(gateway_with_worker: RunningGateway) -> None:
    response = gateway_with_worker.admin.post(f"{PATH}/fake-a/drain?timeout_s=0")
    assert response.json()["drained"]


def test_an_uncordon_ends_a_waiting_drain(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        responses: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: responses.append(
                gateway_with_worker.admin.post(f"{PATH}/fake-a/drain?timeout_s=600").json()
            )
        )
        thread.start()
        headers = gateway_with_worker.admin.headers
        with httpx.Client(base_url=gateway_with_worker.url, headers=headers, timeout=60) as client:
            wait_until(lambda: workers(gateway_with_worker)["fake-a"]["state"] == "cordoned")
            assert client.delete(f"{PATH}/fake-a/cordon").status_code == 204
        thread.join(timeout=30)
        assert not responses[0]["drained"]
        worker.resume.set()
        assert "data: [DONE]" in list(lines)


@pytest.mark.parametrize(
    ("method", "action"), [("PUT", "cordon"), ("DELETE", "cordon"), ("POST", "drain")]
)
def test_an_unknown_worker_returns_404(
    gateway_with_worker: RunningGateway, method: str, action: str
) -> None:
    response = gateway_with_worker.admin.request(method, f"{PATH}/unknown/{action}")
    assert status_and_code(response) == (404, "worker_not_found")


@pytest.mark.parametrize("timeout_s", ["-1", "601", "1.5", "", "ten", "٣"])
def test_an_invalid_drain_timeout_returns_400(
    gateway_with_worker: RunningGateway, timeout_s: str
) -> None:
    response = gateway_with_worker.admin.post(
        f"{PATH}/fake-a/drain", params={"timeout_s": timeout_s}
    )
    assert (status_and_code(response), response.json()["error"]["param"]) == (
        (400, "invalid_value"),
        "timeout_s",
    )
    assert workers(gateway_with_worker)["fake-a"]["state"] == "ready"


def test_c15_an_unreadable_cordon_stops_no_start_and_no_edit(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker, log_capture: LogCapture
) -> None:
    cordon = {"since": "2026-11-22T01:20:00Z", "author": "ann"}
    cordons = {"fake-a": {**cordon, "until": "later"}, "fake-b": cordon, "x": {"since": "soon"}}
    (tmp_path / "state.json").write_text(json.dumps({"cordons": cordons}))
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        gateway.send_heartbeat(second_worker)
        assert {name: one["state"] for name, one in workers(gateway).items()} == {
            "fake-a": "ready",
            "fake-b": "cordoned",
        }
        for worker_id in ("fake-a", "fake-b"):
            assert gateway.admin.put(f"{PATH}/{worker_id}/cordon").status_code == 200
            assert workers(gateway)[worker_id]["state"] == "cordoned"
            assert gateway.admin.delete(f"{PATH}/{worker_id}/cordon").status_code == 204
            assert workers(gateway)[worker_id]["state"] == "ready"
    skipped = [text for text in log_capture.texts if text.startswith("record.skipped")]
    assert skipped == [f"record.skipped kind=cordons name='{name}'" for name in ("fake-a", "x")]
