"""Workers that crash, hang or slow down before and during their responses."""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.gateway_fixtures import MakeGateway, Served
from tests.support.raw_client import (
    RawClient,
    in_flight,
    raw_client,
    stream_error_code,
    wait_for_outcomes,
)
from tests.support.running_gateway import (
    RunningGateway,
    running_worker,
    said,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import (
    DONE,
    Script,
    ScriptedWorker,
    chunk,
    event,
    lane_report,
    stream_events,
)
from tests.support.scripted_worker_process import ScriptedWorkerProcess, scripted_worker_process

WHOLE = stream_events(Script().tokens)
HEAD = WHOLE[0]


def join_as_busy(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    """Let a worker join that gets a request only when others fail."""
    gateway.join(worker, lanes=[lane_report(name, waiting=40) for name in worker.lanes])


@contextlib.contextmanager
def asked(
    gateway: RunningGateway, **script: Any
) -> Iterator[tuple[ScriptedWorkerProcess, RawClient]]:
    """Yield a worker that a stream has reached, and the client of the stream."""
    with scripted_worker_process() as process, raw_client(gateway) as client:
        process.fault(**script)
        process.join(gateway)
        client.send_chat(stream=True)
        wait_until(lambda: process.answering() == 1)
        yield process, client


def test_f02_a_worker_killed_before_its_response_loses_to_another_worker(gateway, worker) -> None:
    with asked(gateway, hang=True) as (process, client):
        gateway.join(worker)
        process.kill()
        received = client.read_until(DONE)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"x-paceline-attempts: 2\r\nx-paceline-failovers: 1\r\n" in received
    assert len(worker.requests) == 1
    wait_for_outcomes(gateway, completed=1)
    assert gateway.status()["failovers"] == 1


def test_f02_without_another_worker_the_response_is_502(gateway: RunningGateway) -> None:
    with asked(gateway, hang=True) as (process, client):
        process.kill()
        received = client.read_until(b'"code":"worker_lost"')
    assert received.startswith(b"HTTP/1.1 502")
    wait_for_outcomes(gateway, failed=1)
    assert gateway.status()["failovers"] == 0


BREAKS = (
    Script(drop=True),
    Script(status=500),
    Script(status=404),
    Script(body=b"<html>"),
    Script(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{"),
    Script(raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
    Script(raw=b"nonsense"),
)


@pytest.mark.parametrize("stream", [False, True])
def test_f02_no_client_sees_a_failure_before_the_first_byte(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker, stream: bool
) -> None:
    join_as_busy(gateway, second_worker)
    for number, script in enumerate(BREAKS, 1):
        worker.script = script
        gateway.rejoin(worker)
        response = gateway.chat(stream=stream, **said(f"Hello {number}"))
        assert response.status_code == 200, script
        assert response.content.endswith(DONE) if stream else b"one two three" in response.content
        assert (len(worker.requests), len(second_worker.requests)) == (number, number), script
    wait_for_outcomes(gateway, completed=len(BREAKS))


def test_f02_a_request_goes_on_at_most_as_often_as_the_policy_says(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    """Of four workers that fail, three have a turn."""
    with contextlib.ExitStack() as stack:
        more = [stack.enter_context(running_worker(f"fake-{name}")) for name in "cd"]
        members = [worker, second_worker, *more]
        for member in members:
            member.script = Script(status=500)
            gateway.join(member)
        response = gateway.chat()
    assert status_and_code(response) == (502, "worker_failed")
    assert response.headers["x-paceline-failovers"] == "2"
    assert sum(len(member.requests) for member in members) == 3


def test_f02_a_body_above_8_mb_goes_to_one_worker_only(gateway, worker, second_worker) -> None:
    for member in (worker, second_worker):
        member.script = Script(status=500)
        gateway.join(member)
    response = gateway.chat(**said("x" * 8 * 1024 * 1024))
    assert status_and_code(response) == (502, "worker_failed")
    assert len(worker.requests) + len(second_worker.requests) == 1


def test_f03_f25_a_killed_worker_ends_all_its_streams_in_an_error_event_without_done(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    with scripted_worker_process() as process, contextlib.ExitStack() as stack:
        process.fault(hang_after=3)
        process.join(gateway)
        clients = [stack.enter_context(raw_client(gateway)) for _ in range(4)]
        for client in clients:
            client.send_chat(stream=True)
            client.read_until(b" two")
        assert in_flight(gateway) == 8, "four requests, four slots"
        gateway.join(worker)
        process.kill()
        for client in clients:
            rest = client.read_until(b"\r\n0\r\n\r\n")
            assert b'"code":"worker_lost"' in rest
            assert b"[DONE]" not in rest
            assert b'"finish_reason":"' not in rest
    assert worker.requests == []
    wait_for_outcomes(gateway, failed=4)


def test_f03_after_a_reset_the_stream_has_its_events_and_an_error_event(
    gateway_behind_proxy: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy
) -> None:
    worker.script = Script(tokens=("word ",) * 200)
    proxy.fault = Fault(reset_after_bytes=8000)
    response = gateway_behind_proxy.chat(stream=True)
    assert response.status_code == 200
    assert stream_error_code(response.content) == "worker_lost"
    *events, _ = response.content.removesuffix(b"\n\n").split(b"\n\n")
    assert all(json.loads(frame.removeprefix(b"data: "))["choices"] for frame in events)
    wait_for_outcomes(gateway_behind_proxy, failed=1)


@pytest.mark.parametrize(
    "script",
    [
        lambda events: Script(cut_after=events),
        lambda events: Script(end_after=events),
        lambda events: Script(cut_after=events, http_1_0=True),
    ],
    ids=["cut", "closed without done", "cut by an HTTP/1.0 worker"],
)
def test_f03_f17_a_stream_that_ends_at_any_event_ends_in_an_error_event(
    gateway: RunningGateway, worker: ScriptedWorker, script: Any
) -> None:
    for events in range(1, 6):
        worker.script = script(events)
        gateway.rejoin(worker)
        received = gateway.chat(stream=True, **said(f"Hello {events}")).content
        assert received.startswith(HEAD)
        assert stream_error_code(received) == "worker_lost"
    wait_for_outcomes(gateway, failed=5)


def test_f04_a_worker_that_never_responds_returns_504_and_is_disconnected(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    gateway = make_gateway(check_s=0.1, answer_timeout_s=0.2)
    hangs, sends_a_head = Script(hang=True), Script(hang_after=0)
    for stream, script in ((False, hangs), (True, hangs), (True, sends_a_head)):
        worker.script = script
        gateway.rejoin(worker)
        assert status_and_code(gateway.chat(stream=stream)) == (504, "worker_timeout")
        wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway, failed=3)


def test_f04_after_a_worker_that_never_responds_another_one_answers(
    make_gateway: MakeGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script.hang = True
    gateway = make_gateway(worker, check_s=0.1, answer_timeout_s=1.0)
    join_as_busy(gateway, second_worker)
    with ThreadPoolExecutor(2) as executor:
        chats = [executor.submit(gateway.chat, stream=stream) for stream in (False, True)]
    assert [chat.result().status_code for chat in chats] == [200, 200]
    assert len(worker.requests) == 2
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway, completed=2)


def test_f05_a_stalled_stream_ends_in_an_error_event_and_frees_the_worker(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    gateway = make_gateway(worker, check_s=0.1, idle_timeout_s=0.2)
    assert stream_error_code(gateway.chat(stream=True).content) == "worker_stalled"
    wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway, failed=1)


def test_f05_comments_reset_the_idle_timeout_of_a_stream(make_gateway, worker) -> None:
    comments = (b": keepalive\n\n",) * 20
    worker.script = Script(events=(*comments, *stream_events(("late",))), pause_s=0.1)
    gateway = make_gateway(worker, idle_timeout_s=1.5)
    assert gateway.chat(stream=True).content.endswith(DONE)
    wait_for_outcomes(gateway, completed=1)


def test_f06_a_slow_stream_is_relayed_unchanged(gateway_behind_proxy, worker, proxy) -> None:
    worker.script = Script(tokens=("größer", " 🐎", " fin"))
    for size in (1, 2, 3, 7):
        proxy.fault = Fault(drip_bytes=size, drip_pause_s=0.0)
        proxy.reset_all()
        response = gateway_behind_proxy.chat(stream=True, stream_options={"include_usage": True})
        assert response.content == b"".join(stream_events(worker.script.tokens))


def test_f17_done_completes_a_stream_whether_worker_or_client_stay_or_leave_then(served) -> None:
    """The gateway does not wait for a served.worker that has said it."""
    for script in (Script(cut_after=len(WHOLE)), Script(hang_after=len(WHOLE))):
        served.worker.script = script
        assert served.gateway.chat(stream=True).content.endswith(DONE)
        wait_until(lambda: served.worker.in_flight == 0)
    with served.gateway.stream() as response:
        received = b""
        for part in response.iter_raw():
            received += part
            if DONE in received:
                break
    wait_for_outcomes(served.gateway, completed=3)


def test_f17_a_response_cut_in_its_body_returns_502(gateway_behind_proxy, worker, proxy) -> None:
    worker.script = Script(tokens=("word ",) * 1000)
    for fault in (Fault(end_after_bytes=1000), Fault(reset_after_bytes=1000)):
        proxy.fault = fault
        proxy.reset_all()
        assert status_and_code(gateway_behind_proxy.chat()) == (502, "worker_lost")


def test_f17_f18_a_stream_that_is_not_whole_ends_in_an_error_without_the_workers_message(
    served: Served,
) -> None:
    half = (HEAD, chunk({"content": "half"}))
    frames: tuple[dict[str, Any], ...] = (
        {"error": {"message": "/Users/me/model exploded at 0x7f", "code": "x"}},
        {"error": "/Users/me/model exploded at 0x7f"},
        {"object": "error", "error": {"message": "exploded"}, "choices": []},
    )
    for ends in ([], *([event(frame)] for frame in frames)):
        served.worker.script.events = (*half, *ends, DONE)
        received = served.gateway.chat(stream=True).content
        assert stream_error_code(received) == "worker_failed"
        assert b"exploded" not in received
    wait_for_outcomes(served.gateway, failed=4)


def test_f17_f18_a_worker_that_fails_before_its_first_event_returns_502(served: Served) -> None:
    served.worker.script = Script(cut_after=0)
    assert status_and_code(served.gateway.chat(stream=True)) == (502, "worker_lost")
    served.worker.script = Script(events=(event({"error": {"message": "out of memory"}}), DONE))
    assert status_and_code(served.gateway.chat(stream=True)) == (502, "worker_failed")


def test_f25_a_replacement_worker_gets_409_until_the_old_boot_expires(gateway, worker) -> None:
    with running_worker(boot_id="boot-0") as first:
        gateway.join(first)
        assert gateway.chat().status_code == 200
    assert gateway.chat().status_code == 503
    refused = gateway.send_heartbeat(worker)
    assert status_and_code(refused) == (409, "worker_id_taken"), "until its heartbeats expire"
