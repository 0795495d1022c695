"""Workers that stay: on a slow machine a test takes longer than a worker may be silent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import httpx

from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import ScriptedWorker

_BEAT_S = 1.0


@contextlib.contextmanager
def send_heartbeats(gateway: RunningGateway, worker: ScriptedWorker) -> Iterator[None]:
    """Let a worker join, and beat for as long as the context lasts."""
    assert gateway.send_heartbeat(worker).status_code == 200
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            with contextlib.suppress(httpx.TransportError, RuntimeError):  # it may be at its end
                gateway.send_heartbeat(worker)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
