"""What docker-compose.yml starts, started without Docker: the same commands and environment."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.compose_file import SECRETS, read_compose
from tests.support.openai_requests import ask, text_body
from tests.support.paceline_process import LISTENS, PATIENCE_S, Paceline, paceline
from tests.support.running_gateway import eventually
from workers.protocol import READY_PREFIX

SERVICES: dict[str, Any] = read_compose(SECRETS)["services"]
AS_CLIENT = {"authorization": f"Bearer {SECRETS['PACELINE_API_KEY']}"}


class Stack:
    """Services as processes of this machine: the names of containers stand for ports here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[Paceline]:
        """Run a service whose command is `paceline ...` on a free port."""
        service = SERVICES[name]
        program, *arguments = service["command"]
        assert program == "paceline"
        arguments[arguments.index("--port") + 1] = "0"
        folder = self.folder / name
        folder.mkdir()
        with paceline(*arguments, environment=self._environment(service), folder=folder) as process:
            yield Paceline(process)

    @contextlib.contextmanager
    def gateway(self, name: str) -> Iterator[Paceline]:
        """Run a gateway until it listens, and know its port."""
        with self.running(name) as running:
            self.ports[name] = httpx.URL(running.wait_for(LISTENS)[1]).port or 0
            yield running

    @contextlib.contextmanager
    def redis(self) -> Iterator[None]:
        """Run Redis with its own command."""
        port = self.ports["redis"] = free_port()
        here = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder))
        with subprocess.Popen(
            [*SERVICES["redis"]["command"], *here], stdout=subprocess.DEVNULL
        ) as process:
            try:
                eventually(lambda: answers(port))
                yield
            finally:
                process.terminate()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def ready(self, name: str) -> bool:
        return httpx.get(f"{self.url(name)}/readyz").status_code == 200

    def _environment(self, service: dict[str, Any]) -> dict[str, str]:
        volumes = {volume.split(":")[1] for volume in service.get("volumes", ())}
        return {
            name: f"{self.folder}{value}" if value in volumes else self._addressed(value)
            for name, value in service["environment"].items()
        }

    def _addressed(self, value: str) -> str:
        def here(found: re.Match[str]) -> str:
            return f"//127.0.0.1:{self.ports[found[1]]}"

        return re.sub(r"//([\w-]+):\d+", here, value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Redis as the file starts it, and nothing else yet."""
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    whole = Stack(tmp_path)
    with whole.redis():
        yield whole


def test_the_stack_answers_a_greedy_question_on_the_lane_that_speculates(stack: Stack) -> None:
    with stack.gateway("gateway-1"):
        stack.ports["front"] = stack.ports["gateway-1"]  # what stands in front: test_front.py
        with stack.running("worker") as worker:
            worker.wait_for(f"^{READY_PREFIX}")
            eventually(lambda: stack.ready("front"), within_s=PATIENCE_S)
            base, key = f"{stack.url('front')}/v1", SECRETS["PACELINE_API_KEY"]
            with OpenAI(base_url=base, api_key=key, max_retries=0) as client:
                answer = ask(client, text_body("demo", temperature=0), stream=True)
    assert answer.headers["x-paceline-pool"] == "text-mtp"
    assert answer.headers["x-paceline-worker"] == "demo"
    assert answer.text == ", ".join(map(str, range(1, 21))) + "."
    assert answer.speculation["draft_acceptance_rate"] > 0.5


def test_both_gateways_of_the_stack_want_its_key_and_share_what_admins_make(stack: Stack) -> None:
    with stack.gateway("gateway-1"), stack.gateway("gateway-2"):
        for name in ("gateway-1", "gateway-2"):
            assert httpx.get(f"{stack.url(name)}/v1/models").status_code == 401
            shown = httpx.get(f"{stack.url(name)}/v1/models", headers=AS_CLIENT)
            assert shown.status_code == 200
        as_admin = {"authorization": f"Bearer {SECRETS['PACELINE_ADMIN_KEY']}"}
        made = httpx.post(
            f"{stack.url('gateway-1')}/admin/v1/keys", headers=as_admin, json={"name": "Ann"}
        ).raise_for_status()
        with_it = {"authorization": f"Bearer {made.json()['secret']}"}
        other = f"{stack.url('gateway-2')}/v1/models"
        eventually(lambda: httpx.get(other, headers=with_it).status_code == 200)
