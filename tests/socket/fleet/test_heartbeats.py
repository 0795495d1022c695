"""Heartbeats: who may send them, what is refused in them, and who is given work by them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import TOKEN, FakeWorker

BEARER = {"authorization": f"Bearer {TOKEN}"}


def lane_with(**counts: Any) -> dict[str, Any]:
    """Lanes of a report, with counts that need not be possible."""
    return {"lanes": [{"name": "vlm", "speculation": counts}]}


def test_a_heartbeat_needs_the_join_token(gateway: RunningGateway, worker: FakeWorker) -> None:
    report = worker.report().model_dump(mode="json")
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = gateway.client.put("/admin/v1/workers/fake-a", headers=headers, json=report)
        assert answer.status_code == 401
        answer = gateway.client.delete("/admin/v1/workers/fake-a", headers=headers)
        assert answer.status_code == 401
    answer = gateway.client.put("/admin/v1/workers/fake-a", headers=BEARER, json=report)
    assert answer.json() == {"beat_s": 2.0}


def test_a_heartbeat_with_a_wrong_field_names_it(
    gateway: RunningGateway, worker: FakeWorker
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
        answer = gateway.client.put(
            "/admin/v1/workers/fake-a", headers=BEARER, json={**report, **change}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_heartbeat_is_bounded(gateway: RunningGateway) -> None:
    answer = gateway.client.put("/admin/v1/workers/a", headers=BEARER, content=b" " * 300_000)
    assert answer.status_code == 413


def test_a_worker_that_says_goodbye_gets_nothing_more(line: RunningGateway) -> None:
    assert line.client.delete("/admin/v1/workers/fake-a", headers=BEARER).status_code == 204
    assert line.chat().status_code == 503
    assert line.client.get("/readyz").status_code == 503
    assert line.status()["workers"]["fake-a"]["state"] == "gone"


def test_a_second_live_worker_with_the_same_id_is_a_409(line: RunningGateway) -> None:
    other = FakeWorker(worker_id="fake-a", boot_id="boot-2")
    other.socket.close()
    answer = line.join(other)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "worker_id_taken")


def test_starting_and_draining_workers_get_nothing_new(
    line: RunningGateway, worker: FakeWorker
) -> None:
    line.join(worker, ready=False)
    assert line.chat().status_code == 503
    line.join(worker, draining=True)
    assert line.chat().status_code == 503
    line.join(worker)
    assert line.chat().status_code == 200


def test_two_workers_share_the_load(
    line: RunningGateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    line.join(second_worker)
    worker.script.hang = second_worker.script.hang = True
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(line.chat) for _ in range(8)]
        while len(worker.heard) + len(second_worker.heard) < 8:
            worker.hearing.wait(0.05)
        assert (len(worker.heard), len(second_worker.heard)) == (4, 4)
        lanes = line.status()["pools"]["vlm"]
        assert (lanes["in_flight"], lanes["slots"], lanes["workers"]) == (
            8,
            8,
            ["fake-a", "fake-b"],
        )
        worker.go_on.set()
        second_worker.go_on.set()
        assert {answer.result().status_code for answer in asked} == {200}
    assert line.status()["pools"]["vlm"]["in_flight"] == 0


def test_without_an_mtp_worker_greedy_text_runs_on_vlm_and_says_so(
    gateway: RunningGateway, worker: FakeWorker
) -> None:
    worker.lanes = ("vlm",)
    gateway.join(worker)
    answer = gateway.chat(temperature=0)
    assert answer.headers["x-paceline-pool"] == "vlm"
    assert answer.headers["x-paceline-reason"] == "no_mtp_worker"


def test_probes_tell_alive_from_ready(gateway: RunningGateway, worker: FakeWorker) -> None:
    assert gateway.client.get("/livez").status_code == 200
    assert gateway.client.get("/readyz").status_code == 503
    assert gateway.client.get("/health").status_code == 503
    gateway.join(worker)
    assert gateway.client.get("/readyz").status_code == 200
    assert gateway.client.get("/health").status_code == 200, "where tools made for vLLM ask"
