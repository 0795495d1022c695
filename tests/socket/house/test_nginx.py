"""What stands in front of the gateways in docker-compose.yml: the same nginx.conf, a real nginx."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.compose_file import ROOT, SECRETS
from tests.support.compose_stack import AS_CLIENT, Stack, answers, free_port
from tests.support.paceline_process import PacelineProcess
from tests.support.running_gateway import chat_body, running_server, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

PATH = "/v1/chat/completions"
GATEWAYS = ("gateway-1", "gateway-2")


class Front:
    """A client of the front, and what stands behind it."""

    def __init__(
        self, stack: Stack, gateways: dict[str, PacelineProcess], worker: ScriptedWorker
    ) -> None:
        self.stack = stack
        self.gateways = gateways
        self.worker = worker
        self.client = httpx.Client(base_url=stack.url("front"), headers=AS_CLIENT, timeout=30)

    def ask(self) -> httpx.Response:
        return self.client.post(PATH, json=chat_body())

    def beat(self) -> httpx.Response:
        """Send the worker's heartbeat as `paceline worker --join` does."""
        report = self.worker.report()
        return self.client.put(
            f"/admin/v1/workers/{report.worker_id}",
            headers={"authorization": f"Bearer {SECRETS['PACELINE_JOIN_TOKEN']}"},
            json=report.model_dump(mode="json"),
        )

    def join(self) -> None:
        """Let the worker join; both gateways hear of it."""
        assert self.beat().status_code == 200
        wait_until(lambda: all(self.stack.ready(name) for name in GATEWAYS))

    def kill(self, name: str) -> None:
        """End a gateway with no time for anything."""
        process = self.gateways[name].process
        process.kill()
        process.wait()

    def carrier(self) -> str:
        """Name the gateway that carries the one request that runs."""
        for name in GATEWAYS:
            told = httpx.get(f"{self.stack.url(name)}/metrics").text
            if "paceline_requests_in_flight 1.0" in told:
                return name
        raise AssertionError("no request runs")


@contextlib.contextmanager
def running_nginx(stack: Stack) -> Iterator[None]:
    """Run nginx with the stack's own file: names of containers, port and folder are put in."""
    port = stack.ports["front"] = free_port()
    written = (ROOT / "deploy" / "nginx.conf").read_text()
    for name in GATEWAYS:
        # `resolve` is for containers that come back elsewhere, and older nginx does not know it.
        written = written.replace(f"{name}:8000 resolve", f"127.0.0.1:{stack.ports[name]}")
    written = written.replace("listen 8000;", f"listen 127.0.0.1:{port};")
    written = written.replace("/tmp/", f"{stack.folder}/nginx-")
    file = stack.folder / "nginx.conf"
    file.write_text(written)
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    with subprocess.Popen(["nginx", "-c", file, "-g", f"user {user} {group};"]) as process:
        try:
            wait_until(lambda: answers(port))
            yield
        finally:
            process.terminate()


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Front]:
    """nginx, two gateways, and a worker that has not joined yet."""
    if not shutil.which("nginx"):
        pytest.skip("nginx is not installed")
    stack, worker = Stack(tmp_path), ScriptedWorker()
    stack.ports["redis"] = free_port()
    with contextlib.ExitStack() as running:
        running.enter_context(running_server(worker, sockets=[worker.socket]))
        gateways = {name: running.enter_context(stack.gateway(name)) for name in GATEWAYS}
        running.enter_context(running_nginx(stack))
        whole = Front(stack, gateways, worker)
        running.enter_context(whole.client)
        yield whole


def test_a_heartbeat_reaches_both_gateways_and_one_of_them_is_enough(nginx: Front) -> None:
    assert nginx.ask().json()["error"]["code"]  # of a gateway: nobody can answer yet
    nginx.join()
    nginx.kill("gateway-1")
    assert nginx.beat().status_code == 200
    assert nginx.ask().status_code == 200


def test_a_stream_goes_on_piece_by_piece_as_it_comes(nginx: Front) -> None:
    nginx.join()
    nginx.worker.script.hang_after = 3
    with nginx.client.stream("POST", PATH, json=chat_body(stream=True)) as response:
        lines = response.iter_lines()
        first = [next(lines) for _ in range(5)]  # while the worker says nothing more
        nginx.worker.resume.set()
        rest = list(lines)
    events = [json.loads(line[6:]) for line in first if line.startswith("data: ")]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "one two"
    assert "data: [DONE]" in rest


def test_a_client_that_leaves_is_gone_for_the_worker_too(nginx: Front) -> None:
    nginx.join()
    nginx.worker.script.hang_after = 2
    with nginx.client.stream("POST", PATH, json=chat_body(stream=True)) as response:
        next(response.iter_lines())
    assert nginx.worker.client_disconnected.wait(10)


def test_a_gateway_that_ends_loses_no_request_old_or_new(nginx: Front) -> None:
    nginx.join()
    nginx.worker.scripts_by_message["hold"] = Script(hang_after=2)
    body = chat_body(stream=True, messages=[{"role": "user", "content": "hold"}])
    with nginx.client.stream("POST", PATH, json=body) as held:
        lines = held.iter_lines()
        next(lines)
        leaving = nginx.carrier()
        nginx.gateways[leaving].process.send_signal(signal.SIGINT)  # no serving on: 503 at once
        wait_until(lambda: not nginx.stack.ready(leaving))
        assert [nginx.ask().status_code for _ in range(20)] == [200] * 20
        nginx.worker.resume.set()
        assert "data: [DONE]" in list(lines)
    assert len(nginx.worker.requests) == 21


def test_a_gateway_that_is_gone_costs_no_new_request(nginx: Front) -> None:
    nginx.join()
    nginx.kill("gateway-2")
    assert [nginx.ask().status_code for _ in range(20)] == [200] * 20
    assert len(nginx.worker.requests) == 20


def test_a_request_that_a_dying_gateway_had_is_not_asked_twice(nginx: Front) -> None:
    nginx.join()
    nginx.worker.script.hang = True
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(nginx.ask)
        assert nginx.worker.request_received.wait(10)
        nginx.kill(nginx.carrier())
        assert asked.result().status_code == 502
    nginx.worker.resume.set()
    assert len(nginx.worker.requests) == 1


def test_numbers_of_one_gateway_are_not_told_as_those_of_all(nginx: Front) -> None:
    assert nginx.client.get("/metrics").status_code == 404
    assert nginx.client.get("/livez").status_code == 200
