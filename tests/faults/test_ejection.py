"""Workers that ask for time, fail again and again, or come and go: who is asked then."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.raw_client import settles
from tests.support.running_gateway import Gateway, eventually
from tests.support.scripted_worker import DONE, FakeWorker, Script


def state(gateway: Gateway, worker: FakeWorker) -> str:
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
    line: Gateway,
    worker: FakeWorker,
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
        answer = line.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "workers_busy")
        assert within_s[0] <= int(answer.headers["retry-after"]) <= within_s[1]
    took_s = time.monotonic() - began_s
    assert len(worker.heard) <= 1 + took_s // within_s[0], "it is left alone for that time"
    assert state(line, worker) != "ejected"
    settles(line, unserved=3)


def test_f19_when_all_are_busy_the_client_is_told_the_least_time(
    line: Gateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    line.join(second_worker)
    worker.script, second_worker.script = busy("50"), busy("20")
    told = [int(line.chat().headers["retry-after"]) for _ in range(3)]
    assert all(19 <= seconds <= 20 for seconds in told)


def test_f20_a_worker_that_fails_five_times_in_a_row_gets_nothing_more(
    line: Gateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    line.join(second_worker)
    worker.script = Script(status=500)
    answers = [line.chat() for _ in range(40)]
    codes = [answer.status_code for answer in answers]
    assert codes.count(502) == 5
    assert set(codes) == {200, 502}
    assert state(line, worker) == "ejected"
    settles(line, completed=35, failed=5)


def test_f22_when_none_can_be_connected_to_it_is_a_503_that_says_when_to_come_back(
    proxied: Gateway, proxy: FaultProxy
) -> None:
    proxy.refuse()
    answers = [proxied.chat() for _ in range(8)]
    assert {answer.status_code for answer in answers} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    proxy.listen()
    assert proxied.chat().status_code == 200


def test_f25_a_worker_that_was_restarted_begins_with_a_clean_record(
    line: Gateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    line.join(second_worker)
    worker.script = Script(status=500)
    while state(line, worker) != "ejected":
        line.chat()
    worker.script = Script()
    line.join(worker, boot_id="boot-2")
    assert {line.chat().headers["x-paceline-worker"] for _ in range(20)} == {"fake-a", "fake-b"}


@pytest.mark.parametrize("goodbye", [True, False])
def test_f49_a_worker_that_is_removed_finishes_its_streams_and_gets_nothing_new(
    line: Gateway, worker: FakeWorker, second_worker: FakeWorker, goodbye: bool
) -> None:
    worker.script.hang_after = 2
    with line.stream() as answer:
        pieces = answer.iter_raw()
        received = next(pieces)
        line.join(second_worker)
        if goodbye:
            line.leave(worker)
        else:
            line.join(worker, draining=True)
        assert {line.chat().headers["x-paceline-worker"] for _ in range(8)} == {"fake-b"}
        worker.go_on.set()
        received += b"".join(pieces)
    assert received.endswith(DONE)
    eventually(lambda: worker.answering == 0)
    settles(line, completed=9)
