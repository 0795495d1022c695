"""The nginx in front of the gateways: the shipped nginx.conf in a real nginx.

It finds the gateways by DNS, as workers do; there is no Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import SecretStr

from policies.document import DEFAULT_FILE
from tests.support.compose_file import ROOT, SECRETS
from tests.support.compose_stack import AS_CLIENT, Stack, free_port, gateway_addresses
from tests.support.dns_server import DnsServer
from tests.support.nginx import nginx_process, require_nginx
from tests.support.paceline_process import PacelineProcess
from tests.support.running_gateway import (
    chat_body,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker, lane_report
from workers.heartbeat import Membership, joined

PATH = "/v1/chat/completions"


class NginxClient:
    """A client of nginx, with the gateways, their DNS and the worker behind it."""

    def __init__(self, stack: Stack, dns: DnsServer, worker: ScriptedWorker) -> None:
        self.stack = stack
        self.dns = dns
        self.worker = worker
        self.gateways: dict[str, PacelineProcess] = {}
        self.client = httpx.Client(base_url=stack.url("front"), headers=AS_CLIENT, timeout=30)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post(PATH, json=chat_body(**fields))

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Let the worker join the name of the gateways; wait until each of them is ready."""
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def resolver(_: httpx.URL) -> set[str]:
            return set(self.dns.addresses)

        async def main() -> None:
            leave = asyncio.Event()
            membership = Membership(
                gateway_url=f"http://gateway:{self.stack.ports['gateway']}",
                token=SecretStr(SECRETS["PACELINE_JOIN_TOKEN"]),
                worker_id=self.worker.worker_id,
                report=lambda: self.worker.status_report or self.worker.report(),
                changed=asyncio.Event(),
            )
            async with joined(membership, resolver):
                started.set_result((asyncio.get_running_loop(), leave))
                await leave.wait()

        thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        thread.start()
        loop, leave = started.result(30)
        try:
            self.wait_until_ready()
            yield
        finally:
            loop.call_soon_threadsafe(leave.set)
            thread.join()

    def wait_until_ready(self) -> None:
        """Wait until all gateways that DNS names are ready, and nginx finds one of them."""
        wait_until(lambda: all(self.stack.ready("gateway", host) for host in self.dns.addresses))
        wait_until(lambda: self.client.get("/livez").status_code == 200)

    def kill(self, host: str) -> None:
        """Kill a gateway without a shutdown."""
        process = self.gateways[host].process
        process.kill()
        process.wait()

    def metrics(self, host: str) -> str:
        return httpx.get(f"{self.stack.url('gateway', host)}/metrics").text

    def serving_gateway(self) -> str:
        """Return the address of the gateway that relays the only running request."""
        for host in self.dns.addresses:
            if "paceline_requests_in_flight 1.0" in self.metrics(host):
                return host
        raise AssertionError("no request runs")

    def outcomes(self, host: str) -> Counter[str]:
        return Counter(self._status(host)["outcomes"])

    def fleet_counts(self, family: str) -> Counter[str]:
        """Return `outcomes` or `errors`, summed over all gateways."""
        return sum((Counter(self._status(host)[family]) for host in self.dns.addresses), Counter())

    def _status(self, host: str) -> dict[str, Any]:
        url = f"{self.stack.url('gateway', host)}/v1/status"
        status: dict[str, Any] = httpx.get(url, headers=AS_CLIENT).json()
        return status


