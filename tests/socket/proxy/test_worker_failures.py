"""Workers that die, fall silent or crawl, before their answer and in it."""

from __future__ import annotations

import json

import pytest

from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.gateway_fixtures import MakeGateway
from tests.support.raw_client import in_flight, raw_client, stream_error_code, wait_for_outcomes
from tests.support.running_gateway import RunningGateway, running_server, wait_until
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, chunk, event, stream_events
from tests.support.scripted_worker_process import scripted_worker_process

HEAD = stream_events(())[0]


@pytest.mark.parametrize("stream", [False, True])
def test_f02_a_worker_killed_before_its_answer_is_a_502_and_nobody_else_is_asked(
    gateway: RunningGateway, worker: ScriptedWorker, stream: bool
) -> None:
    with scripted_worker_process() as killable, raw_client(gateway) as client:
        killable.fault(hang=True)
        killable.join(gateway)
        client.send_chat(stream=stream)
        wait_until(lambda: killable.answering() == 1)
        gateway.send_heartbeat(worker)
        killable.kill()
        received = client.read_until(b'"code":"worker_lost"')
    assert received.startswith(b"HTTP/1.1 502")
    assert b"x-paceline-attempts: 1" in received
    assert worker.requests == [], "what may have started is not started again"
    wait_for_outcomes(gateway, failed=1)


