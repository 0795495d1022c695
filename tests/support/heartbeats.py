"""Heartbeats of scripted workers during a test, which may last longer than the timeout."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.running_gateway import HEARTBEATS, RunningGateway
from tests.support.scripted_worker import ScriptedWorker

_INTERVAL_S = 1.0


@contextlib.contextmanager
def send_heartbeats(gateway: RunningGateway, worker: ScriptedWorker) -> Iterator[None]:
    """Let a worker join and send heartbeats, with what it reports if asked, in the context."""

    def send_heartbeat() -> httpx.Response:
        asked = worker.status_report
        report = asked.model_dump(exclude={"boot_id"}) if asked else {}
        return gateway.send_heartbeat(worker, **report)

    with repeated(send_heartbeat):
        yield


@contextlib.contextmanager
def repeated(send_heartbeat: Callable[[], httpx.Response]) -> Iterator[None]:
    """Send a heartbeat each second while the context lasts."""
    assert any(send_heartbeat().status_code == 200 for _ in range(HEARTBEATS))
    ended = threading.Event()

    def send_until_ended() -> None:
        while not ended.wait(_INTERVAL_S):
            with contextlib.suppress(httpx.TransportError, RuntimeError):  # the gateway may stop
                send_heartbeat()

    thread = threading.Thread(target=send_until_ended)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def gateway_with_worker(gateway, worker) -> Iterator[RunningGateway]:
    """Yield a gateway with a worker that sends heartbeats, for folders whose tests take longer."""
    with send_heartbeats(gateway, worker):
        yield gateway
