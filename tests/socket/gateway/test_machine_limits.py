"""Limits of the gateway's machine: clock jumps and file descriptors."""

import ast
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from paceline.http import OPEN_FILES
from tests.support.gateway_process import running_gateway_process
from tests.support.running_gateway import chat_body, wait_until
from tests.support.scripted_worker import ScriptedWorker

GATEWAY = Path(__file__).parents[3] / "gateway"
WALL_CLOCK_READERS = {
    "http/upstream.py": "parses dates of Retry-After",
    "assembly.py": "needs calendar dates: a key's expiry, the day of a limit, the week",
    "cli/backup.py": "writes the date of a backup",
    "cli/bench.py": "writes the date of a record",
    "cli/commands.py": "computes an expiry date",
}
"""Modules that read the wall clock, and why."""


def test_f37_only_listed_modules_read_the_wall_clock() -> None:
    found = set()
    for module in GATEWAY.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns"):
                    found.add(str(module.relative_to(GATEWAY)))
                case ast.Attribute(attr="now" | "utcnow" | "today"):
                    found.add(str(module.relative_to(GATEWAY)))
    assert found == set(WALL_CLOCK_READERS)


@pytest.fixture
def low_limit() -> Iterator[None]:
    """Start processes with a lower limit of open files than the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits a running process")
@pytest.mark.usefixtures("low_limit")
def test_f55_a_gateway_without_file_descriptors_recovers_once_some_are_closed(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with running_gateway_process(tmp_path, worker) as (gateway, client):
        assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
        pid = gateway.process.pid
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        assert soft == allowed, "the gateway has raised it"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 8, hard))
        address = urlsplit(str(client.base_url))
        with ExitStack() as connections:
            for _ in range(40):
                connections.enter_context(
                    socket.create_connection((address.hostname, address.port))
                )
            wait_until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) >= open_files + 7)
        # The connections are closed; the limit stays.
        wait_until(lambda: _serves_chat(str(client.base_url)), within_s=30)
        assert gateway.process.poll() is None


def _serves_chat(url: str) -> bool:
    try:
        response = httpx.post(f"{url}/v1/chat/completions", json=chat_body(), timeout=10)
    except httpx.HTTPError:
        return False
    return response.status_code == 200