def test_f03_a_worker_killed_in_a_stream_ends_it_in_an_error_event_without_done(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    with scripted_worker_process() as killable, raw_client(gateway) as client:
        killable.fault(hang_after=3)
        killable.join(gateway)
        client.send_chat(stream=True)
        client.read_until(b" two")
        gateway.send_heartbeat(worker)
        killable.kill()
        rest = client.read_until(b"\r\n0\r\n\r\n")
    assert b'"code":"worker_lost"' in rest
    assert b"[DONE]" not in rest
    assert b'"finish_reason":"' not in rest
    assert worker.requests == []
    wait_for_outcomes(gateway, failed=1)


def test_f03_a_reset_in_a_stream_keeps_what_was_said_and_tells_the_rest_is_missing(
    gateway_behind_proxy: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy
) -> None:
    worker.script = Script(tokens=("word ",) * 200)
    proxy.fault = Fault(reset_after_bytes=8000)
    with gateway_behind_proxy.stream() as response:
        received = response.read()
    assert response.status_code == 200
    assert stream_error_code(received) == "worker_lost"
    *said, _ = received.removesuffix(b"\n\n").split(b"\n\n")
    assert all(json.loads(piece.removeprefix(b"data: "))["choices"] for piece in said)
    wait_for_outcomes(gateway_behind_proxy, failed=1)


@pytest.mark.parametrize("events", range(1, 6))
def test_f03_a_stream_cut_anywhere_is_never_a_whole_answer(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, events: int
) -> None:
    worker.script.cut_after = events
    with gateway_with_worker.stream() as response:
        received = response.read()
    assert received.startswith(HEAD)
    assert stream_error_code(received) == "worker_lost"


@pytest.mark.parametrize("stream", [False, True])
def test_f04_a_worker_that_never_answers_is_a_504_and_is_let_go(
    make_gateway: MakeGateway, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script.hang = True
    gateway = make_gateway(worker, answer_timeout_s=0.2)
    response = gateway.chat(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "worker_timeout")
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway, failed=1)


def test_f04_a_head_without_a_body_is_no_answer_either(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 0
    gateway = make_gateway(worker, answer_timeout_s=0.2)
    with gateway.stream() as response:
        response.read()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "worker_timeout")
    wait_until(lambda: worker.in_flight == 0)


def test_f05_a_stalled_stream_ends_in_an_error_event_and_frees_the_worker(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    gateway = make_gateway(worker, idle_timeout_s=0.2)
    with gateway.stream() as response:
        received = response.read()
    assert stream_error_code(received) == "worker_stalled"
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway, failed=1)


def test_f05_comments_keep_a_slow_stream_alive(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    waiting = (b": keepalive\n\n",) * 20
    worker.script = Script(events=(*waiting, *stream_events(("late",))), pause_s=0.1)
    gateway = make_gateway(worker, idle_timeout_s=1.5)
    with gateway.stream() as response:
        received = response.read()
    assert received.endswith(DONE)
    wait_for_outcomes(gateway, completed=1)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_f06_a_crawling_stream_is_relayed_byte_by_byte_as_it_is(
    gateway_behind_proxy: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy, size: int
) -> None:
    worker.script = Script(tokens=("größer", " 🐎", " fin"))
    proxy.fault = Fault(drip_bytes=size, drip_pause_s=0.0)
    with gateway_behind_proxy.stream(stream_options={"include_usage": True}) as response:
        received = response.read()
    assert received == b"".join(stream_events(worker.script.tokens))


@pytest.mark.parametrize("events", range(1, 6))
def test_f17_a_clean_end_without_finish_and_done_is_an_error(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, events: int
) -> None:
    worker.script.end_after = events
    with gateway_with_worker.stream() as response:
        received = response.read()
    assert stream_error_code(received) == "worker_lost"
    wait_for_outcomes(gateway_with_worker, failed=1)


@pytest.mark.parametrize("events", range(1, 6))
def test_f17_a_dead_http_1_0_worker_looks_like_a_clean_end_and_is_an_error(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, events: int
) -> None:
    worker.script = Script(http_1_0=True, cut_after=events)
    with gateway_with_worker.stream() as response:
        received = response.read()
    assert stream_error_code(received) == "worker_lost"


def test_f17_done_without_a_finish_reason_is_not_passed_on(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.events = (HEAD, chunk({"content": "half"}), DONE)
    with gateway_with_worker.stream() as response:
        received = response.read()
    assert stream_error_code(received) == "worker_failed"


def test_f17_a_worker_lost_before_its_first_event_is_a_502_that_says_so(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.cut_after = 0
    with gateway_with_worker.stream() as response:
        response.read()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")


def test_f17_a_worker_that_dies_behind_done_has_answered(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.cut_after = len(stream_events(worker.script.tokens))
    with gateway_with_worker.stream() as response:
        received = response.read()
    assert received.endswith(DONE)
    wait_for_outcomes(gateway_with_worker, completed=1)


def test_f17_a_whole_answer_cut_in_its_body_is_a_502(
    gateway_behind_proxy: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy
) -> None:
    worker.script = Script(tokens=("word ",) * 1000)
    for fault in (Fault(end_after_bytes=1000), Fault(reset_after_bytes=1000)):
        proxy.fault = fault
        proxy.reset_all()
        response = gateway_behind_proxy.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")


def test_f18_an_error_frame_becomes_our_event_without_the_workers_words(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    for frame in (
        {"error": {"message": "/Users/me/model exploded at 0x7f", "code": "x"}},
        {"error": "/Users/me/model exploded at 0x7f"},
        {"object": "error", "error": {"message": "exploded"}, "choices": []},
    ):
        worker.script.events = (HEAD, chunk({"content": "half"}), event(frame), DONE)
        with gateway_with_worker.stream() as response:
            received = response.read()
        assert stream_error_code(received) == "worker_failed"
        assert b"exploded" not in received
    wait_for_outcomes(gateway_with_worker, failed=3)


def test_f18_an_error_frame_that_comes_first_is_a_plain_502(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.events = (event({"error": {"message": "out of memory"}}), DONE)
    with gateway_with_worker.stream() as response:
        response.read()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_failed")


def test_f25_all_answers_of_a_worker_that_aborts_are_told_and_its_slots_come_back(
    gateway: RunningGateway,
) -> None:
    with scripted_worker_process() as killable:
        killable.fault(hang_after=2)
        killable.join(gateway)
        clients = [raw_client(gateway) for _ in range(4)]
        asked = [client.__enter__() for client in clients]
        for client in asked:
            client.send_chat(stream=True)
            client.read_until(b"one")
        assert in_flight(gateway) == 8, "four requests, four slots"
        killable.kill()
        for client in asked:
            assert b'"code":"worker_lost"' in client.read_until(b"\r\n0\r\n\r\n")
            client.close()
    wait_for_outcomes(gateway, failed=4)


def test_f25_a_worker_killed_and_replaced_takes_requests_again(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    first = ScriptedWorker(worker_id="fake-a", boot_id="boot-0")
    with running_server(first, sockets=[first.socket]):
        gateway.send_heartbeat(first)
        assert gateway.chat().status_code == 200
    assert gateway.chat().status_code == 503
    assert gateway.send_heartbeat(worker).status_code == 409, (
        "the id is held until the old boot is silent"
    )


def test_f17_a_worker_that_does_not_end_its_stream_behind_done_is_not_waited_for(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = len(stream_events(worker.script.tokens))
    with gateway_with_worker.stream() as response:
        received = response.read()
    assert received.endswith(DONE)
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway_with_worker, completed=1)
