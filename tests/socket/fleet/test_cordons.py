"""Cordons: a cordoned worker gets no new requests and finishes the running ones."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.support.log_capture import LogCapture
from tests.support.running_gateway import (
    RunningGateway,
    begun,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker

PATH = "/admin/v1/workers"


def workers(gateway: RunningGateway) -> dict[str, dict[str, Any]]:
    entries = gateway.admin.get(PATH).json()["workers"]
    return {worker["worker_id"]: worker for worker in entries}


def cordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.put(f"{PATH}/{name}/cordon")


def uncordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.delete(f"{PATH}/{name}/cordon")


def drain(gateway: RunningGateway, **query: str | int) -> httpx.Response:
    return gateway.admin.post(f"{PATH}/fake-a/drain", params=query)


def test_a_cordoned_worker_gets_no_request_until_it_is_uncordoned(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway = gateway_with_worker
    gateway.join(second_worker)
    response = cordon(gateway)
    assert response.status_code == 200
    assert (response.json()["state"], response.json()["in_flight"]) == ("cordoned", 0)
    assert "cordoned_since" in response.json()
    assert {gateway.chat().headers["x-paceline-worker"] for _ in range(6)} == {"fake-b"}
    assert gateway.status()["workers"]["fake-a"]["state"] == "cordoned"
    assert uncordon(gateway).status_code == 204
    assert "cordoned_since" not in workers(gateway)["fake-a"]
    wait_until(lambda: gateway.chat().headers["x-paceline-worker"] == "fake-a")
    assert drain(gateway, timeout_s=0).json()["drained"], "without a wait, if it is idle"


def test_a_cordon_records_its_time_and_author(tmp_path: Path, worker: ScriptedWorker) -> None:
    settings = make_settings(tmp_path)
    author = {"x-paceline-author": quote("Jörg")}
    with RunningGateway(settings) as gateway:
        gateway.join(worker)
        cordon(gateway)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "admin"
        gateway.admin.put(f"{PATH}/fake-a/cordon", headers=author)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "admin", "the author of the first one"
        uncordon(gateway)
        gateway.admin.post(f"{PATH}/fake-a/drain", headers=author)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "Jörg"
    with RunningGateway(settings) as gateway:
        gateway.join(worker)
        entry = workers(gateway)["fake-a"]
        assert entry["cordoned_by"] == "Jörg"
        assert datetime.fromisoformat(entry["cordoned_since"]).utcoffset() == timedelta(0)
        uncordon(gateway)
        assert "cordoned_by" not in workers(gateway)["fake-a"]
        invalid = gateway.admin.put(f"{PATH}/fake-a/cordon", headers={"x-paceline-author": "a%0Ab"})
        assert status_and_code(invalid) == (400, "invalid_value")


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


def test_a_cordon_survives_restarts_of_worker_and_gateway_and_holds_at_all_gateways(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """An admin cordons a worker to stop, change and start it again."""
    settings = make_settings(tmp_path)
    with RunningGateway(settings) as gateway:
        gateway.join(worker)
        cordon(gateway)
        gateway.remove_worker(worker)
        removed = workers(gateway)["fake-a"]
        assert (removed["state"], removed["lanes"]) == ("gone", [])
        gateway.join(worker, boot_id="boot-2")
        assert workers(gateway)["fake-a"]["state"] == "cordoned"
    with RunningGateway(settings) as gateway, RunningGateway(settings) as other:
        gateway.join(worker)
        other.join(worker)
        assert status_and_code(gateway.chat()) == (503, "no_worker")
        ready = gateway.client.get("/readyz")
        assert (ready.status_code, ready.text) == (503, "no worker: fake-a (cordoned)\n")
        assert uncordon(gateway).status_code == 204
        assert gateway.chat().status_code == 200
        wait_until(lambda: workers(other)["fake-a"]["state"] == "ready")
        cordon(other)
        wait_until(lambda: workers(gateway)["fake-a"]["state"] == "cordoned")
    assert len(worker.requests) == 1


def test_drain_returns_once_no_request_is_running_and_the_stream_completes(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with begun(gateway_with_worker.stream()) as read, ThreadPoolExecutor(1) as executor:
        immediate = drain(gateway_with_worker, timeout_s=0).json()
        told = (immediate["drained"], immediate["in_flight"], immediate["state"])
        assert told == (False, 1, "cordoned")
        drained = executor.submit(drain, gateway_with_worker)
        assert not drain(gateway_with_worker, timeout_s=1).json()["drained"]
        assert not drained.done()
        worker.resume.set()
        assert read().endswith(DONE)
        last = drained.result(30).json()
    assert (last["drained"], last["in_flight"]) == (True, 0)


def test_an_unknown_worker_returns_404_and_an_invalid_drain_timeout_400(module_gateway) -> None:
    for method, action in (("PUT", "cordon"), ("DELETE", "cordon"), ("POST", "drain")):
        response = module_gateway.admin.request(method, f"{PATH}/unknown/{action}")
        assert status_and_code(response) == (404, "worker_not_found")
    for timeout_s in ("-1", "601", "1.5", "", "ten", "٣"):
        response = drain(module_gateway, timeout_s=timeout_s)
        assert status_and_code(response) == (400, "invalid_value")
        assert response.json()["error"]["param"] == "timeout_s"
    assert workers(module_gateway)["fake-a"]["state"] == "ready"


def test_c15_an_unreadable_cordon_stops_no_start_and_no_edit(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker, log_capture: LogCapture
) -> None:
    cordoned = {"since": "2026-11-22T01:20:00Z", "author": "ann"}
    cordons = {
        "fake-a": {**cordoned, "until": "later"},
        "fake-b": {"since": "2026-11-01T08:00:00Z"},  # of a version without authors
        "x": {"since": "soon"},
    }
    (tmp_path / "state.json").write_text(json.dumps({"cordons": cordons}))
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.join(worker)
        gateway.join(second_worker)
        states = {name: one["state"] for name, one in workers(gateway).items()}
        assert states == {"fake-a": "ready", "fake-b": "cordoned"}
        assert workers(gateway)["fake-b"]["cordoned_by"] == "unknown"
        for worker_id in ("fake-a", "fake-b"):
            assert cordon(gateway, worker_id).status_code == 200
            assert workers(gateway)[worker_id]["state"] == "cordoned"
            assert uncordon(gateway, worker_id).status_code == 204
            assert workers(gateway)[worker_id]["state"] == "ready"
        told = "This gateway cannot use what is stored as cordons x. Its log says why."
        assert gateway.client.get("/readyz").text == f"ready, degraded: {told}\n"
        assert gateway.status()["store"]["record_problem"] == told
        assert uncordon(gateway, "x").status_code == 204
        assert gateway.client.get("/readyz").text == "ready\n"
    skipped = [text for text in log_capture.texts if text.startswith("record.skipped")]
    assert skipped == [
        "record.skipped kind=cordons name='fake-a' why=until: unknown field",
        "record.skipped kind=cordons name='x' why=since: it must be a time like "
        "2026-01-31T18:00:00Z",
    ]