@contextlib.contextmanager
def running_nginx(stack: Stack, dns: DnsServer) -> Iterator[None]:
    """Run nginx with the shipped file; ports, the folder and the DNS server are not Docker's."""
    port = stack.ports["front"] = free_port()
    configuration = (ROOT / "deploy" / "nginx.conf").read_text()
    for shipped, local in (
        ("listen 8000;", f"listen 127.0.0.1:{port};"),
        ("server gateway:8000 ", f"server gateway:{stack.ports['gateway']} "),
        ("resolver 127.0.0.11 ", f"resolver 127.0.0.1:{dns.port} "),
        ("/tmp/", f"{stack.folder}/nginx-"),
    ):
        assert shipped in configuration
        configuration = configuration.replace(shipped, local)
    with nginx_process(configuration, stack.folder, port):
        yield


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[NginxClient]:
    """Return nginx with two gateways and a worker that has not joined yet."""
    require_nginx()
    policy = yaml.safe_load((ROOT / "policies" / DEFAULT_FILE).read_text())
    policy["pools"]["vlm"]["queue"] = {"timeout_s": 0.5}
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(policy))
    stack = Stack(tmp_path, PACELINE_POLICY=str(file))
    dns, worker = DnsServer(), ScriptedWorker()
    stack.ports |= {"redis": free_port(), "gateway": free_port()}
    with contextlib.ExitStack() as processes:
        processes.enter_context(dns.running())
        processes.enter_context(running_server(worker, sockets=[worker.socket]))
        dns.addresses = gateway_addresses(2)
        gateways = processes.enter_context(stack.gateways(*dns.addresses))
        processes.enter_context(running_nginx(stack, dns))
        client = NginxClient(stack, dns, worker)
        client.gateways = gateways
        processes.enter_context(client.client)
        wait_until(lambda: client.client.get("/livez").status_code == 200)
        yield client


def test_either_gateway_serves_alone_what_joined_their_name(nginx: NginxClient) -> None:
    with nginx.joined():
        nginx.kill(nginx.dns.addresses[0])
        assert nginx.chat().status_code == 200


def test_nginx_and_workers_follow_the_addresses_in_dns(nginx: NginxClient) -> None:
    first, second, third = gateway_addresses(3)
    with nginx.joined(), nginx.stack.gateways(third):
        nginx.dns.addresses = [second, third]
        wait_until(
            lambda: nginx.chat().status_code == 200 and nginx.outcomes(third)["completed"] > 0
        )
        nginx.kill(first)
        nginx.kill(second)
        nginx.dns.addresses = [third]
        assert [nginx.chat().status_code for _ in range(5)] == [200] * 5


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


def test_a_stream_is_relayed_without_buffering(nginx: NginxClient) -> None:
    with nginx.joined():
        nginx.worker.script.hang_after = 3
        with nginx.client.stream("POST", PATH, json=chat_body(stream=True)) as response:
            lines = response.iter_lines()
            first = [next(lines) for _ in range(5)]  # while the worker is paused
            nginx.worker.resume.set()
            rest = list(lines)
        events = [json.loads(line[6:]) for line in first if line.startswith("data: ")]
        assert (
            "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            == "one two"
        )
        assert "data: [DONE]" in rest


def test_a_client_disconnect_reaches_the_worker(nginx: NginxClient) -> None:
    with nginx.joined():
        nginx.worker.script.hang_after = 2
        with nginx.client.stream("POST", PATH, json=chat_body(stream=True)) as response:
            next(response.iter_lines())
        assert nginx.worker.client_disconnected.wait(10)


def test_a_gateway_shutdown_fails_neither_running_nor_new_requests(nginx: NginxClient) -> None:
    with nginx.joined():
        nginx.worker.scripts_by_message["hold"] = Script(hang_after=2)
        body = chat_body(stream=True, messages=[{"role": "user", "content": "hold"}])
        with nginx.client.stream("POST", PATH, json=body) as running:
            lines = running.iter_lines()
            next(lines)
            draining = nginx.serving_gateway()
            nginx.gateways[draining].process.send_signal(signal.SIGINT)  # no lame duck: 503 at once
            wait_until(lambda: not nginx.stack.ready("gateway", draining))
            assert [nginx.chat().status_code for _ in range(20)] == [200] * 20
            nginx.worker.resume.set()
            assert "data: [DONE]" in list(lines)
        assert len(nginx.worker.requests) == 21


def test_a_killed_gateway_fails_no_new_request(nginx: NginxClient) -> None:
    with nginx.joined():
        nginx.kill(nginx.dns.addresses[1])
        assert [nginx.chat().status_code for _ in range(20)] == [200] * 20
        assert len(nginx.worker.requests) == 20


