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
from tests.support.canary_listener import Trap
from tests.support.fault_proxy import FaultProxy, proxying
from tests.support.heartbeats import beating
from tests.support.log_capture import Heard, hearing
from tests.support.policies import Admin
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import RunningGateway, eventually, serving, settings_for_tests
from tests.support.scripted_worker import FakeWorker, lane_report, speculation

Makes = Callable[[], RunningGateway]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test."""
    for name in tuple(os.environ):
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def patient_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker told is waited for, on a machine that is busy with other tests too."""
    monkeypatch.setattr(control, "REFRESH_TIMEOUT_S", 5.0)


@pytest.fixture(scope="session")
def any_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server for the whole session; tests take `redis`, which is empty."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis(any_redis: RedisServer) -> RedisServer:
    """An empty Redis that nobody breaks."""
    any_redis.client.flushall()
    return any_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may break."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    fake = FakeWorker()
    with serving(fake, sockets=[fake.socket]):
        yield fake


@pytest.fixture
def joins(worker: FakeWorker) -> Iterator[Callable[[RunningGateway], None]]:
    """Let the worker join a gateway and beat there until the test ends."""
    with contextlib.ExitStack() as beats:
        yield lambda gateway: beats.enter_context(beating(gateway, worker))


@pytest.fixture
def second_worker() -> Iterator[FakeWorker]:
    fake = FakeWorker(worker_id="fake-b")
    with serving(fake, sockets=[fake.socket]):
        yield fake


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway that nobody has joined."""
    with RunningGateway(settings_for_tests(tmp_path)) as running:
        yield running


@pytest.fixture
def line(gateway: RunningGateway, worker: FakeWorker) -> RunningGateway:
    """A gateway that the fake worker has joined."""
    assert gateway.join(worker).status_code == 200
    return gateway


@pytest.fixture
def admin(gateway: RunningGateway) -> Iterator[Admin]:
    """An admin of the gateway, who needs no key."""
    with Admin(gateway.url) as one:
        yield one


@pytest.fixture
def busy(gateway: RunningGateway, worker: FakeWorker) -> RunningGateway:
    """A gateway that has something to tell of every figure: a wait, a retry, a limit, drafts."""
    lane = lane_report("text-mtp", slots=1, speculation=speculation(steps=4, one=1, two=1))
    worker.reported = worker.report(lanes=[lane.model_dump()])
    gateway.join(worker, lanes=[lane.model_dump()])
    worker.script.hang = True
    with ThreadPoolExecutor(2) as aside:
        asked = [aside.submit(gateway.chat, temperature=0, stream=True) for _ in range(2)]
        eventually(lambda: bool(gateway.status()["pools"]["text-mtp"]["waiting"]))
        worker.go_on.set()
        assert [answer.result().status_code for answer in asked] == [200, 200]
    gateway.chat(temperature=9)
    return gateway


@pytest.fixture
def makes(redis: RedisServer, tmp_path: Path) -> Iterator[Makes]:
    """Start a gateway with a state folder of its own, as on a machine of its own."""
    with contextlib.ExitStack() as running:
        made: list[RunningGateway] = []

        def one() -> RunningGateway:
            folder = tmp_path / f"gateway-{len(made)}"
            settings = settings_for_tests(folder, redis_url=SecretStr(redis.url))
            made.append(running.enter_context(RunningGateway(settings)))
            return made[-1]

        yield one


@pytest.fixture
def heard() -> Iterator[Heard]:
    """What is logged while the test runs, but by its own clients."""
    with hearing() as handler:
        yield handler


@pytest.fixture
def trap() -> Iterator[Trap]:
    """A trap for as long as the test runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Trap(listener)


Hasty = Callable[..., RunningGateway]
Starts = Callable[..., RunningGateway]
Joins = Callable[[RunningGateway], None]
Break = Callable[[RedisServer], None]


@pytest.fixture
def proxy(worker: FakeWorker) -> Iterator[FaultProxy]:
    """A proxy before the first worker, which says that it listens there."""
    with proxying(worker.url) as running:
        worker.url = running.url
        yield running


@pytest.fixture
def proxied(gateway: RunningGateway, worker: FakeWorker, proxy: FaultProxy) -> RunningGateway:
    """A gateway that reaches its only worker through the proxy."""
    assert gateway.join(worker).status_code == 200
    return gateway


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Hasty]:
    """Make a gateway with settings of the test's own; it ends with the test."""
    with ExitStack() as running:

        def make(*workers: FakeWorker, **settings: object) -> RunningGateway:
            made = running.enter_context(RunningGateway(settings_for_tests(tmp_path, **settings)))
            for each in workers:
                assert made.join(each).status_code == 200
            return made

        yield make


@pytest.fixture
def starts(own_redis: RedisServer, tmp_path: Path) -> Iterator[Starts]:
    """Start a gateway by the name of its state folder; the same name is the same machine."""
    with ExitStack() as running:

        def one(name: str = "a", url: str = own_redis.url) -> RunningGateway:
            settings = settings_for_tests(tmp_path / name, redis_url=SecretStr(url))
            return running.enter_context(RunningGateway(settings))

        yield one
