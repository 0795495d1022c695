"""The way to a worker: closed ports, dead addresses, connections that went stale.

The way to a worker: whose fault it is when there is none, and when it may be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from gateway.errors import Overloaded
from gateway.http.upstream import ConnectionPool, retry_after_s
from tests.support.fault_proxy import Fault, FaultProxy, unresponsive_port
from tests.support.gateway_fixtures import MakeGateway
from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import Script, ScriptedWorker


def test_f01_a_refused_connection_goes_to_another_worker_and_the_client_sees_200(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy, second_worker: ScriptedWorker
) -> None:
    gateway_behind_proxy.send_heartbeat(second_worker)
    proxy.refuse()
    responses = [gateway_behind_proxy.chat() for _ in range(20)]
    assert {response.status_code for response in responses} == {200}
    assert {response.headers["x-paceline-worker"] for response in responses} == {"fake-b"}
    attempts = [response.headers["x-paceline-attempts"] for response in responses]
    assert set(attempts) <= {"1", "2"}
    assert attempts.count("2") <= 3, "after that the worker is out"
    wait_for_outcomes(gateway_behind_proxy, completed=20)


def test_f01_without_another_worker_it_is_a_503_that_says_when_to_come_back(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy
) -> None:
    proxy.refuse()
    response = gateway_behind_proxy.chat()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_unreachable"
    assert int(response.headers["retry-after"]) >= 1


def test_f01_a_connection_reset_at_once_is_an_error_that_says_so(
    gateway_behind_proxy: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy
) -> None:
    proxy.fault = Fault(reset_at_connect=True)
    response = gateway_behind_proxy.chat()
    # Whether the reset is faster than the request is chance; neither is a 500.
    told = response.status_code, response.json()["error"]["code"]
    assert told in {(503, "worker_unreachable"), (502, "worker_lost")}
    assert worker.requests == []


def test_f13_an_address_that_never_answers_costs_the_connect_limit_and_goes_elsewhere(
    make_gateway: MakeGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    with unresponsive_port() as dead:
        gateway = make_gateway(connect_timeout_s=0.2)
        gateway.send_heartbeat(worker, url=dead)
        response = gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (
            503,
            "worker_unreachable",
        )
        gateway.send_heartbeat(worker, url=dead)
        gateway.send_heartbeat(second_worker)
        responses = [gateway.chat() for _ in range(8)]
    assert {response.status_code for response in responses} == {200}


@pytest.mark.parametrize("stream", [False, True])
def test_f13_a_connection_that_carries_nothing_ends_by_the_first_byte_limit(
    make_gateway: MakeGateway, worker: ScriptedWorker, proxy: FaultProxy, stream: bool
) -> None:
    gateway = make_gateway(answer_timeout_s=0.3)
    gateway.send_heartbeat(worker)
    proxy.fault = Fault(blackhole=True)
    response = gateway.chat(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "worker_timeout")
    wait_for_outcomes(gateway, failed=1)


def test_f13_a_pooled_connection_that_died_does_not_fail_the_next_request(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy
) -> None:
    assert gateway_behind_proxy.chat().status_code == 200
    proxy.reset_all()
    assert gateway_behind_proxy.chat().status_code == 200


def test_f14_a_fresh_connection_that_breaks_is_not_tried_again(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    worker.script = second_worker.script = Script(drop=True)
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")
    assert len(worker.requests + second_worker.requests) == 1


@pytest.mark.parametrize("junk", [b"nothing like HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_f14_junk_on_a_used_connection_is_an_answer_and_is_not_asked_for_twice(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, junk: bytes
) -> None:
    assert gateway_with_worker.chat().status_code == 200
    worker.script.raw = junk
    response = gateway_with_worker.chat()
    assert response.status_code == 502
    assert len(worker.requests) == 2


def test_f56_a_name_that_does_not_resolve_is_a_refused_connection(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway.send_heartbeat(worker, url="http://worker.invalid:9200")
    response = gateway.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_unreachable")
    assert b"invalid" not in response.content, "no address reaches a client"
    gateway.send_heartbeat(second_worker)
    assert gateway.chat().status_code == 200


NOW_S = 1_445_412_480.0  # Wed, 21 Oct 2015 07:28:00 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 1),
        ("", 1),
        ("0", 1),
        ("9", 9),
        ("60", 60),
        ("1000000000", 60),
        ("9" * 5000, 60),
        ("-5", 1),
        ("1.5", 1),
        ("1e9", 1),
        ("nan", 1),
        ("soon", 1),
        ("\u0669", 9),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
        ("Wed, 21 Oct 2015 07:28:30 -0000", 30),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 1),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60),
        ("Wed, 99 Oct 2015 07:28:30 GMT", 1),
        ("Wed, 21 Oct 99999 07:28:30 GMT", 1),
    ],
)
def test_a_retry_after_is_read_within_reason(value: str | None, seconds: float) -> None:
    assert retry_after_s(value, NOW_S) == seconds


@contextlib.contextmanager
def no_file_left() -> Iterator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_f55_a_gateway_without_a_free_file_does_not_blame_the_worker(
    tmp_path: Path, worker: ScriptedWorker, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def ask() -> None:
        async with ConnectionPool(connect_timeout_s=10.0, answer_timeout_s=10.0) as connections:
            with no_file_left(), pytest.raises(Overloaded):
                await connections.send(f"{worker.url}/v1/chat/completions", b"{}", {}, lambda: None)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask())
    assert worker.requests == []
