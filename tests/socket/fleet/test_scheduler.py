"""Slots, lines, spilling and retries, seen from the client's and the worker's sockets."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from policies.document import DEFAULT_FILE
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker, lane_report

Asked = Future[httpx.Response]


def join(gateway: RunningGateway, worker: ScriptedWorker, *, slots: int = 1) -> None:
    """Let a worker join that says in every report that each lane has so many slots."""
    lanes = [lane_report(name, slots=slots).model_dump() for name in ("text-mtp", "vlm")]
    worker.status_report = worker.report(lanes=lanes)
    assert gateway.send_heartbeat(worker, lanes=lanes).status_code == 200


def waiting(gateway: RunningGateway, pool: str) -> int:
    count: int = gateway.status()["pools"][pool]["waiting"]
    return count


def with_policy(folder: Path, change: Callable[[dict[str, Any]], None]) -> RunningGateway:
    """A gateway with the shipped policy, changed."""
    shipped = Path(__file__).parents[3] / "policies" / DEFAULT_FILE
    document = yaml.safe_load(shipped.read_text())
    change(document)
    file = folder / "policy.yaml"
    file.write_text(yaml.safe_dump(document))
    return RunningGateway(make_settings(folder, policy=file))


def test_f27_no_more_requests_run_on_a_lane_than_it_has_slots(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    join(gateway, worker, slots=2)
    worker.script.hang = True
    with ThreadPoolExecutor(5) as executor:
        asked = [executor.submit(gateway.chat) for _ in range(5)]
        wait_until(lambda: waiting(gateway, "vlm") == 3)
        assert worker.in_flight == 2
        assert gateway.status()["pools"]["vlm"]["in_flight"] == 2
        worker.resume.set()
        assert {response.result().status_code for response in asked} == {200}
    assert waiting(gateway, "vlm") == 0
    assert "paceline_queue_wait_seconds_count" in gateway.client.get("/metrics").text


def test_f27_a_full_speculative_lane_spills_to_vlm_and_the_answer_says_so(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    join(gateway, worker)
    worker.scripts_by_message["hold"] = Script(hang=True)
    with ThreadPoolExecutor(1) as executor:
        held = executor.submit(gateway.chat, temperature=0, messages=[user("hold")])
        assert worker.request_received.wait(10)
        response = gateway.chat(temperature=0)
        assert response.headers["x-paceline-pool"] == "vlm"
        assert response.headers["x-paceline-reason"] == "spilled"
        worker.resume.set()
        assert held.result().headers["x-paceline-reason"] == "eligible"
    assert gateway.status()["decisions"]["reasons"] == {"eligible": 1, "spilled": 1}


def waits(gateway: RunningGateway, number: int) -> bool:
    return waiting(gateway, "vlm") == number


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_f27_past_the_bound_and_past_the_time_it_is_a_503_that_says_when_to_come_back(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    def short(document: dict[str, Any]) -> None:
        document["pools"]["vlm"]["queue"] = {"limit": 1, "timeout_s": 0.5}

    worker.script.hang = True
    with with_policy(tmp_path, short) as gateway, ThreadPoolExecutor(2) as executor:
        join(gateway, worker)
        held = executor.submit(gateway.chat)
        assert worker.request_received.wait(10)
        late = executor.submit(gateway.chat)
        wait_until(lambda: waiting(gateway, "vlm") == 1)
        full = gateway.chat()
        assert status_and_code(full) == (503, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        assert status_and_code(late.result()) == (503, "queue_timeout")
        worker.resume.set()
        assert held.result().status_code == 200
        assert gateway.status()["outcomes"] == {"completed": 1, "unserved": 2}


def test_f08_a_client_that_leaves_the_line_frees_its_place(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    join(gateway, worker)
    worker.script.hang = True
    with ThreadPoolExecutor(2) as executor:
        held = executor.submit(gateway.chat)
        assert worker.request_received.wait(10)
        body = {"model": "demo", "messages": [user("x")]}
        with httpx.Client(base_url=gateway.url) as impatient, pytest.raises(httpx.ReadTimeout):
            impatient.post("/v1/chat/completions", json=body, timeout=0.2)
        wait_until(lambda: waiting(gateway, "vlm") == 0)
        worker.resume.set()
        assert held.result().status_code == 200
    assert len(worker.requests) == 1
    assert gateway.status()["outcomes"] == {"client_left": 1, "completed": 1}


def test_an_interactive_request_is_served_before_bulk_that_came_earlier(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    join(gateway, worker)
    worker.scripts_by_message["hold"] = Script(hang=True)

    def ask(text: str, priority: str) -> httpx.Response:
        return gateway.client.post(
            "/v1/chat/completions",
            json={"model": "demo", "messages": [user(text)]},
            headers={"x-paceline-priority": priority},
        )

    with ThreadPoolExecutor(4) as executor:
        asked: list[Asked] = [executor.submit(ask, "hold", "default")]
        assert worker.request_received.wait(10)
        for number, (text, priority) in enumerate(
            (("bulk", "bulk"), ("plain", "default"), ("urgent", "interactive")), start=1
        ):
            asked.append(executor.submit(ask, text, priority))
            wait_until(functools.partial(waits, gateway, number))
        worker.resume.set()
        assert {response.result().status_code for response in asked} == {200}
    order = [heard.body["messages"][0]["content"] for heard in worker.requests]
    assert order == ["hold", "urgent", "plain", "bulk"]


def test_a_priority_that_the_policy_does_not_offer_is_a_400_that_lists_those_it_does(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    def no_queue_jumping(document: dict[str, Any]) -> None:
        document["priorities"] = ["default", "bulk"]

    with with_policy(tmp_path, no_queue_jumping) as gateway:
        gateway.send_heartbeat(worker)
        for asked, status in (("bulk", 200), ("interactive", 400), ("x", 400), ("", 400)):
            response = gateway.client.post(
                "/v1/chat/completions",
                json={"model": "demo", "messages": [user("x")]},
                headers={"x-paceline-priority": asked},
            )
            assert response.status_code == status
            if status == 400:
                error = response.json()["error"]
                assert error["param"] == "x-paceline-priority"
                assert "default, bulk" in error["message"]


def test_f14_a_stale_connection_is_tried_once_more_on_a_fresh_one(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.drop_reused = True
    responses = [gateway_with_worker.chat() for _ in range(4)]
    assert {response.status_code for response in responses} == {200}
    attempts = [response.headers["x-paceline-attempts"] for response in responses]
    assert attempts[:2] == ["1", "2"]
    assert set(attempts) == {"1", "2"}
    assert len(worker.requests) == 4, "each was generated once"
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "ready"


def test_f02_a_body_that_two_workers_were_lost_over_is_not_sent_to_a_third(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    third = ScriptedWorker(worker_id="fake-c")
    with running_server(third, sockets=[third.socket]):
        for one in (worker, second_worker, third):
            one.scripts_by_message["poison"] = Script(drop=True)
            gateway.send_heartbeat(one, boot_id=one.worker_id)
        codes: list[tuple[int, str]] = []
        while not codes or codes[-1] != (422, "request_quarantined"):
            response = gateway.chat(messages=[user("poison")])
            codes.append(status_and_code(response))
            assert len(codes) < 30
        assert set(codes[:-1]) == {(502, "worker_lost")}
        heard = [bool(one.requests) for one in (worker, second_worker, third)]
        assert heard.count(True) == 2, "one of three never met it"
        assert gateway.chat().status_code == 200, "other requests do not notice"
    assert gateway.status()["quarantined_bodies"] == 1


def test_f28_retries_are_bounded_however_much_fails(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    for one in (worker, second_worker):
        join(gateway, one, slots=64)
    gone = [ScriptedWorker(worker_id=f"gone-{number}") for number in range(8)]
    for one in gone:
        one.socket.close()
        join(gateway, one, slots=64)
    worker.script.hang = second_worker.script.hang = True
    with ThreadPoolExecutor(30) as executor:
        asked: list[Asked] = [executor.submit(gateway.chat) for _ in range(30)]

        def settled() -> bool:
            done = sum(one.done() for one in asked)
            return done + worker.in_flight + second_worker.in_flight == 30

        wait_until(settled)
        ends = [one.result().status_code for one in asked if one.done()]
        assert set(ends) <= {503}
        status = gateway.status()
        assert status["retries_denied"] == len(ends)
        worker.resume.set()
        second_worker.resume.set()
        assert {one.result().status_code for one in asked} <= {200, 503}


def test_f20_an_ejected_worker_is_shown_with_its_reason_and_gets_nothing(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = Script(status=500)
    while gateway_with_worker.status()["workers"]["fake-a"]["state"] != "ejected":
        assert gateway_with_worker.chat().status_code in {200, 502}
        assert len(worker.requests) <= 5
    shown = gateway_with_worker.status()["workers"]["fake-a"]
    assert 0 < shown["ejection"]["remaining_s"] <= 12
    assert shown["ejection"]["reason"] == "5 requests failed in a row"
    assert shown["ejection"]["count"] == 1
    assert {gateway_with_worker.chat().headers["x-paceline-worker"] for _ in range(5)} == {"fake-b"}
    metrics = gateway_with_worker.client.get("/metrics").text
    assert 'paceline_worker_available{worker="fake-a"} 0.0' in metrics
    assert 'paceline_worker_available{worker="fake-b"} 1.0' in metrics
    assert "null" not in json.dumps(gateway_with_worker.status())
