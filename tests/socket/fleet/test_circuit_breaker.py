"""Workers that fail repeatedly, send Retry-After or deregister: rows of the fault matrix, by id."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import (
    RunningGateway,
    begun,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker

BROKEN = Script(status=500, body=b'{"error": {"message": "Traceback", "type": "x"}}')


def worker_status(gateway: RunningGateway, worker_id: str) -> dict[str, Any]:
    return gateway.status()["workers"][worker_id]


def ejected(gateway: RunningGateway, worker_id: str = "fake-a") -> bool:
    return bool(worker_status(gateway, worker_id)["state"] == "ejected")


def chat_until_ejected(gateway: RunningGateway, worker_id: str = "fake-a") -> None:
    """Send requests until the worker is ejected; the test's time limit bounds the loop."""
    while not ejected(gateway, worker_id):
        gateway.chat()


def busy(retry_after: str | None, status: int = 429) -> Script:
    headers = () if retry_after is None else ((b"retry-after", retry_after.encode()),)
    return Script(status=status, headers=headers)


def test_f19_f62_requests_go_to_the_second_worker_while_the_first_is_busy_or_without_memory(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script = busy("30")
    full = {"footprint_bytes": 47_500_000_000, "footprint_limit_bytes": 48_000_000_000}
    gateway_with_worker.join(worker, memory_pressure="critical", **full)
    response = gateway_with_worker.chat()
    assert status_and_code(response) == (503, "workers_busy")
    assert "47.5 of 48.0 GB" in response.json()["error"]["message"]
    assert 29 <= int(response.headers["retry-after"]) <= 30
    gateway_with_worker.join(second_worker)
    assert [gateway_with_worker.chat().status_code for _ in range(10)] == [200] * 10
    assert len(worker.requests) <= 1
    second_worker.script = busy("7", 503)
    response = gateway_with_worker.chat()
    assert response.status_code == 503
    assert 6 <= int(response.headers["retry-after"]) <= 7, "the shorter of the two times"
    attempts = len(worker.requests) + len(second_worker.requests)
    assert status_and_code(gateway_with_worker.chat()) == (503, "workers_busy")
    repeated = len(worker.requests) + len(second_worker.requests)
    assert repeated == attempts, "busy workers get no requests"


def test_f20_f24_an_ejected_worker_recovers_by_responses_and_not_by_heartbeats(
    gateway_with_worker, worker, second_worker, admin
) -> None:
    failing = ScriptedWorker(worker_id="fake-c", script=BROKEN)
    worker.script = BROKEN
    with running_server(failing, sockets=[failing.socket]):
        workers = (worker, second_worker, failing)
        for member in workers:
            gateway_with_worker.join(member)
        chat_until_ejected(gateway_with_worker)
        chat_until_ejected(gateway_with_worker, "fake-c")
        assert (len(worker.requests), len(failing.requests)) == (5, 5)
        worker.script = Script()
        gateway_with_worker.join(worker)
        assert ejected(gateway_with_worker), "a heartbeat does not end an ejection"

        def both_on_probation() -> bool:
            for member in workers:
                gateway_with_worker.join(member)
            names = ("fake-a", "fake-c")
            states = {worker_status(gateway_with_worker, name)["state"] for name in names}
            return states == {"probation"}

        for _ in range(2):  # a worker without a heartbeat for seven seconds would be gone
            gateway_with_worker.clock.advance(6)
            for member in workers:
                gateway_with_worker.join(member)
        wait_until(both_on_probation)
        no_retries = {"retries": {"share": 0, "at_least": 0}}
        assert admin.patch(no_retries).status_code == 200
        while not ejected(gateway_with_worker, "fake-c"):
            assert gateway_with_worker.chat().status_code == 200, "a probe is no retry"
        assert len(failing.requests) == 6, "one failed request ejects it again"
        ejection = worker_status(gateway_with_worker, "fake-c")["ejection"]
        assert 12 < ejection["remaining_s"] <= 24, "the second ejection lasts longer"
        for _ in range(40):
            assert gateway_with_worker.chat().status_code == 200
            if worker_status(gateway_with_worker, "fake-a")["state"] == "ready":
                break
        state = worker_status(gateway_with_worker, "fake-a")["state"]
        assert state == "ready", "successful responses restore all its slots"


def test_f22_the_last_worker_is_never_ejected_and_no_worker_returns_503_at_once(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.join(second_worker)
    worker.script = second_worker.script = BROKEN
    codes = {gateway_with_worker.chat(seed=n).json()["error"]["code"] for n in range(20)}
    assert codes == {"worker_failed"}
    members = sorted(
        (worker, second_worker), key=lambda one: ejected(gateway_with_worker, one.worker_id)
    )
    states = [worker_status(gateway_with_worker, one.worker_id)["state"] for one in members]
    assert states == ["ready", "ejected"]
    worker.script = second_worker.script = Script()
    gateway_with_worker.remove_worker(members[0])
    assert gateway_with_worker.chat().status_code == 200, "an ejected worker gets what no other can"
    gateway_with_worker.remove_worker(members[1])
    assert status_and_code(gateway_with_worker.chat()) == (503, "no_worker")
    assert gateway_with_worker.status()["pools"]["vlm"]["waiting"] == 0


def test_f22_f28_when_all_refuse_connections_each_is_tried_once_and_the_client_gets_retry_after(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy
) -> None:
    gateway = gateway_behind_proxy
    closed = [ScriptedWorker(worker_id=f"closed-{number}") for number in range(5)]
    for member in closed:
        member.socket.close()
        gateway.send_heartbeat(member)
    proxy.refuse()
    with ThreadPoolExecutor(20) as executor:
        responses = list(executor.map(lambda _: gateway.chat(), range(40)))
    assert {response.status_code for response in responses} == {503}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)
    attempts = max(int(response.headers.get("x-paceline-attempts", "1")) for response in responses)
    assert attempts <= len(closed) + 1, "each worker is tried at most once"
    proxy.listen()
    assert gateway.chat().status_code == 200


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


def test_f19_retry_after_pauses_the_worker_within_bounds_and_reaches_the_client(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    for number, (retry_after, within_s) in enumerate(RETRY_AFTER):
        given = retry_after
        if isinstance(given, int):
            given = formatdate(time.time() + given, usegmt=True)
        worker.script = busy(given, (429, 503)[number % 2])
        gateway_with_worker.remove_worker(worker)
        worker.boot_id = f"boot-{number}"  # a new boot is not paused
        gateway_with_worker.join(worker)
        worker.requests.clear()
        started_s = time.monotonic()
        for _ in range(2):
            response = gateway_with_worker.chat()
            assert status_and_code(response) == (503, "workers_busy"), given
            assert within_s[0] <= int(response.headers["retry-after"]) <= within_s[1], given
        elapsed_s = time.monotonic() - started_s
        allowed = 1 + elapsed_s // within_s[0]
        assert len(worker.requests) <= allowed, f"{given}: a paused worker gets no requests"
        status = worker_status(gateway_with_worker, "fake-a")
        assert status["state"] in {"busy", "ready"}
        assert status["ejection"] == {"remaining_s": 0, "reason": ""}
    wait_for_outcomes(gateway_with_worker, unserved=2 * len(RETRY_AFTER))


def test_f20_a_worker_with_five_consecutive_failures_gets_no_requests_and_is_shown_with_its_reason(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.join(second_worker)
    worker.script = BROKEN
    assert [gateway_with_worker.chat().status_code for _ in range(40)] == [200] * 40
    assert len(worker.requests) == 5
    status = gateway_with_worker.status()
    assert "null" not in json.dumps(status)
    shown = status["workers"]["fake-a"]
    assert shown["state"] == "ejected"
    assert 0 < shown["ejection"].pop("remaining_s") <= 12
    assert shown["ejection"] == {"reason": "5 requests failed in a row"}
    metrics = gateway_with_worker.client.get("/metrics").text
    assert 'paceline_worker_available{worker="fake-a"} 0.0' in metrics
    assert 'paceline_worker_available{worker="fake-b"} 1.0' in metrics
    wait_for_outcomes(gateway_with_worker, completed=40)


def test_f25_a_restarted_worker_has_no_ejection(gateway_with_worker, worker, second_worker) -> None:
    gateway_with_worker.join(second_worker)
    worker.script = BROKEN
    chat_until_ejected(gateway_with_worker)
    worker.script = Script()
    gateway_with_worker.join(worker, boot_id="boot-2")
    used = {gateway_with_worker.chat().headers["x-paceline-worker"] for _ in range(20)}
    assert used == {"fake-a", "fake-b"}


@pytest.mark.parametrize("deregisters", [True, False])
def test_f49_a_removed_worker_finishes_its_stream_and_gets_no_requests(
    gateway_with_worker, worker, second_worker, deregisters
) -> None:
    worker.script.hang_after = 2
    with begun(gateway_with_worker.stream()) as read:
        if deregisters:
            assert gateway_with_worker.remove_worker(worker).status_code == 204
        else:
            gateway_with_worker.join(worker, draining=True)
        assert gateway_with_worker.chat().status_code == 503
        assert gateway_with_worker.client.get("/readyz").status_code == 503
        gateway_with_worker.join(second_worker)
        used = {gateway_with_worker.chat().headers["x-paceline-worker"] for _ in range(8)}
        assert used == {"fake-b"}
        worker.resume.set()
        assert read().endswith(DONE)
    assert len(worker.requests) == 1
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway_with_worker, completed=9, unserved=1)
