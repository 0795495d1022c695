"""Heartbeats: authentication, validation, and the requests that workers get because of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker

BEARER = {"authorization": f"Bearer {JOIN_TOKEN}"}


def lane_with(**counts: Any) -> dict[str, Any]:
    """Return lanes of a report, with counts that may be inconsistent."""
    return {"lanes": [{"name": "vlm", "speculation": counts}]}


def test_a_heartbeat_requires_the_join_token(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    report = worker.report().model_dump(mode="json")
    for headers in ({}, {"authorization": "Bearer wrong"}):
        response = gateway.client.put("/admin/v1/workers/fake-a", headers=headers, json=report)
        assert response.status_code == 401
        response = gateway.client.delete("/admin/v1/workers/fake-a", headers=headers)
        assert response.status_code == 401
    response = gateway.client.put("/admin/v1/workers/fake-a", headers=BEARER, json=report)
    assert response.json() == {"interval_s": 2.0}


def test_an_invalid_field_of_a_heartbeat_is_named(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    report = worker.report().model_dump(mode="json")
    for change, param in (
        ({"worker_id": "other"}, "worker_id"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://mac:9200/"}, "url"),
        ({"url": "http://mac:9200/v1"}, "url"),
        ({"url": "http://user@mac:9200"}, "url"),
        ({"secret": 1}, "secret"),
        ({"lanes": [{"name": "vlm", "running": -1}]}, "lanes.0.running"),
        (lane_with(drafted=1, accepted=2), "lanes.0.speculation"),
        (lane_with(drafted=1, accepted=1, errors=1), "lanes.0.speculation"),
        (lane_with(steps=1, histogram=[1, 1]), "lanes.0.speculation"),
    ):
        response = gateway.client.put(
            "/admin/v1/workers/fake-a", headers=BEARER, json={**report, **change}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_heartbeat_over_the_size_limit_is_rejected(gateway: RunningGateway) -> None:
    response = gateway.client.put("/admin/v1/workers/a", headers=BEARER, content=b" " * 300_000)
    assert response.status_code == 413


def test_a_deregistered_worker_gets_no_requests(gateway_with_worker: RunningGateway) -> None:
    assert (
        gateway_with_worker.client.delete("/admin/v1/workers/fake-a", headers=BEARER).status_code
        == 204
    )
    assert gateway_with_worker.chat().status_code == 503
    assert gateway_with_worker.client.get("/readyz").status_code == 503
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "gone"


def test_a_second_live_worker_with_the_same_id_gets_409(
    gateway_with_worker: RunningGateway,
) -> None:
    other = ScriptedWorker(worker_id="fake-a", boot_id="boot-2")
    other.socket.close()
    response = gateway_with_worker.send_heartbeat(other)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "worker_id_taken")


def test_starting_and_draining_workers_get_no_requests(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(worker, ready=False)
    assert gateway_with_worker.chat().status_code == 503
    gateway_with_worker.send_heartbeat(worker, draining=True)
    assert gateway_with_worker.chat().status_code == 503
    gateway_with_worker.send_heartbeat(worker)
    assert gateway_with_worker.chat().status_code == 200


def test_two_workers_share_the_load(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script.hang = second_worker.script.hang = True
    with ThreadPoolExecutor(8) as pool:
        responses = [pool.submit(gateway_with_worker.chat) for _ in range(8)]
        while len(worker.requests) + len(second_worker.requests) < 8:
            worker.request_received.wait(0.05)
        assert (len(worker.requests), len(second_worker.requests)) == (4, 4)
        lanes = gateway_with_worker.status()["pools"]["vlm"]
        assert (lanes["in_flight"], lanes["slots"], lanes["workers"]) == (
            8,
            8,
            ["fake-a", "fake-b"],
        )
        worker.resume.set()
        second_worker.resume.set()
        assert {response.result().status_code for response in responses} == {200}
    assert gateway_with_worker.status()["pools"]["vlm"]["in_flight"] == 0


def test_without_an_mtp_worker_greedy_text_runs_on_vlm_with_its_reason(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.lanes = ("vlm",)
    gateway.send_heartbeat(worker)
    response = gateway.chat(temperature=0)
    assert response.headers["x-paceline-pool"] == "vlm"
    assert response.headers["x-paceline-reason"] == "no_mtp_worker"


def test_livez_and_readyz_report_liveness_and_readiness(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    assert gateway.client.get("/livez").status_code == 200
    assert gateway.client.get("/readyz").status_code == 503
    assert gateway.client.get("/health").status_code == 503
    gateway.send_heartbeat(worker)
    assert gateway.client.get("/readyz").status_code == 200
    assert gateway.client.get("/health").status_code == 200, "the path that clients of vLLM probe"
