"""The nginx in front of the gateways: the shipped nginx.conf in a real nginx."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.compose_file import ROOT, SECRETS
from tests.support.compose_stack import AS_CLIENT, Stack, free_port
from tests.support.nginx import nginx_process, require_nginx
from tests.support.paceline_process import PacelineProcess
from tests.support.running_gateway import chat_body, running_server, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

PATH = "/v1/chat/completions"
GATEWAYS = ("gateway-1", "gateway-2")


class NginxClient:
    """A client of nginx, with the gateways and the worker behind it."""

    def __init__(
        self, stack: Stack, gateways: dict[str, PacelineProcess], worker: ScriptedWorker
    ) -> None:
        self.stack = stack
        self.gateways = gateways
        self.worker = worker
        self.client = httpx.Client(base_url=stack.url("front"), headers=AS_CLIENT, timeout=30)

    def chat(self) -> httpx.Response:
        return self.client.post(PATH, json=chat_body())

    def send_heartbeat(self) -> httpx.Response:
        """Send the worker's heartbeat as `paceline worker --join` does."""
        report = self.worker.report()
        return self.client.put(
            f"/admin/v1/workers/{report.worker_id}",
            headers={"authorization": f"Bearer {SECRETS['PACELINE_JOIN_TOKEN']}"},
            json=report.model_dump(mode="json"),
        )

    def join(self) -> None:
        """Register the worker and wait until both gateways are ready."""
        assert self.send_heartbeat().status_code == 200
        wait_until(lambda: all(self.stack.ready(name) for name in GATEWAYS))

    def kill(self, name: str) -> None:
        """Kill a gateway without a shutdown."""
        process = self.gateways[name].process
        process.kill()
        process.wait()

    def serving_gateway(self) -> str:
        """Return the name of the gateway that relays the only running request."""
        for name in GATEWAYS:
            metrics = httpx.get(f"{self.stack.url(name)}/metrics").text
            if "paceline_requests_in_flight 1.0" in metrics:
                return name
        raise AssertionError("no request runs")


@contextlib.contextmanager
def running_nginx(stack: Stack) -> Iterator[None]:
    """Run nginx with the shipped file, with names of containers, port and folder replaced."""
    port = stack.ports["front"] = free_port()
    configuration = (ROOT / "deploy" / "nginx.conf").read_text()
    for name in GATEWAYS:
        # `resolve` is for containers that change their address; older nginx does not support it.
        configuration = configuration.replace(
            f"{name}:8000 resolve", f"127.0.0.1:{stack.ports[name]}"
        )
    configuration = configuration.replace("listen 8000;", f"listen 127.0.0.1:{port};")
    configuration = configuration.replace("/tmp/", f"{stack.folder}/nginx-")
    with nginx_process(configuration, stack.folder, port):
        yield


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[NginxClient]:
    """Return nginx with two gateways and a worker that has not joined yet."""
    require_nginx()
    stack, worker = Stack(tmp_path), ScriptedWorker()
    stack.ports["redis"] = free_port()
    with contextlib.ExitStack() as processes:
        processes.enter_context(running_server(worker, sockets=[worker.socket]))
        gateways = {name: processes.enter_context(stack.gateway(name)) for name in GATEWAYS}
        processes.enter_context(running_nginx(stack))
        client = NginxClient(stack, gateways, worker)
        processes.enter_context(client.client)
        yield client


def test_a_heartbeat_reaches_both_gateways_and_either_serves_alone(nginx: NginxClient) -> None:
    assert nginx.chat().json()["error"]["code"]  # an error of a gateway: no worker has joined yet
    nginx.join()
    nginx.kill("gateway-1")
    assert nginx.send_heartbeat().status_code == 200
    assert nginx.chat().status_code == 200


def test_a_stream_is_relayed_without_buffering(nginx: NginxClient) -> None:
    nginx.join()
    nginx.worker.script.hang_after = 3
    with nginx.client.stream("POST", PATH, json=chat_body(stream=True)) as response:
        lines = response.iter_lines()
        first = [next(lines) for _ in range(5)]  # while the worker is paused
        nginx.worker.resume.set()
        rest = list(lines)
    events = [json.loads(line[6:]) for line in first if line.startswith("data: ")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "one two"
    assert "data: [DONE]" in rest


def test_a_client_disconnect_reaches_the_worker(nginx: NginxClient) -> None:
    nginx.join()
    nginx.worker.script.hang_after = 2
    with nginx.client.stream("POST", PATH, json=chat_body(stream=True)) as response:
        next(response.iter_lines())
    assert nginx.worker.client_disconnected.wait(10)


def test_a_gateway_shutdown_fails_neither_running_nor_new_requests(nginx: NginxClient) -> None:
    nginx.join()
    nginx.worker.scripts_by_message["hold"] = Script(hang_after=2)
    body = chat_body(stream=True, messages=[{"role": "user", "content": "hold"}])
    with nginx.client.stream("POST", PATH, json=body) as running:
        lines = running.iter_lines()
        next(lines)
        draining = nginx.serving_gateway()
        nginx.gateways[draining].process.send_signal(signal.SIGINT)  # no lame duck: 503 at once
        wait_until(lambda: not nginx.stack.ready(draining))
        assert [nginx.chat().status_code for _ in range(20)] == [200] * 20
        nginx.worker.resume.set()
        assert "data: [DONE]" in list(lines)
    assert len(nginx.worker.requests) == 21


def test_a_killed_gateway_fails_no_new_request(nginx: NginxClient) -> None:
    nginx.join()
    nginx.kill("gateway-2")
    assert [nginx.chat().status_code for _ in range(20)] == [200] * 20
    assert len(nginx.worker.requests) == 20


def test_a_request_of_a_killed_gateway_is_not_retried(nginx: NginxClient) -> None:
    nginx.join()
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
