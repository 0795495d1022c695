"""A gateway and a worker that does as it is told, both behind real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.fleet import health as control
from tests.support.canary_listener import CanaryListener
from tests.support.fault_proxy import FaultProxy, running_proxy
from tests.support.heartbeats import send_heartbeats
from tests.support.log_capture import LogCapture, capture_logs
from tests.support.policies import PolicyAdmin
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until
from tests.support.scripted_worker import ScriptedWorker, lane_report, speculation

MakeClusterGateway = Callable[[], RunningGateway]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test."""
    for name in tuple(os.environ):
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def long_status_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker told is waited for, on a machine that is busy with other tests too."""
    monkeypatch.setattr(control, "REPORT_TIMEOUT_S", 5.0)


@pytest.fixture(scope="session")
def session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server for the whole session; tests take `redis`, which is empty."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis(session_redis: RedisServer) -> RedisServer:
    """An empty Redis that nobody breaks."""
    session_redis.client.flushall()
    return session_redis


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may break."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def worker() -> Iterator[ScriptedWorker]:
    fake = ScriptedWorker()
    with running_server(fake, sockets=[fake.socket]):
        yield fake


@pytest.fixture
def keep_joined(worker: ScriptedWorker) -> Iterator[Callable[[RunningGateway], None]]:
    """Let the worker join a gateway and beat there until the test ends."""
    with contextlib.ExitStack() as beats:
        yield lambda gateway: beats.enter_context(send_heartbeats(gateway, worker))


@pytest.fixture
def second_worker() -> Iterator[ScriptedWorker]:
    fake = ScriptedWorker(worker_id="fake-b")
    with running_server(fake, sockets=[fake.socket]):
        yield fake


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway that nobody has joined."""
    with RunningGateway(make_settings(tmp_path)) as running:
        yield running


@pytest.fixture
def gateway_with_worker(gateway: RunningGateway, worker: ScriptedWorker) -> RunningGateway:
    """A gateway that the fake worker has joined."""
    assert gateway.send_heartbeat(worker).status_code == 200
    return gateway


@pytest.fixture
def admin(gateway: RunningGateway) -> Iterator[PolicyAdmin]:
    """An admin of the gateway, who needs no key."""
    with PolicyAdmin(gateway.url) as one:
        yield one


@pytest.fixture
def gateway_with_traffic(gateway: RunningGateway, worker: ScriptedWorker) -> RunningGateway:
    """A gateway that has something to tell of every figure: a wait, a retry, a limit, drafts."""
    lane = lane_report("text-mtp", slots=1, speculation=speculation(steps=4, one=1, two=1))
    worker.status_report = worker.report(lanes=[lane.model_dump()])
    gateway.send_heartbeat(worker, lanes=[lane.model_dump()])
    worker.script.hang = True
    with ThreadPoolExecutor(2) as aside:
        asked = [aside.submit(gateway.chat, temperature=0, stream=True) for _ in range(2)]
        wait_until(lambda: bool(gateway.status()["pools"]["text-mtp"]["waiting"]))
        worker.resume.set()
        assert [answer.result().status_code for answer in asked] == [200, 200]
    gateway.chat(temperature=9)
    return gateway


@pytest.fixture
def make_cluster_gateway(redis: RedisServer, tmp_path: Path) -> Iterator[MakeClusterGateway]:
    """Start a gateway with a state folder of its own, as on a machine of its own."""
    with contextlib.ExitStack() as running:
        made: list[RunningGateway] = []

        def one() -> RunningGateway:
            folder = tmp_path / f"gateway-{len(made)}"
            settings = make_settings(folder, redis_url=SecretStr(redis.url))
            made.append(running.enter_context(RunningGateway(settings)))
            return made[-1]

        yield one


@pytest.fixture
def log_capture() -> Iterator[LogCapture]:
    """What is logged while the test runs, but by its own clients."""
    with capture_logs() as handler:
        yield handler


@pytest.fixture
def canary_listener() -> Iterator[CanaryListener]:
    """A trap for as long as the test runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield CanaryListener(listener)


MakeGateway = Callable[..., RunningGateway]
StartGateway = Callable[..., RunningGateway]
KeepJoined = Callable[[RunningGateway], None]
BreakRedis = Callable[[RedisServer], None]


@pytest.fixture
def proxy(worker: ScriptedWorker) -> Iterator[FaultProxy]:
    """A proxy before the first worker, which says that it listens there."""
    with running_proxy(worker.url) as running:
        worker.url = running.url
        yield running


@pytest.fixture
def gateway_behind_proxy(
    gateway: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy
) -> RunningGateway:
    """A gateway that reaches its only worker through the proxy."""
    assert gateway.send_heartbeat(worker).status_code == 200
    return gateway


@pytest.fixture
def make_gateway(tmp_path: Path) -> Iterator[MakeGateway]:
    """Make a gateway with settings of the test's own; it ends with the test."""
    with ExitStack() as running:

        def make(*workers: ScriptedWorker, **settings: object) -> RunningGateway:
            made = running.enter_context(RunningGateway(make_settings(tmp_path, **settings)))
            for each in workers:
                assert made.send_heartbeat(each).status_code == 200
            return made

        yield make


@pytest.fixture
def start_gateway(private_redis: RedisServer, tmp_path: Path) -> Iterator[StartGateway]:
    """Start a gateway by the name of its state folder; the same name is the same machine."""
    with ExitStack() as running:

        def one(name: str = "a", url: str = private_redis.url) -> RunningGateway:
            settings = make_settings(tmp_path / name, redis_url=SecretStr(url))
            return running.enter_context(RunningGateway(settings))

        yield one
