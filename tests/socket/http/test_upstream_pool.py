"""The pool of connections to workers: closed ports, dead addresses, stale connections, no files."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator

import pytest
import uvloop

from gateway.errors import Overloaded, WorkerSilent
from gateway.http.upstream import ConnectionPool, retry_after_s
from tests.support.fault_proxy import Fault, FaultProxy, unresponsive_port
from tests.support.peer_gateway import share_heartbeat
from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import RunningGateway, status_and_code, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker


def test_f01_after_a_refused_connection_the_request_succeeds_at_another_worker(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy, second_worker: ScriptedWorker
) -> None:
    gateway_behind_proxy.join(second_worker)
    proxy.refuse()
    responses = [gateway_behind_proxy.chat() for _ in range(20)]
    assert {response.status_code for response in responses} == {200}
    assert {response.headers["x-paceline-worker"] for response in responses} == {"fake-b"}
    attempts = [response.headers["x-paceline-attempts"] for response in responses]
    assert set(attempts) <= {"1", "2"}
    assert attempts.count("2") <= 3, "after three failures the worker is unavailable"
    wait_for_outcomes(gateway_behind_proxy, completed=20)


def test_f01_a_refused_connection_to_the_only_worker_returns_503_with_retry_after(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy
) -> None:
    proxy.refuse()
    response = gateway_behind_proxy.chat()
    assert status_and_code(response) == (503, "worker_unreachable")
    assert int(response.headers["retry-after"]) >= 1


def test_f01_an_immediate_connection_reset_is_reported_as_a_worker_error(
    gateway_behind_proxy: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy
) -> None:
    proxy.fault = Fault(reset_at_connect=True)
    # The reset may arrive before or after the request; neither is a 500.
    errors = {(503, "worker_unreachable"), (502, "worker_lost")}
    assert status_and_code(gateway_behind_proxy.chat()) in errors
    assert worker.requests == []


def test_f13_after_a_connect_timeout_the_request_goes_to_another_worker(
    make_cluster_gateway, redis, worker, second_worker
) -> None:
    with unresponsive_port() as dead_url:
        gateway = make_cluster_gateway(connect_timeout_s=0.2)
        share_heartbeat(redis, worker.report(url=dead_url))
        wait_until(lambda: "demo" in gateway.client.get("/v1/models").text)
        assert status_and_code(gateway.chat()) == (503, "worker_unreachable")
        share_heartbeat(redis, worker.report(url=dead_url))
        gateway.join(second_worker)
        responses = [gateway.chat() for _ in range(8)]
    assert {response.status_code for response in responses} == {200}


def test_f13_a_silent_connection_ends_at_the_answer_timeout(make_gateway, worker, proxy) -> None:
    gateway = make_gateway(worker, check_s=0.1, answer_timeout_s=0.3)
    proxy.fault = Fault(blackhole=True)
    for stream in (False, True):
        assert status_and_code(gateway.chat(stream=stream)) == (504, "worker_timeout")
    proxy.fault = Fault()  # the status waits for the reports of workers
    wait_for_outcomes(gateway, failed=2)


def test_f13_a_dead_pooled_connection_does_not_fail_the_next_request(
    gateway_behind_proxy: RunningGateway, proxy: FaultProxy
) -> None:
    assert gateway_behind_proxy.chat().status_code == 200
    proxy.reset_all()
    assert gateway_behind_proxy.chat().status_code == 200


def test_f14_a_request_on_a_new_connection_that_breaks_is_not_sent_there_again(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.join(second_worker)
    worker.script = second_worker.script = Script(drop=True)
    assert status_and_code(gateway_with_worker.chat()) == (502, "worker_lost")
    assert (len(worker.requests), len(second_worker.requests)) == (1, 1)


async def test_f05_a_response_that_is_silent_ends_if_its_worker_is(worker: ScriptedWorker) -> None:
    worker.script.hang = True
    async with ConnectionPool(10, 30) as pool:
        url = f"{worker.url}/v1/chat/completions"
        sending = asyncio.create_task(pool.send(url, (b"{}",), {}, lambda: None))
        await asyncio.to_thread(worker.request_received.wait, 10)
        pool.check((f"{worker.url}0/",), 0.0)
        pool.check((f"{worker.url}/",), 60.0)
        await asyncio.sleep(0)
        assert not sending.done()
        pool.check((f"{worker.url}/",), 0.0)
        with pytest.raises(WorkerSilent):
            await sending


@pytest.mark.parametrize("invalid", [b"nothing like HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_f14_an_invalid_response_on_a_reused_connection_is_not_retried(served, invalid) -> None:
    assert served.gateway.chat().status_code == 200
    served.worker.script.raw = invalid
    assert served.gateway.chat().status_code == 502
    assert len(served.worker.requests) == 2


def test_f56_a_host_name_that_does_not_resolve_is_a_refused_connection(
    make_cluster_gateway, redis, worker, second_worker
) -> None:
    gateway = make_cluster_gateway()
    share_heartbeat(redis, worker.report(url="http://worker.invalid:9200"))
    wait_until(lambda: "fake-a" in gateway.status()["workers"])
    response = gateway.chat()
    assert status_and_code(response) == (503, "worker_unreachable")
    assert b"invalid" not in response.content, "errors contain no worker address"
    gateway.join(second_worker)
    assert gateway.chat().status_code == 200


NOW_S = 1_445_412_480.0  # Wed, 21 Oct 2015 07:28:00 GMT


@pytest.mark.parametrize(
    ("seconds", "values"),
    [
        (1, (None, "", "0", "-5", "1.5", "1e9", "nan", "soon", "Wed, 21 Oct 2015 07:27:00 GMT")),
        (1, ("Wed, 99 Oct 2015 07:28:30 GMT", "Wed, 21 Oct 99999 07:28:30 GMT")),
        (9, ("9", "\u0669")),
        (30, ("Wed, 21 Oct 2015 07:28:30 GMT", "Wed, 21 Oct 2015 07:28:30 -0000")),
        (60, ("60", "1000000000", "9" * 5000, "Fri, 31 Dec 9999 23:59:59 GMT")),
    ],
)
def test_retry_after_is_parsed_and_bounded(seconds: float, values: tuple[str | None, ...]) -> None:
    for value in values:
        assert retry_after_s(value, NOW_S) == seconds, value


@contextlib.contextmanager
def no_free_file() -> Iterator[None]:
    """Prevent this process from opening further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_fd = os.dup(0)
    os.close(next_fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_f55_a_gateway_without_a_free_file_raises_overloaded(tmp_path, worker, new_loop) -> None:
    async def send_request() -> None:
        async with ConnectionPool(connect_timeout_s=10.0, answer_timeout_s=10.0) as connections:
            with no_free_file(), pytest.raises(Overloaded):
                await connections.send(
                    f"{worker.url}/v1/chat/completions", (b"{}",), {}, lambda: None
                )

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(send_request())
    assert worker.requests == []
