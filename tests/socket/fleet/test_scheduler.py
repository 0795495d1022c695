"""Slots, queues, spilling and retries, observed at the sockets of clients and workers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from policies.document import DEFAULT_FILE
from tests.support.chat_bodies import user
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker, both_lanes


def waiting(gateway: RunningGateway, pool: str) -> int:
    return gateway.status()["pools"][pool]["waiting"]


def with_policy(folder: Path, change: Callable[[dict[str, Any]], None]) -> RunningGateway:
    """Return a gateway with the shipped policy, changed."""
    shipped = Path(__file__).parents[3] / "policies" / DEFAULT_FILE
    document = yaml.safe_load(shipped.read_text())
    change(document)
    file = folder / "policy.yaml"
    file.write_text(yaml.safe_dump(document))
    return RunningGateway(make_settings(folder, policy=file))


def test_f27_a_full_speculative_lane_spills_to_vlm_with_its_reason(gateway, worker) -> None:
    gateway.join_with(worker, *both_lanes(slots=1))
    worker.scripts_by_message["hold"] = Script(hang=True)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(gateway.chat, temperature=0, messages=[user("hold")])
        assert worker.request_received.wait(60)
        response = gateway.chat(temperature=0)
        assert response.headers["x-paceline-pool"] == "vlm"
        assert response.headers["x-paceline-reason"] == "spilled"
        worker.resume.set()
        assert running.result().headers["x-paceline-reason"] == "eligible"
    assert gateway.status()["decisions"]["reasons"] == {"eligible": 1, "spilled": 1}


def test_f27_a_full_queue_and_a_queue_timeout_return_retry_after(tmp_path, worker) -> None:
    queue = {"limit": 1, "timeout_s": 600.0}

    def shorten_queue(document: dict[str, Any]) -> None:
        document["pools"]["vlm"]["queue"] = queue

    worker.script.hang = True
    with with_policy(tmp_path, shorten_queue) as gateway, ThreadPoolExecutor(2) as executor:
        gateway.join_with(worker, *both_lanes(slots=1))
        running = executor.submit(gateway.chat)
        assert worker.request_received.wait(60)
        queued = executor.submit(gateway.chat)
        wait_until(lambda: waiting(gateway, "vlm") == 1)
        full = gateway.chat()
        assert status_and_code(full) == (503, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        worker.resume.set()
        assert [one.result().status_code for one in (running, queued)] == [200, 200]
        assert gateway.status()["outcomes"] == {"completed": 2, "unserved": 1}
    queue["timeout_s"] = 0.1
    worker.request_received.clear()
    worker.resume.clear()
    with with_policy(tmp_path, shorten_queue) as gateway, ThreadPoolExecutor(1) as executor:
        gateway.join_with(worker, *both_lanes(slots=1))
        running = executor.submit(gateway.chat)
        assert worker.request_received.wait(60)
        late = gateway.chat()
        assert status_and_code(late) == (504, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        worker.resume.set()
        assert running.result().status_code == 200
        assert gateway.status()["outcomes"] == {"completed": 1, "unserved": 1}


def test_an_interactive_request_is_served_before_an_earlier_bulk_request(gateway, worker) -> None:
    gateway.join_with(worker, *both_lanes(slots=1))
    worker.scripts_by_message["hold"] = Script(hang=True)

    def send_request(text: str, priority: str) -> httpx.Response:
        return gateway.chat(messages=[user(text)], headers={"x-paceline-priority": priority})

    with ThreadPoolExecutor(4) as executor:
        responses = [executor.submit(send_request, "hold", "default")]
        assert worker.request_received.wait(60)
        for text, priority in (("bulk", "bulk"), ("plain", "default"), ("urgent", "interactive")):
            responses.append(executor.submit(send_request, text, priority))
            wait_until(lambda: waiting(gateway, "vlm") == len(responses) - 1)
        worker.resume.set()
        assert {response.result().status_code for response in responses} == {200}
    order = [received.body["messages"][0]["content"] for received in worker.requests]
    assert order == ["hold", "urgent", "plain", "bulk"]


def test_a_priority_outside_the_policy_returns_400_with_the_permitted_ones(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    def remove_interactive(document: dict[str, Any]) -> None:
        document["priorities"] = ["default", "bulk"]

    with with_policy(tmp_path, remove_interactive) as gateway:
        gateway.join(worker)
        for priority, status in (("bulk", 200), ("interactive", 400), ("x", 400), ("", 400)):
            response = gateway.chat(headers={"x-paceline-priority": priority})
            assert response.status_code == status
            if status == 400:
                error = response.json()["error"]
                assert error["param"] == "x-paceline-priority"
                assert "default, bulk" in error["message"]


def test_f14_a_stale_connection_is_retried_once_on_a_new_one(gateway_with_worker, worker) -> None:
    worker.script.drop_reused = True
    responses = [gateway_with_worker.chat() for _ in range(4)]
    assert {response.status_code for response in responses} == {200}
    attempts = [response.headers["x-paceline-attempts"] for response in responses]
    assert attempts[:2] == ["1", "2"]
    assert set(attempts) == {"1", "2"}
    assert len(worker.requests) == 4, "each request was generated once"
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "ready"


def test_f02_a_body_that_crashed_two_workers_is_not_sent_to_a_third(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    third = ScriptedWorker(worker_id="fake-c")
    with running_server(third, sockets=[third.socket]):
        for member in (worker, second_worker, third):
            member.scripts_by_message["poison"] = Script(drop=True)
            gateway.join(member, boot_id=member.worker_id)
        codes: list[tuple[int, str]] = []
        while not codes or codes[-1] != (422, "request_quarantined"):
            response = gateway.chat(messages=[user("poison")])
            codes.append(status_and_code(response))
            assert len(codes) < 30
        assert codes[:-1] == [(502, "worker_lost")], "one request has crashed two workers"
        reached = [bool(member.requests) for member in (worker, second_worker, third)]
        assert reached.count(True) == 2, "the third worker never received the body"
        assert gateway.chat().status_code == 200, "other requests still succeed"
    assert gateway.metric("quarantined_bodies") == 1


def test_f28_retries_wait_for_the_budget_and_none_is_dropped_when_most_workers_fail(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    closed = [ScriptedWorker(worker_id=f"closed-{number}") for number in range(8)]
    for member in (worker, second_worker):
        gateway.join_with(member, *both_lanes(slots=64))
    for member in closed:
        with running_server(member, sockets=[member.socket]):
            gateway.join_with(member, *both_lanes(slots=64))
    worker.script.hang = second_worker.script.hang = True
    with ThreadPoolExecutor(30) as executor:
        responses = [executor.submit(gateway.chat) for _ in range(30)]
        wait_until(lambda: gateway.metric("retries_delayed_total") > 0)
        assert worker.in_flight + second_worker.in_flight < 30
        worker.resume.set()
        second_worker.resume.set()
        assert {response.result().status_code for response in responses} == {200}
