"""Fixtures of gateways and scripted workers on real sockets."""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.assembly import TIMING, Timing
from gateway.cluster import sync
from gateway.fleet import health as control
from gateway.fleet import registry
from gateway.fleet import worker as fleet_worker
from gateway.proxy import handler
from gateway.state.redis import RedisClient
from tests.support.canary_listener import CanaryListener
from tests.support.fault_proxy import FaultProxy, running_proxy
from tests.support.heartbeats import send_heartbeats
from tests.support.log_capture import LogCapture, capture_logs
from tests.support.policies import PolicyAdmin
from tests.support.redis_server import TEST_DEADLINE_S, RedisServer
from tests.support.running_gateway import RunningGateway, make_settings, running_worker, wait_until
from tests.support.scripted_worker import ScriptedWorker, lane_report, speculation

MakeClusterGateway = Callable[..., RunningGateway]
QUICK = Timing(
    refresh_s=0.05,
    exchange_s=0.05,
    usage_flush_s=600.0,
    redis_deadline_s=TEST_DEADLINE_S,
    redis_admin_deadline_s=TEST_DEADLINE_S,
)
"""Of gateways in tests that wait for an exchange, and are not about deadlines."""
SILENCE_S = 60.0
"""How long a worker may send no heartbeat in tests."""

_SHARE_OF_WRONG_SECRETS = handler._WRONG_SECRETS_SHARE


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remove_settings(monkeypatch)
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def remove_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(os.environ):
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def long_status_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the timeout of worker reports for a machine that runs other tests too."""
    monkeypatch.setattr(control, "REPORT_TIMEOUT_S", 5.0)


@pytest.fixture(autouse=True)
def long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a worker that has joined by hand, for seven seconds are short on a busy machine."""
    for module in (fleet_worker, registry, sync):
        monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", SILENCE_S)


@pytest.fixture(scope="session", autouse=True)
def share_of_wrong_secrets() -> Iterator[float]:
    """Let no wrong secret wait, for tests send many from one address; yield the usual share."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(handler, "_WRONG_SECRETS_SHARE", 1e6)
        yield _SHARE_OF_WRONG_SECRETS  # this runs once for each folder that has the fixture


@pytest.fixture(scope="session")
def session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Run a redis-server for the whole session; tests use `redis`, which is empty."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis(session_redis: RedisServer) -> RedisServer:
    """Return an empty Redis that tests share and must not stop."""
    session_redis.client.flushall()
    return session_redis


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Run a Redis that the test may stop."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


OpenRedis = Callable[..., RedisClient]


@pytest.fixture
async def open_redis() -> AsyncIterator[OpenRedis]:
    """Return a function that opens a client of a Redis until the end of the test."""
    async with AsyncExitStack() as stack:

        def open_one(server: RedisServer, *deadlines_s: float) -> RedisClient:
            client = RedisClient(server.url, *(deadlines_s or (TEST_DEADLINE_S,)))
            stack.push_async_callback(client.close)
            return client

        yield open_one


@pytest.fixture
def worker() -> Iterator[ScriptedWorker]:
    with running_worker() as scripted:
        yield scripted


@pytest.fixture
def join_with_heartbeats(worker: ScriptedWorker) -> Iterator[Callable[[RunningGateway], None]]:
    """Return a function that makes the worker join and send heartbeats until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda gateway: stack.enter_context(send_heartbeats(gateway, worker))


@pytest.fixture
def second_worker() -> Iterator[ScriptedWorker]:
    with running_worker("fake-b") as scripted:
        yield scripted


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with RunningGateway(make_settings(tmp_path)) as running:
        yield running


@pytest.fixture
def gateway_with_worker(gateway: RunningGateway, worker: ScriptedWorker) -> RunningGateway:
    gateway.join(worker)
    return gateway


@dataclass(frozen=True)
class Served:
    """A gateway, and the scripted worker that has joined it."""

    gateway: RunningGateway
    worker: ScriptedWorker


@pytest.fixture
def served(gateway_with_worker: RunningGateway, worker: ScriptedWorker) -> Served:
    return Served(gateway_with_worker, worker)


@pytest.fixture
def shared(shared_gateway: RunningGateway, module_worker: ScriptedWorker) -> Served:
    return Served(shared_gateway, module_worker)


@pytest.fixture(scope="module")
def module_worker() -> Iterator[ScriptedWorker]:
    """Run a worker for all tests of a file that change nothing at it."""
    with running_worker() as scripted:
        yield scripted


@contextlib.contextmanager
def gateway_of_module(
    folder: Path, *workers: ScriptedWorker, **settings: object
) -> Iterator[RunningGateway]:
    """Run a gateway with workers, before the environment of a test is clean."""
    with contextlib.ExitStack() as stack:
        remove_settings(stack.enter_context(pytest.MonkeyPatch.context()))
        running = stack.enter_context(RunningGateway(make_settings(folder, **settings)))
        for one in workers:
            stack.enter_context(send_heartbeats(running, one))
        yield running


