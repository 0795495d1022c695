"""The nginx in front of the gateways: the shipped nginx.conf in a real nginx.

It finds the gateways by DNS, as workers do; there is no Redis.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import KeyRefused
from tests.support.compose_file import SECRETS
from tests.support.compose_stack import AS_CLIENT
from tests.support.front import PATH, PORT, NginxClient, running_front
from tests.support.private_network import require_namespaces
from tests.support.running_gateway import begun, status_and_code, wait_until
from tests.support.scripted_worker import DONE, Script, both_lanes


@pytest.fixture
def private_nginx(tmp_path: Path) -> Iterator[NginxClient]:
    """Return nginx with two gateways, which the test may end, and a worker that may join."""
    require_namespaces()
    with running_front(tmp_path) as client:
        yield client


@pytest.fixture(scope="module")
def module_nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NginxClient]:
    require_namespaces()
    with running_front(tmp_path_factory.mktemp("front")) as client:
        yield client


@pytest.fixture
def nginx(module_nginx: NginxClient) -> NginxClient:
    """Return nginx with two gateways of other tests too, and a worker that may join."""
    module_nginx.worker.reset()
    return module_nginx


def test_heartbeats_through_nginx_go_to_one_gateway(nginx: NginxClient) -> None:
    report = nginx.worker.report()
    path = f"/admin/v1/workers/{report.worker_id}"
    token = {"authorization": f"Bearer {SECRETS['PACELINE_JOIN_TOKEN']}"}
    for _ in range(4):
        body = report.model_dump(mode="json")
        assert nginx.client.put(path, headers=token, json=body).status_code == 200
    ready = [nginx.stack.ready("gateway", host) for host in nginx.dns.addresses]
    assert sorted(ready) == [False, True]
    assert [nginx.chat().status_code for _ in range(10)] == [200] * 10  # 503 of the other one
    assert nginx.client.delete(path, headers=token).status_code == 204
    assert not any(nginx.stack.ready("gateway", host) for host in nginx.dns.addresses)


def test_a_stream_is_relayed_without_buffering_and_a_disconnect_reaches_the_worker(
    nginx: NginxClient,
) -> None:
    nginx.worker.script.hang_after = 3
    with nginx.joined():
        with nginx.stream() as response:
            lines = response.iter_lines()
            first = [next(lines) for _ in range(5)]  # while the worker is paused
            nginx.worker.resume.set()
            assert "data: [DONE]" in list(lines)
        events = [json.loads(line[6:]) for line in first if line.startswith("data: ")]
        texts = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(texts) == "one two"
        nginx.worker.resume.clear()
        with begun(nginx.stream()):
            pass
        assert nginx.worker.client_disconnected.wait(60)


def test_a_gateway_shutdown_fails_no_request_and_nginx_and_workers_follow_the_addresses_in_dns(
    private_nginx: NginxClient,
) -> None:
    nginx = private_nginx
    first, second, third = nginx.machine.addresses_here(3)
    with nginx.joined():
        nginx.worker.scripts_by_message["hold"] = Script(hang_after=2)
        with begun(nginx.stream(messages=[{"role": "user", "content": "hold"}])) as read:
            draining = nginx.serving_gateway()
            nginx.gateways[draining].process.send_signal(signal.SIGINT)  # no lame duck: 503 at once
            wait_until(lambda: not nginx.stack.ready("gateway", draining))
            assert [nginx.chat().status_code for _ in range(20)] == [200] * 20
            nginx.worker.resume.set()
            assert read().endswith(DONE)
        assert len(nginx.worker.requests) == 21
        staying = second if draining == first else first
        with nginx.stack.gateways(third):
            nginx.dns.addresses = [staying, third]
            wait_until(
                lambda: nginx.chat().status_code == 200 and nginx.outcomes(third)["completed"] > 0
            )
            nginx.kill(staying)
            nginx.dns.addresses = [third]
            assert [nginx.chat().status_code for _ in range(5)] == [200] * 5


def test_l1_a_gateway_that_is_killed_or_interrupted_fails_its_running_request_and_no_new_one(
    private_nginx: NginxClient,
) -> None:
    """The request is not sent again; the other gateway serves alone what joined their name."""
    nginx = private_nginx
    with nginx.joined():
        nginx.worker.script.hang = True
        with ThreadPoolExecutor(1) as executor:
            response = executor.submit(nginx.chat)
            assert nginx.worker.request_received.wait(60)
            nginx.kill(nginx.serving_gateway())
            assert status_and_code(response.result()) == (502, "gateway_unreachable")
        nginx.worker.resume.set()
        assert len(nginx.worker.requests) == 1
        assert [nginx.chat().status_code for _ in range(20)] == [200] * 20
        assert len(nginx.worker.requests) == 21
        nginx.worker.resume.clear()
        nginx.worker.request_received.clear()
        with ThreadPoolExecutor(1) as executor:
            response = executor.submit(nginx.chat)
            assert nginx.worker.request_received.wait(60)
            (left,) = (one.process for one in nginx.gateways.values() if one.process.poll() is None)
            wait_until(lambda: forced_to_end(left))
            assert status_and_code(response.result()) == (502, "shutting_down")
        nginx.worker.resume.set()
        assert len(nginx.worker.requests) == 22


def answer_to(nginx: NginxClient, path: str, size_mb: int, key: str = "") -> tuple[bytes, Any]:
    """Return status line and body of the response to a head without its body."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size_mb << 20}\r\n"
    with socket.create_connection((nginx.machine.address, PORT), timeout=30) as raw:
        raw.sendall(f"{head}{key}\r\n".encode())
        received = b""
        while not received.endswith(b"}") and (piece := raw.recv(4096)):
            received += piece
    return received.partition(b"\r\n")[0], json.loads(received.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    ("path", "size_mb", "status", "told"),
    [
        (PATH, 40, b"413", ("code", "body_too_large")),
        ("/v1/messages", 40, b"413", ("type", "request_too_large")),
        ("/admin/v1/policy", 2, b"413", ("code", "body_too_large")),
        (PATH, 30, b"401", ("code", "invalid_api_key")),
        ("/v1/messages", 30, b"401", ("type", "authentication_error")),
    ],
)
def test_c12_a_body_is_not_stored_before_a_gateway_has_admitted_its_head(
    nginx: NginxClient, path: str, size_mb: int, status: bytes, told: tuple[str, str]
) -> None:
    wait_until(lambda: nginx.client.get("/livez").status_code == 200)
    line, body = answer_to(nginx, path, size_mb)
    assert line.startswith(b"HTTP/1.1 " + status)
    assert body["error"][told[0]] == told[1]


