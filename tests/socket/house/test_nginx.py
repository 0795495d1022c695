"""The nginx in front of the gateways: the shipped nginx.conf in a real nginx.

It finds the gateways by DNS, as workers do; there is no Redis.
"""

import contextlib
import json
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def test_a_stream_is_relayed_without_buffering_and_a_disconnect_reaches_the_worker(nginx) -> None:
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


def begun_body(nginx: NginxClient, path: str, *fields: str) -> socket.socket:
    """Send a head, and return its connection."""
    lines = (f"POST {path} HTTP/1.1", "host: localhost", *fields)
    raw = socket.create_connection((nginx.machine.address, PORT), timeout=30)
    raw.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    return raw


@pytest.mark.parametrize(
    ("path", "length", "status", "told"),
    [
        (PATH, "content-length: 40000000", b"413", ("code", "body_too_large")),
        ("/v1/messages", "content-length: 40000000", b"413", ("type", "request_too_large")),
        ("/admin/v1/policy", "content-length: 2000000", b"413", ("code", "body_too_large")),
        (PATH, "content-length: 30000000", b"401", ("code", "invalid_api_key")),
        ("/v1/messages", "content-length: 30000000", b"401", ("type", "authentication_error")),
        (PATH, "transfer-encoding: chunked", b"401", ("code", "invalid_api_key")),
    ],
)
def test_c12_a_large_body_without_a_key_is_refused_by_its_head(
    nginx: NginxClient, path: str, length: str, status: bytes, told: tuple[str, str]
) -> None:
    wait_until(lambda: nginx.client.get("/livez").status_code == 200)
    with begun_body(nginx, path, length) as raw:
        received = b""
        while not received.endswith(b"}") and (piece := raw.recv(4096)):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.loads(body)["error"][told[0]] == told[1]


@pytest.mark.parametrize(
    ("path", "length", "piece"),
    [
        (PATH, "content-length: 30000000", b" " * 3_000_000),
        (PATH, "content-length: 59999", b" " * 59_998),
        (PATH, "transfer-encoding: chunked", b"1e8480\r\n" + b" " * 2_000_000),
        ("/", "content-length: 1000000", b" " * 999_999),
        ("/admin/v1/workers/x", "content-length: 1000000", b" " * 999_999),
    ],
)
def test_c12_no_body_lies_on_the_disk_of_nginx(nginx, path, length, piece) -> None:
    """No address can hold places of others, since there are none."""
    used_bytes = nginx.machine.used_bytes()
    key = f"authorization: {AS_CLIENT['authorization']}"
    with contextlib.ExitStack() as connections:
        for _ in range(30):
            raw = connections.enter_context(begun_body(nginx, path, length, key))
            with contextlib.suppress(ConnectionError):  # another route has answered
                raw.sendall(piece)
        assert nginx.client.post(PATH, content=b" " * 20_000).status_code == 400
        assert nginx.machine.used_bytes() == used_bytes


def test_c12_an_address_has_a_hundred_connections_at_most(nginx: NginxClient) -> None:
    with contextlib.ExitStack() as connections:
        for _ in range(100):
            fields = ("content-length: 9", "expect: 100-continue")
            connection = connections.enter_context(begun_body(nginx, PATH, *fields))
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