def test_a_request_of_a_killed_gateway_is_not_retried(nginx: NginxClient) -> None:
    with nginx.joined():
        nginx.worker.script.hang = True
        with ThreadPoolExecutor(1) as executor:
            response = executor.submit(nginx.chat)
            assert nginx.worker.request_received.wait(10)
            nginx.kill(nginx.serving_gateway())
            assert response.result().status_code == 502
        nginx.worker.resume.set()
        assert len(nginx.worker.requests) == 1


def test_metrics_of_a_single_gateway_are_not_served(nginx: NginxClient) -> None:
    assert nginx.client.get("/metrics").status_code == 404
    assert nginx.client.get("/livez").status_code == 200


def test_c12_a_body_over_the_limit_is_rejected_before_it_is_stored(nginx: NginxClient) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {40 * 1024 * 1024}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", nginx.stack.ports["front"]), timeout=30) as raw:
        raw.sendall(head.encode())
        received = b""
        while not received.endswith(b"}") and (piece := raw.recv(4096)):
            received += piece
    assert received.startswith(b"HTTP/1.1 413 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"


def test_c12_an_address_has_a_hundred_connections_at_most(nginx: NginxClient) -> None:
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
        "expect: 100-continue\r\n\r\n"
    )
    with contextlib.ExitStack() as connections:
        for _ in range(100):
            address = ("127.0.0.1", nginx.stack.ports["front"])
            connection = connections.enter_context(socket.create_connection(address, timeout=30))
            connection.sendall(head.encode())
            assert connection.recv(64).startswith(b"HTTP/1.1 100 "), "nginx counts it"
        assert status_and_code(nginx.chat()) == (429, "connections_exceeded")
        assert nginx.client.get("/livez").status_code == 429


def test_l1_a_request_waits_in_one_queue_only_and_counts_once(nginx: NginxClient) -> None:
    lanes = [lane_report(name, slots=1).model_dump() for name in ("text-mtp", "vlm")]
    nginx.worker.status_report = nginx.worker.report(lanes=lanes)
    with nginx.joined(), ThreadPoolExecutor(2) as executor:
        nginx.worker.script.hang = True
        running = []
        for _ in nginx.dns.addresses:  # nginx takes turns, so the slot of each gateway is in use
            running.append(executor.submit(nginx.chat))
            wait_until(lambda: len(nginx.worker.requests) == len(running))
        assert status_and_code(nginx.chat()) == (504, "queue_timeout")
        nginx.worker.resume.set()
        assert [response.result().status_code for response in running] == [200, 200]
        assert nginx.fleet_counts("outcomes") == {"completed": 2, "unserved": 1}
        assert nginx.fleet_counts("errors") == {"queue_timeout": 1}


def test_l1_a_rejection_that_is_sent_to_another_gateway_is_no_error(nginx: NginxClient) -> None:
    assert status_and_code(nginx.chat()) == (503, "no_worker")
    assert nginx.fleet_counts("outcomes") == {"resent": 3, "unserved": 1}
    assert nginx.fleet_counts("errors") == {"no_worker": 1}


def test_l1_a_request_that_a_shutdown_interrupts_is_not_sent_again(nginx: NginxClient) -> None:
    with nginx.joined():
        nginx.worker.script.hang = True
        with ThreadPoolExecutor(1) as executor:
            response = executor.submit(nginx.chat)
            assert nginx.worker.request_received.wait(10)
            gateway = nginx.gateways[nginx.serving_gateway()].process
            gateway.send_signal(signal.SIGINT)
            wait_until(lambda: forced_to_end(gateway))
            assert status_and_code(response.result()) == (502, "shutting_down")
        nginx.worker.resume.set()
        assert len(nginx.worker.requests) == 1


def forced_to_end(process: subprocess.Popen[str]) -> bool:
    """Request the end of running requests too; return whether the process has ended."""
    process.send_signal(signal.SIGINT)
    return process.poll() is not None
