"""Rows of the fault matrix about workers that fail again and again, at the socket, by id.

Workers that ask for time, fail again and again, or come and go: who is asked then.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import RunningGateway, running_server, wait_until
from tests.support.scripted_worker import DONE, JOIN_TOKEN, Script, ScriptedWorker

BROKEN = Script(status=500, body=b'{"error": {"message": "Traceback", "type": "x"}}')


def state(gateway: RunningGateway, worker_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = gateway.status()["workers"][worker_id]
    return shown


def ejected(gateway: RunningGateway, worker_id: str) -> bool:
    return bool(state(gateway, worker_id)["state"] == "ejected")


def ask_until_ejected(gateway: RunningGateway, worker_id: str) -> None:
    """Ask as often as chance wants it; the test's own time limit ends it otherwise."""
    while not ejected(gateway, worker_id):
        gateway.chat()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"9", "9"),
        (b"0", "1"),
        (b"-5", "1"),
        (b"1000000000", "60"),
        (b"garbage", "1"),
        (b"Fri, 31 Dec 9999 23:59:59 GMT", "60"),
        (b"Thu, 01 Jan 1970 00:00:00 GMT", "1"),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_f19_retry_after_is_heeded_within_reason_and_ejects_nobody(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    status: int,
    value: bytes,
    seconds: str,
) -> None:
    worker.script = Script(status=status, headers=((b"retry-after", value),))
    response = gateway_with_worker.chat()
    assert (response.status_code, response.headers["retry-after"]) == (503, seconds)
    assert response.json()["error"]["code"] == "workers_busy"
    shown = state(gateway_with_worker, "fake-a")
    assert shown["state"] in {"busy", "ready"}
    assert shown["ejection"] == {"remaining_s": 0, "reason": "", "count": 0}


