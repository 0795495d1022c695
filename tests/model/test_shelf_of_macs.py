"""Four Macs from the wheel, paired by code, that sleep, move, are upgraded and revoked under load.

No request fails. The Macs are namespaces of Linux, which share processors and memory.
"""

import contextlib
import itertools
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.paceline_process import READY, PacelineProcess
from tests.support.private_network import private_network, require_namespaces
from tests.support.shelf import Mac, shelf
from tests.support.wheel import NEWER_VERSION, build_newer_wheel, build_wheel, install_wheel
from tools.demo_model import held_out

API_KEY = "the-api-key-of-the-shelf"
PATH = "/v1/chat/completions"
URL = "http://10.9.0.1:8000"
STREAMS = 8
TOKENS = 200
"""Of an answer; its prompt has 4,096."""
LONGEST_S = 300.0
BODY = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_PAUSE_S = 0.5
_DAY_S = 86400


@dataclass
class Load:
    """Clients that stream one answer after another, and never send a request again.

    Each has one long system prompt.
    """

    answers: int = 0
    failures: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the clients within the context; an answer that has begun is read to its end."""
        threads = [threading.Thread(target=self._run, args=(one,)) for one in range(STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def settle(self) -> None:
        """Wait until each stream that runs now has ended, and as many others."""
        goal = self.answers + 2 * STREAMS
        poll(lambda: self.answers >= goal)
        assert self.failures == []

    def _run(self, client: int) -> None:
        (prompt,) = held_out.fact_prompts(1, 4096, seed=client)
        with httpx.Client(
            base_url=URL,
            headers={"authorization": f"Bearer {API_KEY}"},
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=LONGEST_S,
        ) as http:
            for number in itertools.cycle(range(1, 40)):
                if self._ended.is_set():
                    return
                question = {"role": "user", "content": f"Count from {number} to 120."}
                problem = self._ask(http, [prompt.messages[0], question])
                with self._lock:
                    self.answers += 1
                    self.failures.extend(filter(None, (problem,)))

    def _ask(self, http: httpx.Client, messages: list[Any]) -> str:
        """Return the fault of the answer, or an empty text."""
        received = ""
        try:
            with http.stream("POST", PATH, json=BODY | {"messages": messages}) as response:
                for piece in response.iter_text():
                    received += piece
        except httpx.HTTPError as error:
            return f"{error!r} after {received[-200:]}"
        return problem_of(response.status_code, received)


def problem_of(status: int, received: str) -> str:
    """Return the fault of an answer, or an empty text."""
    events = [line[6:] for line in received.splitlines() if line.startswith("data: ")]
    if status != httpx.codes.OK or events[-1:] != ["[DONE]"]:
        return f"{status} {received[-300:]}"
    usage = json.loads(events[-2])["usage"]
    whole = usage["completion_tokens"] == TOKENS and usage["prompt_tokens"] > 4000
    return "" if whole else f"{usage}"


def poll(condition: Callable[[], bool]) -> None:
    """Wait for a condition, seldom looking, because the Macs need the processors."""
    end_s = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(_PAUSE_S)


@dataclass
class Fleet:
    """The first Mac, on which the gateway is, and its owner."""

    mac: Mac
    program: Path
    up: PacelineProcess = field(init=False)

    def start(self) -> None:
        self.up = self.mac.start(self.program, "up", "--host", "0.0.0.0", PACELINE_API_KEY=API_KEY)
        self.up.wait_for(READY)

    def paceline(self, *arguments: str) -> str:
        """Run a command of the owner; return its output."""
        return self.mac.run(self.program, *arguments)

    def pair(self, mac: Mac) -> PacelineProcess:
        """Show a code and enter it on another Mac; return its worker."""
        code = self.paceline("workers", "pair").split()[0]
        worker = mac.start(self.program, "join", stdin=f"{code}\n")
        worker.wait_for(f"Paired with {URL} as {mac.name}")
        return worker

    def wait_for(self, name: str, state: str, address: str = "") -> None:
        """Wait for a state of a worker, at an address."""
        key = (self.mac.home / ".paceline/admin-key").read_text().strip()
        headers = {"authorization": f"Bearer {key}"}

        def reached() -> bool:
            listed = httpx.get(f"{URL}/admin/v1/workers", headers=headers, timeout=60).json()
            worker = {one["worker_id"]: one for one in listed["workers"]}.get(
                name, {"state": "gone"}
            )
            return worker["state"] == state and address in worker.get("url", "")

        poll(reached)


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_no_request_fails_while_macs_sleep_move_are_upgraded_revoked_and_restarted(
    tmp_path: Path,
) -> None:
    require_namespaces()
    if not shutil.which("cc"):
        pytest.skip("the clock of a Mac needs a compiler")
    program = install_wheel(build_wheel(tmp_path / "dist"), tmp_path / "env")
    newer = install_wheel(build_newer_wheel(tmp_path / "newer"), tmp_path / "newer-env")
    load = Load()
    with (
        private_network(),
        shelf(("studio", "mini", "laptop", "max"), tmp_path) as (studio, mini, laptop, max_),
    ):
        fleet = Fleet(studio, program)
        fleet.start()
        with load.running():
            workers = {mac.name: fleet.pair(mac) for mac in (mini, laptop, max_)}
            for name in workers:
                fleet.wait_for(name, "ready")
            load.settle()

            mini.sleep()
            fleet.wait_for("mini", "gone")
            load.settle()
            mini.wake()
            assert int(mini.run("date", "+%s")) > time.time() + _DAY_S - 60
            fleet.wait_for("mini", "ready")
            load.settle()

            laptop.move(33)
            fleet.wait_for("laptop", "ready", "10.9.0.33")
            load.settle()

            max_.stop()
            workers["max"] = max_.start(newer, "worker", "--join", URL)
            fleet.wait_for("max", "ready")
            assert NEWER_VERSION in max_.run(newer, "--version")
            load.settle()

            fleet.paceline("workers", "unpair", "laptop")
            fleet.wait_for("laptop", "gone")
            workers["laptop"].wait_for("has ended the pairing of this worker")
            load.settle()

            studio.signal(signal.SIGUSR2)
            fleet.up.wait_for(READY, times=2)
            for name in ("mini", "max"):
                fleet.wait_for(name, "ready")
            load.settle()
