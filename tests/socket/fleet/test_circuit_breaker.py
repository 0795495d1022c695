"""Workers that fail repeatedly, send Retry-After or deregister: rows of the fault matrix, by id."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import (
    RunningGateway,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, JOIN_TOKEN, Script, ScriptedWorker

BROKEN = Script(status=500, body=b'{"error": {"message": "Traceback", "type": "x"}}')


def worker_status(gateway: RunningGateway, worker_id: str) -> dict[str, Any]:
    status: dict[str, Any] = gateway.status()["workers"][worker_id]
    return status


def ejected(gateway: RunningGateway, worker_id: str) -> bool:
    return bool(worker_status(gateway, worker_id)["state"] == "ejected")


def chat_until_ejected(gateway: RunningGateway, worker_id: str) -> None:
    """Send requests until the worker is ejected; the test's time limit bounds the loop."""
    while not ejected(gateway, worker_id):
        gateway.chat()


def test_f19_requests_go_to_the_second_worker_while_the_first_is_busy(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script = Script(status=429, headers=((b"retry-after", b"30"),))
    gateway_with_worker.send_heartbeat(second_worker)
    responses = [gateway_with_worker.chat() for _ in range(10)]
    assert {response.status_code for response in responses} == {200}
    assert len(worker.requests) <= 1
    second_worker.script = Script(status=503, headers=((b"retry-after", b"7"),))
    response = gateway_with_worker.chat()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) <= 7, "the shorter of the two times"
    attempts = len(worker.requests) + len(second_worker.requests)
    repeated = gateway_with_worker.chat()
    assert repeated.json()["error"]["code"] == "workers_busy"
    assert len(worker.requests) + len(second_worker.requests) == attempts, (
        "busy workers get no requests"
    )


