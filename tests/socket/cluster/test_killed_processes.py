"""Two gateways and three workers under load, each killed once with SIGKILL: the sums add up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.paceline_process import LISTENS, TIMEOUT_S, PacelineProcess, start_paceline
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import chat_body, wait_until
from tests.support.scripted_worker import JOIN_TOKEN
from tests.support.scripted_worker_process import ScriptedWorkerProcess, scripted_worker_process

CLIENTS = 4
"""Each has one request at a time."""
# A gateway tells the others twice a second what it did, a worker with its next heartbeat; the rest
# is for a machine on which much else runs.
UNTOLD_S = {"gateway": 2.5, "worker": 4.0}


class Answered(NamedTuple):
    """One good answer as its client saw it."""

    at_s: float
    gateway: str
    worker: str


class Line:
    """Gateways and workers by name; each may be killed and started again under its name."""

    def __init__(self, redis: RedisServer, folder: Path, running: contextlib.ExitStack) -> None:
        self._redis, self._folder, self._running = redis, folder, running
        self._gateways: dict[str, PacelineProcess] = {}
        self._workers: dict[str, ScriptedWorkerProcess] = {}
        self._ports: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self.killed_s: dict[str, float] = {}
        self.good: list[Answered] = []
        self.bad: Counter[str] = Counter()
        self._ending = threading.Event()

    def start_gateway(self, name: str) -> None:
        """Start it where it was before, if it was: its workers beat there and nowhere else."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        port = str(self._ports.get(name, 0))
        environment = {"PACELINE_JOIN_TOKEN": JOIN_TOKEN, "PACELINE_REDIS_URL": self._redis.url}
        process = start_paceline("gateway", "--port", port, environment=environment, folder=folder)
        gateway = PacelineProcess(self._running.enter_context(process))
        self._gateways[name], self.urls[name] = gateway, gateway.wait_for(LISTENS)[1]
        self._ports[name] = _port(self.urls[name])

    def start_worker(self, name: str, joins: str) -> None:
        """Start it where it was before, if it was: another place is another worker's."""
        worker = scripted_worker_process(
            name, joins=self.urls[joins], port=self._ports.get(name, 0)
        )
        self._workers[name] = self._running.enter_context(worker)
        self._ports[name] = _port(self._workers[name].url)

    def kill(self, name: str) -> None:
        self.killed_s[name] = time.monotonic()
        if name in self._workers:
            self._workers.pop(name).kill()
        else:
            del self.urls[name]
            gateway = self._gateways.pop(name)
            gateway.process.kill()
            gateway.wait_for_end()

    def status(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.urls[name]}/v1/status", timeout=TIMEOUT_S).json()
        return told

    def ask(self, client: httpx.Client, name: str) -> None:
        """Ask one gateway, and note what came of it."""
        try:
            response = client.post(f"{self.urls[name]}/v1/chat/completions", json=chat_body())
        except (httpx.HTTPError, KeyError):
            self.bad["gateway"] += 1
            return
        if response.is_success:
            worker = response.headers["x-paceline-worker"]
            self.good.append(Answered(time.monotonic(), name, worker))
        else:
            self.bad[response.json()["error"]["code"]] += 1

    def load(self) -> None:
        """Be one client of both gateways, until the end is asked for."""
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self._ending.is_set():
                for name in ("a", "b"):
                    self.ask(client, name)
                self._ending.wait(0.02)

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as clients:
            asking = [clients.submit(self.load) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._ending.set()
                for one in asking:
                    one.result()

    def goes_on(self, kind: str, *names: str) -> None:
        """Wait until each of these has answered a few from now on."""
        begun = len(self.good)

        def all_answer() -> bool:
            since = Counter(getattr(one, kind) for one in self.good[begun:])
            return all(since[name] > 5 for name in names)

        wait_until(all_answer, within_s=60)

    def untold(self, kind: str) -> int:
        """Count the answers that nobody may have heard of before their maker was killed."""
        return sum(
            -UNTOLD_S[kind] < one.at_s - self.killed_s[getattr(one, kind)] <= 1 for one in self.good
        )


@pytest.fixture
def cluster(redis: RedisServer, tmp_path: Path) -> Iterator[Line]:
    with contextlib.ExitStack() as running:
        made = Line(redis, tmp_path, running)
        for name in "ab":
            made.start_gateway(name)
        for name, joins in (("x", "a"), ("y", "b"), ("z", "a")):
            made.start_worker(name, joins)
        for name in "ab":
            wait_until(lambda name=name: len(made.status(name)["pools"]["vlm"]["workers"]) == 3)  # type: ignore[misc]
        yield made


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def completed(status: dict[str, Any]) -> int:
    count: int = status["outcomes"].get("completed", 0)
    return count


def answered_by_workers(status: dict[str, Any]) -> int:
    return sum(one["lanes"]["vlm"]["requests"] for one in status["workers"].values())


def boots(status: dict[str, Any]) -> dict[str, int]:
    return {name: one["boots"] for name, one in status["workers"].items()}


def test_two_gateways_and_three_workers_each_killed_once_and_the_sums_add_up(cluster: Line) -> None:
    with cluster.loaded():
        cluster.goes_on("worker", "x", "y", "z")
        for worker, gateway in (("x", "a"), ("y", "b"), ("z", "")):
            cluster.kill(worker)
            cluster.goes_on("gateway", "a", "b")
            cluster.start_worker(worker, joins=gateway or "a")
            cluster.goes_on("worker", worker)
            if gateway:
                cluster.kill(gateway)
                cluster.goes_on("gateway", "b" if gateway == "a" else "a")
                cluster.start_gateway(gateway)
                cluster.goes_on("gateway", "a", "b")

    # A worker whose gateway was killed before it told of this boot beats there again.
    for name in "ab":
        wait_until(lambda name=name: boots(cluster.status(name)) == dict.fromkeys("xyz", 2))  # type: ignore[misc]
    wait_until(lambda: completed(cluster.status("a")) == completed(cluster.status("b")))
    wait_until(
        lambda: answered_by_workers(cluster.status("a")) == answered_by_workers(cluster.status("b"))
    )
    told = cluster.status("a")
    known, good = completed(told), len(cluster.good)
    # What a gateway had counted and not told is lost with it; what was on its way to a client when
    # it was killed was counted, and not seen. Nothing else is.
    assert good - cluster.untold("gateway") <= known <= good + 2 * CLIENTS
    # The same of workers: their boots are added up, and none twice.
    generated = answered_by_workers(told)
    bad = cluster.bad.total()
    assert good - cluster.untold("worker") <= generated <= good + bad
    assert boots(told) == dict.fromkeys("xyz", 2)

    with httpx.Client(timeout=TIMEOUT_S) as client:  # and from here on all is counted exactly
        for name in "aabbb":
            cluster.ask(client, name)
    assert len(cluster.good) == good + 5
    for name in "ab":
        wait_until(lambda name=name: completed(cluster.status(name)) == known + 5)  # type: ignore[misc]
        assert answered_by_workers(cluster.status(name)) == generated + 5
