"""The gateway's own machine: clocks that jump, and files that run out."""

from __future__ import annotations

import ast
import resource
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.gateway_process import running_gateway_process
from tests.support.running_gateway import chat_body, wait_until
from tests.support.scripted_worker import ScriptedWorker

GATEWAY = Path(__file__).parents[3] / "gateway"
DATES = {
    "http/upstream.py": "reads the date of a Retry-After",
    "assembly.py": "for what is a date by itself: a key's expiry, the day of a budget, the week",
    "cli/bench.py": "dates its record",
    "cli/keys.py": "makes an expiry of a time from now",
    "cli/status.py": "shows the time of each look",
}
"""Who reads the wall clock, and for what; nothing else is measured by it."""


def test_f37_no_limit_ejection_or_wait_is_measured_by_the_wall_clock() -> None:
    found = set()
    for module in GATEWAY.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns"):
                    found.add(str(module.relative_to(GATEWAY)))
                case ast.Attribute(attr="now" | "utcnow" | "today"):
                    found.add(str(module.relative_to(GATEWAY)))
    assert found == set(DATES)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits a running process")
def test_f55_a_gateway_that_runs_out_of_files_answers_again_once_it_has_some(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with running_gateway_process(tmp_path, worker) as (gateway, client):
        assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
        pid = gateway.process.pid
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 8, hard))
        address = urlsplit(str(client.base_url))
        with ExitStack() as crowd:
            for _ in range(40):
                crowd.enter_context(socket.create_connection((address.hostname, address.port)))
            wait_until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) >= files + 7)
        # The crowd is gone; the limit stays.
        wait_until(lambda: _answers(str(client.base_url)), within_s=30)
        assert gateway.process.poll() is None


def _answers(url: str) -> bool:
    try:
        response = httpx.post(f"{url}/v1/chat/completions", json=chat_body(), timeout=2)
    except httpx.HTTPError:
        return False
    return response.status_code == 200