def test_f20_f24_an_ejected_worker_recovers_by_responses_and_not_by_heartbeats(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    failing = ScriptedWorker(worker_id="fake-c", script=BROKEN)
    worker.script = BROKEN
    with running_server(failing, sockets=[failing.socket]):
        workers = (worker, second_worker, failing)
        for member in workers:
            gateway_with_worker.send_heartbeat(member)
        chat_until_ejected(gateway_with_worker, "fake-a")
        chat_until_ejected(gateway_with_worker, "fake-c")
        assert (len(worker.requests), len(failing.requests)) == (5, 5)
        worker.script = Script()
        gateway_with_worker.send_heartbeat(worker)
        assert ejected(gateway_with_worker, "fake-a"), "a heartbeat does not end an ejection"

        def both_on_probation() -> bool:
            for member in workers:
                gateway_with_worker.send_heartbeat(member)
            states = [
                worker_status(gateway_with_worker, name)["state"] for name in ("fake-a", "fake-c")
            ]
            return states == ["probation", "probation"]

        for _ in range(2):  # a worker without a heartbeat for seven seconds would be gone
            gateway_with_worker.clock.advance(6)
            for member in workers:
                gateway_with_worker.join(member)
        wait_until(both_on_probation)
        current = gateway_with_worker.admin.get("/admin/v1/policy")
        gateway_with_worker.admin.patch(
            "/admin/v1/policy",
            json={"retries": {"share": 0, "at_least": 0}},
            headers={
                "if-match": current.headers["etag"],
                "x-paceline-note": "no retries",
                "content-type": "application/merge-patch+json",
            },
        ).raise_for_status()
        while not ejected(gateway_with_worker, "fake-c"):
            assert gateway_with_worker.chat().status_code == 200, "a probe is no retry"
        assert len(failing.requests) == 6, "one failed request ejects it again"
        assert 12 < worker_status(gateway_with_worker, "fake-c")["ejection"]["remaining_s"] <= 24, (
            "the second ejection lasts longer"
        )
        for _ in range(40):
            assert gateway_with_worker.chat().status_code == 200
            if worker_status(gateway_with_worker, "fake-a")["state"] == "ready":
                break
        assert worker_status(gateway_with_worker, "fake-a")["state"] == "ready", (
            "successful responses restore all its slots"
        )


def test_f22_the_last_worker_is_never_ejected_and_no_worker_returns_503_at_once(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = second_worker.script = BROKEN
    codes = {gateway_with_worker.chat(seed=n).json()["error"]["code"] for n in range(20)}
    assert codes == {"worker_failed"}
    states = sorted(
        worker_status(gateway_with_worker, name)["state"] for name in ("fake-a", "fake-b")
    )
    assert states == ["ejected", "ready"]
    remaining = "fake-b" if ejected(gateway_with_worker, "fake-a") else "fake-a"
    worker.script = second_worker.script = Script()
    bearer = {"authorization": f"Bearer {JOIN_TOKEN}"}
    gateway_with_worker.client.delete(f"/admin/v1/workers/{remaining}", headers=bearer)
    assert gateway_with_worker.chat().status_code == 200, (
        "without others, an ejected worker gets requests"
    )
    for name in ("fake-a", "fake-b"):
        gateway_with_worker.client.delete(f"/admin/v1/workers/{name}", headers=bearer)
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert gateway_with_worker.status()["pools"]["vlm"]["waiting"] == 0


def test_f20_an_ejected_worker_answers_what_the_last_healthy_one_fails(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script = BROKEN
    gateway_with_worker.send_heartbeat(second_worker)
    chat_until_ejected(gateway_with_worker, "fake-a")
    worker.script, second_worker.script = Script(), BROKEN
    answer = gateway_with_worker.chat()
    assert (answer.status_code, answer.headers["x-paceline-worker"]) == (200, "fake-a")
    assert worker_status(gateway_with_worker, "fake-a")["state"] == "probation"


def test_f28_each_worker_is_tried_at_most_once_when_all_refuse_connections(
    gateway: RunningGateway,
) -> None:
    closed = [ScriptedWorker(worker_id=f"closed-{number}") for number in range(6)]
    for member in closed:
        member.socket.close()
        gateway.send_heartbeat(member)
    with ThreadPoolExecutor(20) as executor:
        responses = [
            future.result() for future in [executor.submit(gateway.chat) for _ in range(40)]
        ]
    assert {response.status_code for response in responses} == {503}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)
    attempts = max(int(response.headers.get("x-paceline-attempts", "1")) for response in responses)
    assert attempts <= len(closed), "each worker is tried at most once"


def test_f49_the_only_worker_finishes_its_stream_after_its_removal(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with gateway_with_worker.stream() as response:
        chunks = response.iter_raw()
        received = next(chunks)
        bearer = {"authorization": f"Bearer {JOIN_TOKEN}"}
        assert (
            gateway_with_worker.client.delete(
                "/admin/v1/workers/fake-a", headers=bearer
            ).status_code
            == 204
        )
        assert gateway_with_worker.chat().status_code == 503
        worker.resume.set()
        received += b"".join(chunks)
    assert received.endswith(b"data: [DONE]\n\n")
    assert len(worker.requests) == 1


def worker_state(gateway: RunningGateway, worker: ScriptedWorker) -> str:
    state: str = gateway.status()["workers"][worker.worker_id]["state"]
    return state


def busy(retry_after: str | None, status: int = 429) -> Script:
    headers = () if retry_after is None else ((b"retry-after", retry_after.encode()),)
    return Script(status=status, headers=headers)


RETRY_AFTER: tuple[tuple[str | int | None, tuple[int, int]], ...] = (
    (None, (1, 1)),
    ("0", (1, 1)),
    ("9", (8, 9)),
    ("-5", (1, 1)),
    ("soon", (1, 1)),
    ("1.5", (1, 2)),
    ("1e9", (1, 60)),
    ("1000000000", (60, 60)),
    ("99999999999999999999", (60, 60)),
    ("Fri, 31 Dec 9999 23:59:59 GMT", (60, 60)),
    ("Thu, 01 Jan 1970 00:00:00 GMT", (1, 1)),
    (20, (1, 20)),
    (86_400, (59, 60)),
    (-86_400, (1, 1)),
)
"""What workers send, and the bounds of what clients get; a number is a date so many seconds from
now."""


@pytest.mark.parametrize("status", [429, 503])
def test_f19_retry_after_pauses_the_worker_within_bounds_and_reaches_the_client(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, status: int
) -> None:
    for number, (retry_after, within_s) in enumerate(RETRY_AFTER):
        if isinstance(retry_after, int):
            given: str | None = formatdate(time.time() + retry_after, usegmt=True)
        else:
            given = retry_after
        worker.script = busy(given, status)
        gateway_with_worker.remove_worker(worker)
        worker.boot_id = f"boot-{number}"  # a new boot is not paused
        gateway_with_worker.join(worker)
        worker.requests.clear()
        started_s = time.monotonic()
        for _ in range(3):
            response = gateway_with_worker.chat()
            assert status_and_code(response) == (503, "workers_busy"), given
            assert within_s[0] <= int(response.headers["retry-after"]) <= within_s[1], given
        elapsed_s = time.monotonic() - started_s
        attempts = len(worker.requests)
        assert attempts <= 1 + elapsed_s // within_s[0], (
            f"{given}: a paused worker gets no requests"
        )
        status_of_worker = worker_status(gateway_with_worker, "fake-a")
        assert status_of_worker["state"] in {"busy", "ready"}
        assert status_of_worker["ejection"] == {"remaining_s": 0, "reason": "", "count": 0}
    wait_for_outcomes(gateway_with_worker, unserved=3 * len(RETRY_AFTER))


def test_f19_when_all_are_busy_retry_after_is_the_shortest_time(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script, second_worker.script = busy("50"), busy("20")
    retry_after = [int(gateway_with_worker.chat().headers["retry-after"]) for _ in range(3)]
    assert all(19 <= seconds <= 20 for seconds in retry_after)


def test_f62_a_worker_without_memory_is_paused_and_the_client_gets_both_numbers(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script = busy("5")
    full = {"footprint_bytes": 47_500_000_000, "footprint_limit_bytes": 48_000_000_000}
    gateway_with_worker.send_heartbeat(worker, memory_pressure="critical", **full)
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "workers_busy")
    assert "47.5 GB, of 48.0 GB" in response.json()["error"]["message"]
    assert 4 <= int(response.headers["retry-after"]) <= 5
    gateway_with_worker.send_heartbeat(second_worker)
    assert gateway_with_worker.chat().headers["x-paceline-worker"] == "fake-b"


def test_f20_a_worker_with_five_consecutive_failures_gets_no_requests(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = Script(status=500)
    responses = [gateway_with_worker.chat() for _ in range(40)]
    codes = [response.status_code for response in responses]
    assert set(codes) == {200}
    assert len(worker.requests) == 5
    assert worker_state(gateway_with_worker, worker) == "ejected"
    wait_for_outcomes(gateway_with_worker, completed=40)


def test_f22_refused_connections_return_503_with_retry_after(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy
) -> None:
    proxy.refuse()
    responses = [gateway_behind_proxy.chat() for _ in range(8)]
    assert {response.status_code for response in responses} == {503}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)
    proxy.listen()
    assert gateway_behind_proxy.chat().status_code == 200


def test_f25_a_restarted_worker_has_no_ejection(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = Script(status=500)
    while worker_state(gateway_with_worker, worker) != "ejected":
        gateway_with_worker.chat()
    worker.script = Script()
    gateway_with_worker.send_heartbeat(worker, boot_id="boot-2")
    assert {gateway_with_worker.chat().headers["x-paceline-worker"] for _ in range(20)} == {
        "fake-a",
        "fake-b",
    }


@pytest.mark.parametrize("deregisters", [True, False])
def test_f49_a_removed_worker_finishes_its_stream_and_gets_no_requests(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    deregisters: bool,
) -> None:
    worker.script.hang_after = 2
    with gateway_with_worker.stream() as response:
        chunks = response.iter_raw()
        received = next(chunks)
        gateway_with_worker.send_heartbeat(second_worker)
        if deregisters:
            gateway_with_worker.remove_worker(worker)
        else:
            gateway_with_worker.send_heartbeat(worker, draining=True)
        assert {gateway_with_worker.chat().headers["x-paceline-worker"] for _ in range(8)} == {
            "fake-b"
        }
        worker.resume.set()
        received += b"".join(chunks)
    assert received.endswith(DONE)
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway_with_worker, completed=9)
