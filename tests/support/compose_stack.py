"""The services of docker-compose.yml, run as local processes."""

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.compose_file import SECRETS, SERVICES
from tests.support.paceline_process import LISTENS, PacelineProcess, start_paceline
from tests.support.redis_server import free_port
from tests.support.running_gateway import wait_until

AS_CLIENT = {"authorization": f"Bearer {SECRETS['PACELINE_API_KEY']}"}


class Stack:
    """Services as local processes: ports replace the names of containers."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = environment
        """Variables of all services, in addition to those of the file."""
        self.ports: dict[str, int] = {}

    @contextlib.contextmanager
    def running(
        self, name: str, host: str = "127.0.0.1", port: int = 0
    ) -> Iterator[PacelineProcess]:
        """Run a container of a service with a `paceline` command on a free port, or on this one."""
        service = SERVICES[name]
        program, *arguments = service["command"]
        assert program == "paceline"
        arguments[arguments.index("--host") + 1] = host
        arguments[arguments.index("--port") + 1] = str(port)
        folder = self.folder / f"{name}-{host}"
        folder.mkdir()
        with start_paceline(
            *arguments,
            environment={**self._environment(service), **self.environment},
            folder=folder,
        ) as process:
            yield PacelineProcess(process)

    @contextlib.contextmanager
    def gateways(self, *hosts: str) -> Iterator[dict[str, PacelineProcess]]:
        """Run a gateway at each address until all listen, on one port, as in containers."""
        port = self.ports.setdefault("gateway", free_port())
        with contextlib.ExitStack() as starting:
            started = {
                host: starting.enter_context(self.running("gateway", host, port)) for host in hosts
            }
            for running in started.values():
                running.wait_for(LISTENS)
            yield started

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

    def url(self, name: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.ports[name]}"

    def ready(self, name: str, host: str = "127.0.0.1") -> bool:
        return httpx.get(f"{self.url(name, host)}/readyz", timeout=60).status_code == 200

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


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def gateway_addresses(count: int) -> list[str]:
    """Return addresses of this machine for gateways with one port; skip if there is only one."""
    if sys.platform != "linux":
        pytest.skip("only Linux has more than one loopback address")
    return [f"127.0.1.{number}" for number in range(1, count + 1)]
