"""A gateway whose limits are short, and workers behind proxies that break what they carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.support.fault_proxy import FaultProxy, proxying
from tests.support.gateway_fixtures import (
    any_redis,
    clean_environment,
    gateway,
    joins,
    line,
    own_redis,
    patient_refresh,
    redis,
    second_worker,
    worker,
)
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import Gateway, settings_for_tests
from tests.support.scripted_worker import FakeWorker

__all__ = [
    "any_redis",
    "clean_environment",
    "gateway",
    "joins",
    "line",
    "own_redis",
    "patient_refresh",
    "redis",
    "second_worker",
    "worker",
]

Hasty = Callable[..., Gateway]
Starts = Callable[..., Gateway]
Joins = Callable[[Gateway], None]
Break = Callable[[RedisServer], None]


@pytest.fixture
def proxy(worker: FakeWorker) -> Iterator[FaultProxy]:
    """A proxy before the first worker, which says that it listens there."""
    with proxying(worker.url) as running:
        worker.url = running.url
        yield running


@pytest.fixture
def proxied(gateway: Gateway, worker: FakeWorker, proxy: FaultProxy) -> Gateway:
    """A gateway that reaches its only worker through the proxy."""
    assert gateway.join(worker).status_code == 200
    return gateway


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Hasty]:
    """Make a gateway with settings of the test's own; it ends with the test."""
    with ExitStack() as running:

        def make(*workers: FakeWorker, **settings: object) -> Gateway:
            made = running.enter_context(Gateway(settings_for_tests(tmp_path, **settings)))
            for each in workers:
                assert made.join(each).status_code == 200
            return made

        yield make


@pytest.fixture
def starts(own_redis: RedisServer, tmp_path: Path) -> Iterator[Starts]:
    """Start a gateway by the name of its state folder; the same name is the same machine."""
    with ExitStack() as running:

        def one(name: str = "a", url: str = own_redis.url) -> Gateway:
            settings = settings_for_tests(tmp_path / name, redis_url=SecretStr(url))
            return running.enter_context(Gateway(settings))

        yield one
