"""Clients that leave, or half leave, at every stage: the worker is freed and nobody is blamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.gateway_fixtures import Hasty
from tests.support.raw_client import RawClient, in_flight, raw_client, request_bytes, settles
from tests.support.running_gateway import RunningGateway, eventually
from tests.support.scripted_worker import DONE, FakeWorker, Script, chunk, stream_events

LEAVING: dict[str, Callable[[RawClient], None]] = {
    "close": RawClient.leave,
    "reset": RawClient.leave_with_reset,
}
leaving = pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)


@leaving
@pytest.mark.parametrize("events", range(1, 6))
def test_f07_a_client_that_leaves_in_a_stream_frees_the_worker_and_blames_nobody(
    line: RunningGateway, worker: FakeWorker, leave: Callable[[RawClient], None], events: int
) -> None:
    worker.script.hang_after = events
    sent = stream_events(worker.script.words)[:events]
    # The usage that nobody asked for is held back, so the mark is the event before it.
    mark = sent[min(events, 5) - 1].strip()
    with raw_client(line) as client:
        client.ask(stream=True)
        client.read_until(mark)
        leave(client)
        eventually(lambda: worker.answering == 0)
    settles(line, client_left=1)
    assert line.status()["workers"]["fake-a"]["state"] == "ready"
    worker.script = Script()
    assert line.chat().status_code == 200


@leaving
@pytest.mark.parametrize("stream", [False, True])
def test_f08_a_client_that_leaves_before_the_first_byte_frees_the_worker(
    line: RunningGateway, worker: FakeWorker, leave: Callable[[RawClient], None], stream: bool
) -> None:
    worker.script.hang = True
    with raw_client(line) as client:
        client.ask(stream=stream)
        assert worker.hearing.wait(10)
        leave(client)
        eventually(lambda: worker.answering == 0)
    settles(line, client_left=1)


@leaving
def test_f08_a_client_that_leaves_behind_the_head_of_a_whole_answer_frees_the_worker(
    line: RunningGateway, worker: FakeWorker, leave: Callable[[RawClient], None]
) -> None:
    worker.script = Script(events=(b'{"choices": [',), hang_after=1)
    with raw_client(line) as client:
        client.ask(stream=True)
        assert worker.hearing.wait(10)
        leave(client)
        eventually(lambda: worker.answering == 0)
    settles(line, client_left=1)


@leaving
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_f08_a_client_that_leaves_in_its_own_request_reaches_no_worker(
    line: RunningGateway, worker: FakeWorker, leave: Callable[[RawClient], None], part: float
) -> None:
    whole = request_bytes(b'{"model":"demo","messages":[{"role":"user","content":"x"}]}')
    with raw_client(line) as client:
        client.send(whole[: int(len(whole) * part)])
        leave(client)
    eventually(lambda: in_flight(line) == 0)
    assert line.chat().status_code == 200
    assert len(worker.heard) == 1


def test_f08_many_that_leave_at_once_leave_nothing_behind(
    line: RunningGateway, worker: FakeWorker
) -> None:
    worker.script.hang_after = 2
    clients = [RawClient(line) for _ in range(24)]
    for number, client in enumerate(clients):
        client.ask(stream=bool(number % 2))
    eventually(lambda: worker.answering > 0)
    for client in clients:
        client.leave()
    eventually(lambda: worker.answering == 0)
    eventually(lambda: in_flight(line) == 0)
    # Whole answers do not hang in this script, so some were given before their client left.
    outcomes = line.status()["outcomes"]
    assert sum(outcomes.values()) == 24
    assert set(outcomes) <= {"client_left", "completed"}


def test_f09_a_reader_that_stalls_is_cut_and_its_neighbour_gets_every_word(
    hasty: Hasty, worker: FakeWorker
) -> None:
    gateway = hasty(worker, write_timeout_s=0.3)
    worker.plans["flood"] = Script(events=(chunk({"content": "x" * 60_000}),) * 2_000)
    worker.script = Script(words=("word ",) * 40, pause_s=0.02)
    with raw_client(gateway) as stalled, gateway.stream() as neighbour:
        stalled.ask(stream=True, messages=[{"role": "user", "content": "flood"}])
        received = neighbour.read()
        assert received.count(b"word ") == 40
        assert received.endswith(DONE)
        eventually(lambda: worker.answering == 0)
    settles(gateway, client_left=1, completed=1)


def test_f12_a_client_that_half_closes_behind_its_request_counts_as_gone(
    line: RunningGateway, worker: FakeWorker
) -> None:
    worker.script.hang = True
    with raw_client(line) as client:
        client.ask()
        assert worker.hearing.wait(10)
        client.half_close()
        eventually(lambda: worker.answering == 0)
        assert client.read_to_end() == b""
    settles(line, client_left=1)
