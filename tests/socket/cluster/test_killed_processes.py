"""Two gateways and their workers under load, killed with SIGKILL: sums stay exact."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import SecretStr

from tests.support.paceline_process import LISTENS, TIMEOUT_S, PacelineProcess, start_paceline
from tests.support.redis_server import RedisServer, free_port
from tests.support.running_gateway import (
    ADMIN_KEY,
    RunningGateway,
    chat_body,
    make_settings,
    wait_until,
)
from tests.support.scripted_worker import JOIN_TOKEN
from tests.support.scripted_worker_process import ScriptedWorkerProcess, scripted_worker_process

CLIENTS = 4
"""Each has one request at a time."""
# A gateway writes its counts twice a second, a worker with its next heartbeat; the rest is a margin
# for a busy machine.
UNREPORTED_S = {"gateway": 2.5, "worker": 4.0}
JOINS = {"x": "a", "y": "b", "z": "a"}
"""Where each worker joins."""


class SuccessfulResponse(NamedTuple):
    """One successful response as its client saw it."""

    at_s: float
    gateway: str
    worker: str


class Cluster:
    """Gateways and workers by name; each may be killed and started again under its name.

    Gateways that are never killed run in this process, since each other one takes seconds to load.
    """

    def __init__(self, redis: RedisServer, folder: Path, stack: contextlib.ExitStack) -> None:
        self._redis, self._folder, self._stack = redis, folder, stack
        self._gateways: dict[str, PacelineProcess] = {}
        self._workers: dict[str, ScriptedWorkerProcess] = {}
        self._ports: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self.killed_s: dict[str, float] = {}
        self.successes: list[SuccessfulResponse] = []
        self.failures: Counter[str] = Counter()
        self._stop = threading.Event()

    def start_gateway(self, name: str, *, killable: bool = True) -> None:
        """Start a gateway; a restarted one has its former port, where its workers join."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        if not killable:
            settings = make_settings(folder, redis_url=SecretStr(self._redis.url))
            self.urls[name] = self._stack.enter_context(RunningGateway(settings)).url
            return
        port = self._ports.setdefault(name, free_port())
        environment = {
            "PACELINE_JOIN_TOKEN": JOIN_TOKEN,
            "PACELINE_ADMIN_KEY": ADMIN_KEY,
            "PACELINE_REDIS_URL": self._redis.url,
        }
        process = start_paceline(
            "gateway", "--port", str(port), environment=environment, folder=folder
        )
        gateway = PacelineProcess(self._stack.enter_context(process))
        self._gateways[name], self.urls[name] = gateway, gateway.wait_for(LISTENS)[1]

    def start_worker(self, name: str) -> None:
        """Start a worker; a restarted one has its former port, which identifies it."""
        port = self._ports.setdefault(name, free_port())
        worker = scripted_worker_process(name, joins=self.urls[JOINS[name]], port=port)
        self._workers[name] = self._stack.enter_context(worker)

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
        return httpx.get(f"{self.urls[name]}/v1/status", timeout=TIMEOUT_S).json()

    def wait_for_both(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the status of each gateway is as it should be."""
        for name in ("a", "b"):
            wait_until(lambda name=name: condition(self.status(name)))  # type: ignore[misc]

    def send_request(self, client: httpx.Client, name: str) -> None:
        """Send a request to one gateway and record its outcome."""
        try:
            response = client.post(f"{self.urls[name]}/v1/chat/completions", json=chat_body())
        except (httpx.HTTPError, KeyError):
            self.failures["gateway"] += 1
            return
        if response.is_success:
            worker = response.headers["x-paceline-worker"]
            self.successes.append(SuccessfulResponse(time.monotonic(), name, worker))
        else:
            self.failures[response.json()["error"]["code"]] += 1

    def load(self) -> None:
        """Send requests to both gateways, one at a time, until stopped."""
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self._stop.is_set():
                for name in ("a", "b"):
                    self.send_request(client, name)
                self._stop.wait(0.2)

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as clients:
            loads = [clients.submit(self.load) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._stop.set()
                for load in loads:
                    load.result()

    def wait_for_progress(self, kind: str, *names: str) -> None:
        """Wait until each named process has served a few more requests."""
        before = len(self.successes)

        def all_serve() -> bool:
            counts = Counter(getattr(response, kind) for response in self.successes[before:])
            return all(counts[name] > 5 for name in names)

        wait_until(all_serve, within_s=60)

    def unreported(self, kind: str) -> int:
        """Return the number of responses that a killed process may not have reported."""
        return sum(
            -UNREPORTED_S[kind]
            < response.at_s - self.killed_s.get(getattr(response, kind), float("inf"))
            <= 1
            for response in self.successes
        )


@pytest.fixture
def cluster(redis: RedisServer, tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(redis, tmp_path, stack)


def completed(status: dict[str, Any]) -> int:
    return status["outcomes"].get("completed", 0)


def served_by_workers(status: dict[str, Any]) -> int:
    return sum(worker["lanes"]["vlm"]["requests"] for worker in status["workers"].values())


def boots(status: dict[str, Any]) -> dict[str, int]:
    return {name: worker["boots"] for name, worker in status["workers"].items()}


@pytest.mark.parametrize(
    ("workers", "gateways"), [("x", "a"), pytest.param("xyz", "ab", marks=pytest.mark.proof)]
)
def test_sums_are_exact_after_gateways_and_workers_were_killed(cluster, workers, gateways) -> None:
    """Each of these workers and gateways is killed once, and started again."""
    for name in "ab":
        cluster.start_gateway(name, killable=name in gateways)
    all_workers = sorted({"x", "y", *workers})
    for name in all_workers:
        cluster.start_worker(name)
    cluster.wait_for_both(lambda status: len(status["pools"]["vlm"]["workers"]) == len(all_workers))
    with cluster.loaded():
        cluster.wait_for_progress("worker", *all_workers)
        for worker, gateway in zip_longest(workers, gateways):
            cluster.kill(worker)
            cluster.wait_for_progress("gateway", "a", "b")
            cluster.start_worker(worker)
            cluster.wait_for_progress("worker", worker)
            if gateway:
                cluster.kill(gateway)
                cluster.wait_for_progress("gateway", "b" if gateway == "a" else "a")
                cluster.start_gateway(gateway)
                cluster.wait_for_progress("gateway", "a", "b")

    # If a gateway was killed before it reported a boot, the worker's next heartbeat reports it.
    expected_boots = {name: 1 + (name in workers) for name in all_workers}
    cluster.wait_for_both(lambda status: boots(status) == expected_boots)
    for count in (completed, served_by_workers):
        wait_until(lambda count=count: count(cluster.status("a")) == count(cluster.status("b")))  # type: ignore[misc]
    status = cluster.status("a")
    reported, successes = completed(status), len(cluster.successes)
    # A killed gateway loses counts that it had not written; it counted responses that it could not
    # deliver any more. No other difference is permitted.
    assert successes - cluster.unreported("gateway") <= reported <= successes + 2 * CLIENTS
    # The same holds for workers; each of their boots counts once.
    generated = served_by_workers(status)
    failures = cluster.failures.total()
    assert successes - cluster.unreported("worker") <= generated <= successes + failures
    assert boots(status) == expected_boots

    with httpx.Client(timeout=TIMEOUT_S) as client:  # all later requests are counted exactly
        for name in "aabbb":
            cluster.send_request(client, name)
    assert len(cluster.successes) == successes + 5
    cluster.wait_for_both(lambda status: completed(status) == reported + 5)
    assert served_by_workers(cluster.status("a")) == generated + 5
    assert served_by_workers(cluster.status("b")) == generated + 5