def test_c12_the_large_bodies_of_an_address_fit_the_disk(nginx: NginxClient) -> None:
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {30 << 20}\r\n"
        f"authorization: {AS_CLIENT['authorization']}\r\nexpect: 100-continue\r\n\r\n"
    )
    with contextlib.ExitStack() as connections:
        for _ in range(8):
            address = (nginx.machine.address, PORT)
            connection = connections.enter_context(socket.create_connection(address, timeout=30))
            connection.sendall(head.encode())
            assert connection.recv(64).startswith(b"HTTP/1.1 100 "), "nginx stores it"
        key = f"authorization: {AS_CLIENT['authorization']}\r\n"
        line, body = answer_to(nginx, PATH, 30, key)
        assert (line[9:12], body["error"]["code"]) == (b"429", "connections_exceeded")
        assert nginx.client.get("/livez").status_code == 200


def test_c12_an_address_has_a_hundred_connections_at_most(nginx: NginxClient) -> None:
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
        "expect: 100-continue\r\n\r\n"
    )
    with contextlib.ExitStack() as connections:
        for _ in range(100):
            address = (nginx.machine.address, PORT)
            connection = connections.enter_context(socket.create_connection(address, timeout=30))
            connection.sendall(head.encode())
            assert connection.recv(64).startswith(b"HTTP/1.1 100 "), "nginx counts it"
        assert status_and_code(nginx.chat()) == (429, "connections_exceeded")
        assert nginx.client.get("/livez").status_code == 429
    wait_until(lambda: nginx.client.get("/livez").status_code == 200)


def test_l1_a_request_waits_in_one_queue_only_and_counts_once(nginx: NginxClient) -> None:
    lanes = [lane.model_dump() for lane in both_lanes(slots=1)]
    nginx.worker.status_report = nginx.worker.report(lanes=lanes)
    before = counts(nginx)
    with nginx.joined(), ThreadPoolExecutor(2) as executor:
        nginx.worker.script.hang = True
        running = []
        for _ in nginx.dns.addresses:  # nginx takes turns, so the slot of each gateway is in use
            running.append(executor.submit(nginx.chat))
            wait_until(lambda: len(nginx.worker.requests) == len(running))
        assert status_and_code(nginx.chat()) == (504, "queue_timeout")
        nginx.worker.resume.set()
        assert [response.result().status_code for response in running] == [200, 200]
        assert counts_since(nginx, before) == {
            "outcomes": {"completed": 2, "unserved": 1},
            "errors": {"queue_timeout": 1},
        }


def test_l1_a_rejection_that_is_sent_to_another_gateway_is_no_error(nginx: NginxClient) -> None:
    before = counts(nginx)
    assert status_and_code(nginx.chat()) == (503, "no_worker")
    assert counts_since(nginx, before) == {
        "outcomes": {"resent": 3, "unserved": 1},
        "errors": {"no_worker": 1},
    }


def counts(nginx: NginxClient) -> dict[str, Counter[str]]:
    return {family: nginx.fleet_counts(family) for family in ("outcomes", "errors")}


def counts_since(nginx: NginxClient, before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {family: now - before[family] for family, now in counts(nginx).items()}


def forced_to_end(process: subprocess.Popen[str]) -> bool:
    """Request the end of running requests too; return whether the process has ended."""
    process.send_signal(signal.SIGINT)
    return process.poll() is not None


def test_errors_of_a_gateway_pass_with_their_own_words(nginx: NginxClient) -> None:
    wait_until(lambda: nginx.client.get("/livez").status_code == 200)
    for path in ("/v1/responses/resp_x", "/v1/status"):
        told = nginx.client.get(path, headers={"authorization": "Bearer pk-wrong"})
        assert status_and_code(told) == (401, "invalid_api_key")
        assert told.json()["error"]["message"] == KeyRefused.message
        assert told.headers["content-type"] == "application/json"
    assert nginx.client.get("/metrics").status_code == 404, "they are those of a single gateway"