@pytest.fixture(scope="module")
def module_gateway(tmp_path_factory, module_worker) -> Iterator[RunningGateway]:
    """Run a gateway with `module_worker` for all tests of a file that change nothing at it."""
    folder = tmp_path_factory.mktemp("module-gateway")
    with gateway_of_module(folder, module_worker) as running:
        yield running


@pytest.fixture
def shared_gateway(module_gateway, module_worker) -> Iterator[RunningGateway]:
    """Return `module_gateway` with its worker as it was, for a test that has a key of its own.

    A worker that fails would be ejected, for all later tests of the file.
    """
    module_worker.reset()
    yield module_gateway
    module_gateway.client.headers.pop("authorization", None)


@pytest.fixture
def admin(gateway: RunningGateway) -> Iterator[PolicyAdmin]:
    with PolicyAdmin(gateway.url, gateway.admin_key) as policy_admin:
        yield policy_admin


@pytest.fixture
def gateway_with_traffic(gateway: RunningGateway, worker: ScriptedWorker) -> RunningGateway:
    """Return a gateway with traffic in every metric: a wait, a retry, a limit, drafts."""
    cause_traffic(gateway, worker)
    return gateway


def cause_traffic(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    lane = lane_report("text-mtp", slots=1, speculation=speculation(steps=4, one=1, two=1))
    gateway.join_with(worker, lane)
    worker.script.hang = True
    with ThreadPoolExecutor(2) as pool:
        responses = [pool.submit(gateway.chat, temperature=0, stream=True) for _ in range(2)]
        wait_until(lambda: bool(gateway.status()["pools"]["text-mtp"]["waiting"]))
        worker.resume.set()
        assert [response.result().status_code for response in responses] == [200, 200]
    gateway.chat(temperature=9)


@pytest.fixture
def make_cluster_gateway(redis: RedisServer, tmp_path: Path) -> Iterator[MakeClusterGateway]:
    """Return a function that starts a gateway with a new state folder, as on another machine."""
    with contextlib.ExitStack() as running:
        gateways: list[RunningGateway] = []

        def start(timing: Timing = QUICK, **fields: object) -> RunningGateway:
            folder = tmp_path / f"gateway-{len(gateways)}"
            settings = make_settings(folder, redis_url=SecretStr(redis.url), **fields)
            gateways.append(running.enter_context(RunningGateway(settings, timing)))
            return gateways[-1]

        yield start


@pytest.fixture
def log_capture() -> Iterator[LogCapture]:
    """Capture the log of all threads but that of the test."""
    with capture_logs() as handler:
        yield handler


@pytest.fixture
def canary_listener() -> Iterator[CanaryListener]:
    """Run a listener that must receive no connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield CanaryListener(listener)


MakeGateway = Callable[..., RunningGateway]
StartGateway = Callable[..., RunningGateway]
BreakRedis = Callable[[RedisServer], None]


@pytest.fixture
def proxy(worker: ScriptedWorker) -> Iterator[FaultProxy]:
    """Run a proxy in front of the first worker, whose reports name its address."""
    with running_proxy(worker.url) as running:
        worker.url = running.url
        yield running


@pytest.fixture
def gateway_behind_proxy(gateway, worker, proxy) -> RunningGateway:
    """Return a gateway that reaches its only worker through the proxy."""
    gateway.join(worker)
    return gateway


def ready_workers(gateway: RunningGateway) -> set[str]:
    workers = gateway.status()["workers"]
    return {name for name, worker in workers.items() if worker["state"] == "ready"}


@pytest.fixture
def make_gateway(tmp_path: Path) -> Iterator[MakeGateway]:
    """Return a function that starts a gateway with given settings until the end of the test.

    It returns the gateway once the scripted and the static workers have joined.
    """
    with ExitStack() as running:

        def make(*workers: ScriptedWorker, **settings: Any) -> RunningGateway:
            names = settings.keys() & {field.name for field in fields(Timing)}
            timing = replace(TIMING, **{name: settings.pop(name) for name in names})
            gateway = RunningGateway(make_settings(tmp_path, **settings), timing)
            started = running.enter_context(gateway)
            for worker_ in workers:
                started.join(worker_)
            if gateway_workers := settings.get("workers"):
                wait_until(lambda: ready_workers(started) == {one.id for one in gateway_workers})
            return started

        yield make


@pytest.fixture
def start_gateway(private_redis: RedisServer, tmp_path: Path) -> Iterator[StartGateway]:
    """Return a function that starts a gateway with a named state folder."""
    with ExitStack() as running:

        def start(
            name: str = "a", url: str = private_redis.url, timing: Timing = QUICK
        ) -> RunningGateway:
            settings = make_settings(tmp_path / name, redis_url=SecretStr(url))
            return running.enter_context(RunningGateway(settings, timing))

        yield start


@pytest.fixture
def start_joined(start_gateway, join_with_heartbeats) -> StartGateway:
    """Return a function that starts a gateway as `start_gateway`, and lets the worker join."""

    def start(*arguments: Any, **fields: Any) -> RunningGateway:
        gateway = start_gateway(*arguments, **fields)
        join_with_heartbeats(gateway)
        return gateway

    return start
