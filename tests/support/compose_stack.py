"""The services of docker-compose.yml, run as local processes."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.compose_file import SECRETS, SERVICES
from tests.support.paceline_process import LISTENS, PacelineProcess, start_paceline
from tests.support.running_gateway import wait_until

AS_CLIENT = {"authorization": f"Bearer {SECRETS['PACELINE_API_KEY']}"}


class Stack:
    """Services as local processes: ports replace the names of containers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[PacelineProcess]:
        """Run a service with a `paceline` command on a free port."""
        service = SERVICES[name]
        program, *arguments = service["command"]
        assert program == "paceline"
        arguments[arguments.index("--port") + 1] = "0"
        folder = self.folder / name
        folder.mkdir()
        with start_paceline(
            *arguments, environment=self._environment(service), folder=folder
        ) as process:
            yield PacelineProcess(process)

    @contextlib.contextmanager
    def gateway(self, name: str) -> Iterator[PacelineProcess]:
        """Run a gateway until it listens, and record its port."""
        with self.running(name) as running:
            self.ports[name] = httpx.URL(running.wait_for(LISTENS)[1]).port or 0
            yield running

    @contextlib.contextmanager
    def redis(self) -> Iterator[None]:
        """Run Redis with the command of the file."""
        port = self.ports["redis"] = free_port()
        local_options = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder))
        with subprocess.Popen(
            [*SERVICES["redis"]["command"], *local_options], stdout=subprocess.DEVNULL
        ) as process:
            try:
                wait_until(lambda: answers(port))
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
            name: f"{self.folder}{value}" if value in volumes else self._with_local_ports(value)
            for name, value in service["environment"].items()
        }

    def _with_local_ports(self, value: str) -> str:
        def local_address(match: re.Match[str]) -> str:
            return f"//127.0.0.1:{self.ports[match[1]]}"

        return re.sub(r"//([\w-]+):\d+", local_address, value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