def test_f19_while_a_worker_is_busy_the_other_is_asked_and_it_alone(
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
    assert int(response.headers["retry-after"]) <= 7, "the sooner of the two"
    heard = len(worker.requests) + len(second_worker.requests)
    again = gateway_with_worker.chat()
    assert again.json()["error"]["code"] == "workers_busy"
    assert len(worker.requests) + len(second_worker.requests) == heard, "who asks for time gets it"


def test_f20_f24_an_ejected_worker_comes_back_by_real_answers_and_not_by_its_heartbeat(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    stays_broken = ScriptedWorker(worker_id="fake-c", script=BROKEN)
    worker.script = BROKEN
    with running_server(stays_broken, sockets=[stays_broken.socket]):
        workers = (worker, second_worker, stays_broken)
        for one in workers:
            gateway_with_worker.send_heartbeat(one)
        ask_until_ejected(gateway_with_worker, "fake-a")
        ask_until_ejected(gateway_with_worker, "fake-c")
        assert (len(worker.requests), len(stays_broken.requests)) == (5, 5)
        worker.script = Script()
        gateway_with_worker.send_heartbeat(worker)
        assert ejected(gateway_with_worker, "fake-a"), "a heartbeat proves nothing"

        def back() -> bool:
            for one in workers:
                gateway_with_worker.send_heartbeat(one)
            states = [state(gateway_with_worker, name)["state"] for name in ("fake-a", "fake-c")]
            return states == ["probation", "probation"]

        wait_until(back, within_s=30)
        ask_until_ejected(gateway_with_worker, "fake-c")
        assert len(stays_broken.requests) == 6, "one real request showed that nothing is better"
        assert 12 < state(gateway_with_worker, "fake-c")["ejection"]["remaining_s"] <= 24, (
            "the next time is longer"
        )
        for _ in range(40):
            assert gateway_with_worker.chat().status_code == 200
            if state(gateway_with_worker, "fake-a")["state"] == "ready":
                break
        assert state(gateway_with_worker, "fake-a")["state"] == "ready", (
            "good answers gave it all its slots"
        )


def test_f22_when_all_fail_the_last_one_is_still_asked_and_without_any_it_is_said_at_once(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = second_worker.script = BROKEN
    codes = {gateway_with_worker.chat().json()["error"]["code"] for _ in range(20)}
    assert codes == {"worker_failed"}
    states = sorted(state(gateway_with_worker, name)["state"] for name in ("fake-a", "fake-b"))
    assert states == ["ejected", "ready"]
    still_in = "fake-b" if ejected(gateway_with_worker, "fake-a") else "fake-a"
    worker.script = second_worker.script = Script()
    bearer = {"authorization": f"Bearer {JOIN_TOKEN}"}
    gateway_with_worker.client.delete(f"/admin/v1/workers/{still_in}", headers=bearer)
    assert gateway_with_worker.chat().status_code == 200, "an ejected worker is better than none"
    for name in ("fake-a", "fake-b"):
        gateway_with_worker.client.delete(f"/admin/v1/workers/{name}", headers=bearer)
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert gateway_with_worker.status()["pools"]["vlm"]["waiting"] == 0


def test_f28_no_more_than_a_fifth_and_three_are_tried_again_when_all_refuse(
    gateway: RunningGateway,
) -> None:
    gone = [ScriptedWorker(worker_id=f"gone-{number}") for number in range(6)]
    for one in gone:
        one.socket.close()
        gateway.send_heartbeat(one)
    with ThreadPoolExecutor(20) as executor:
        responses = [one.result() for one in [executor.submit(gateway.chat) for _ in range(40)]]
    assert {response.status_code for response in responses} == {503}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)
    most = max(int(response.headers.get("x-paceline-attempts", "1")) for response in responses)
    assert most <= len(gone), "each worker is asked at most once"


def test_f49_a_worker_that_is_removed_finishes_its_stream_and_gets_nothing_new(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with gateway_with_worker.stream() as response:
        pieces = response.iter_raw()
        received = next(pieces)
        bearer = {"authorization": f"Bearer {JOIN_TOKEN}"}
        assert (
            gateway_with_worker.client.delete(
                "/admin/v1/workers/fake-a", headers=bearer
            ).status_code
            == 204
        )
        assert gateway_with_worker.chat().status_code == 503
        worker.resume.set()
        received += b"".join(pieces)
    assert received.endswith(b"data: [DONE]\n\n")
    assert len(worker.requests) == 1


def state_test_ejection(gateway: RunningGateway, worker: ScriptedWorker) -> str:
    told: str = gateway.status()["workers"][worker.worker_id]["state"]
    return told


def busy(retry_after: str | None, status: int = 429) -> Script:
    headers = () if retry_after is None else ((b"retry-after", retry_after.encode()),)
    return Script(status=status, headers=headers)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("told", "within_s"),
    [
        (None, (1, 1)),
        ("0", (1, 1)),
        ("9", (8, 9)),
        ("-5", (1, 1)),
        ("soon", (1, 1)),
        ("1.5", (1, 2)),
        ("1e9", (1, 60)),
        ("99999999999999999999", (60, 60)),
        (20, (1, 20)),
        (86_400, (59, 60)),
        (-86_400, (1, 1)),
    ],
)
def test_f19_a_worker_that_asks_for_time_gets_it_within_reason_and_the_client_is_told(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    told: str | int | None,
    within_s: tuple[int, int],
    status: int,
) -> None:
    """A number stands for a date so many seconds from now."""
    if isinstance(told, int):
        told = formatdate(time.time() + told, usegmt=True)
    worker.script = busy(told, status)
    began_s = time.monotonic()
    for _ in range(3):
        response = gateway_with_worker.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "workers_busy")
        assert within_s[0] <= int(response.headers["retry-after"]) <= within_s[1]
    took_s = time.monotonic() - began_s
    assert len(worker.requests) <= 1 + took_s // within_s[0], "it is left alone for that time"
    assert state_test_ejection(gateway_with_worker, worker) != "ejected"
    wait_for_outcomes(gateway_with_worker, unserved=3)


def test_f19_when_all_are_busy_the_client_is_told_the_least_time(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script, second_worker.script = busy("50"), busy("20")
    told = [int(gateway_with_worker.chat().headers["retry-after"]) for _ in range(3)]
    assert all(19 <= seconds <= 20 for seconds in told)


def test_f20_a_worker_that_fails_five_times_in_a_row_gets_nothing_more(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = Script(status=500)
    responses = [gateway_with_worker.chat() for _ in range(40)]
    codes = [response.status_code for response in responses]
    assert codes.count(502) == 5
    assert set(codes) == {200, 502}
    assert state_test_ejection(gateway_with_worker, worker) == "ejected"
    wait_for_outcomes(gateway_with_worker, completed=35, failed=5)


def test_f22_when_none_can_be_connected_to_it_is_a_503_that_says_when_to_come_back(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy
) -> None:
    proxy.refuse()
    responses = [gateway_behind_proxy.chat() for _ in range(8)]
    assert {response.status_code for response in responses} == {503}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)
    proxy.listen()
    assert gateway_behind_proxy.chat().status_code == 200


def test_f25_a_worker_that_was_restarted_begins_with_a_clean_record(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = Script(status=500)
    while state_test_ejection(gateway_with_worker, worker) != "ejected":
        gateway_with_worker.chat()
    worker.script = Script()
    gateway_with_worker.send_heartbeat(worker, boot_id="boot-2")
    assert {gateway_with_worker.chat().headers["x-paceline-worker"] for _ in range(20)} == {
        "fake-a",
        "fake-b",
    }


@pytest.mark.parametrize("goodbye", [True, False])
def test_f49_a_worker_that_is_removed_finishes_its_streams_and_gets_nothing_new(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    goodbye: bool,
) -> None:
    worker.script.hang_after = 2
    with gateway_with_worker.stream() as response:
        pieces = response.iter_raw()
        received = next(pieces)
        gateway_with_worker.send_heartbeat(second_worker)
        if goodbye:
            gateway_with_worker.remove_worker(worker)
        else:
            gateway_with_worker.send_heartbeat(worker, draining=True)
        assert {gateway_with_worker.chat().headers["x-paceline-worker"] for _ in range(8)} == {
            "fake-b"
        }
        worker.resume.set()
        received += b"".join(pieces)
    assert received.endswith(DONE)
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway_with_worker, completed=9)
