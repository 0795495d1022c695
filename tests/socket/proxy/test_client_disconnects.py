"""Clients that leave, or half leave, at every stage: the worker is freed and nobody is blamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.gateway_fixtures import MakeGateway
from tests.support.raw_client import (
    RawClient,
    in_flight,
    raw_client,
    request_bytes,
    wait_for_outcomes,
)
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, chunk, stream_events

LEAVING: dict[str, Callable[[RawClient], None]] = {
    "close": RawClient.close,
    "reset": RawClient.reset,
}
leaving = pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)


@leaving
@pytest.mark.parametrize("events", range(1, 6))
def test_f07_a_client_that_leaves_in_a_stream_frees_the_worker_and_blames_nobody(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    leave: Callable[[RawClient], None],
    events: int,
) -> None:
    worker.script.hang_after = events
    sent = stream_events(worker.script.tokens)[:events]
    # The usage that nobody asked for is held back, so the mark is the event before it.
    mark = sent[min(events, 5) - 1].strip()
    with raw_client(gateway_with_worker) as client:
        client.send_chat(stream=True)
        client.read_until(mark)
        leave(client)
        wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway_with_worker, client_left=1)
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "ready"
    worker.script = Script()
    assert gateway_with_worker.chat().status_code == 200


@leaving
@pytest.mark.parametrize("stream", [False, True])
def test_f08_a_client_that_leaves_before_the_first_byte_frees_the_worker(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    leave: Callable[[RawClient], None],
    stream: bool,
) -> None:
    worker.script.hang = True
    with raw_client(gateway_with_worker) as client:
        client.send_chat(stream=stream)
        assert worker.request_received.wait(10)
        leave(client)
        wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway_with_worker, client_left=1)


@leaving
def test_f08_a_client_that_leaves_behind_the_head_of_a_whole_answer_frees_the_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, leave: Callable[[RawClient], None]
) -> None:
    worker.script = Script(events=(b'{"choices": [',), hang_after=1)
    with raw_client(gateway_with_worker) as client:
        client.send_chat(stream=True)
        assert worker.request_received.wait(10)
        leave(client)
        wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway_with_worker, client_left=1)


@leaving
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_f08_a_client_that_leaves_in_its_own_request_reaches_no_worker(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    leave: Callable[[RawClient], None],
    part: float,
) -> None:
    whole = request_bytes(b'{"model":"demo","messages":[{"role":"user","content":"x"}]}')
    with raw_client(gateway_with_worker) as client:
        client.send(whole[: int(len(whole) * part)])
        leave(client)
    wait_until(lambda: in_flight(gateway_with_worker) == 0)
    assert gateway_with_worker.chat().status_code == 200
    assert len(worker.requests) == 1


def test_f08_many_that_leave_at_once_leave_nothing_behind(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    clients = [RawClient(gateway_with_worker) for _ in range(24)]
    for number, client in enumerate(clients):
        client.send_chat(stream=bool(number % 2))
    wait_until(lambda: worker.in_flight > 0)
    for client in clients:
        client.close()
    wait_until(lambda: worker.in_flight == 0)
    wait_until(lambda: in_flight(gateway_with_worker) == 0)
    # Whole answers do not hang in this script, so some were given before their client left.
    outcomes = gateway_with_worker.status()["outcomes"]
    assert sum(outcomes.values()) == 24
    assert set(outcomes) <= {"client_left", "completed"}


def test_f09_a_reader_that_stalls_is_cut_and_its_neighbour_gets_every_word(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    gateway = make_gateway(worker, write_timeout_s=0.3)
    worker.scripts_by_message["flood"] = Script(events=(chunk({"content": "x" * 60_000}),) * 2_000)
    worker.script = Script(tokens=("word ",) * 40, pause_s=0.02)
    with raw_client(gateway) as stalled, gateway.stream() as neighbour:
        stalled.send_chat(stream=True, messages=[{"role": "user", "content": "flood"}])
        received = neighbour.read()
        assert received.count(b"word ") == 40
        assert received.endswith(DONE)
        wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway, client_left=1, completed=1)


def test_f12_a_client_that_half_closes_behind_its_request_counts_as_gone(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang = True
    with raw_client(gateway_with_worker) as client:
        client.send_chat()
        assert worker.request_received.wait(10)
        client.half_close()
        wait_until(lambda: worker.in_flight == 0)
        assert client.read_to_end() == b""
    wait_for_outcomes(gateway_with_worker, client_left=1)
