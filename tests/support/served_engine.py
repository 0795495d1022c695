"""Engines of the test process, served and joined as `paceline worker` does it after its start."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from pydantic import SecretStr

from paceline.lifecycle import Shutdown
from tests.support.gateway_fixtures import remove_settings
from tests.support.heartbeats import repeated
from tests.support.pairing import Paired
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import JOIN_TOKEN
from tests.support.worker_process import RunningWorker
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.types import EngineSettings
from workers.heartbeat import Membership, joined
from workers.identity import WorkerIdentity
from workers.server.engines import RunningEngine
from workers.server.pictures import PictureMemory
from workers.server.runtime import Worker
from workers.server.server import serve

_END_S = 60


@dataclass(frozen=True, kw_only=True)
class ServedWorker(RunningWorker):
    """A worker in a thread of the test process; its end does not stop the engine."""

    worker: Worker[RunningEngine]


@dataclass(frozen=True, kw_only=True)
class DemoGateway:
    """A gateway in a thread of the test process, with a worker that has joined it."""

    gateway: RunningGateway
    model: str

    @property
    def url(self) -> str:
        return self.gateway.url


@contextlib.contextmanager
def running_engine(model: Path = CHECKPOINT, **settings: Any) -> Iterator[Engine]:
    engine = Engine.start(EngineSettings(model=model, served_name="demo", **settings))
    try:
        yield engine
    finally:
        engine.stop()


@contextlib.contextmanager
def served(
    engine: RunningEngine, worker_id: str, *, join: str = "", paired: Paired | None = None
) -> Iterator[ServedWorker]:
    """Serve an engine at a free port; with the address of a gateway, join that."""
    pairing = paired.pairing if paired else None
    token = SecretStr(pairing.token if pairing else JOIN_TOKEN) if join else None
    identity = WorkerIdentity(paired.file) if paired else None
    ready: Future[tuple[asyncio.AbstractEventLoop, Shutdown]] = Future()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        worker = Worker(
            worker_id=worker_id,
            boot_id=f"boot-{worker_id}",
            url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            engine=engine,
            clock=time.time,
            started_s=time.time(),
            pictures=PictureMemory.within(engine.state().memory_limit_bytes),
        )
        membership = Membership(
            gateway_url=join,
            token=token,
            worker_id=worker_id,
            report=worker.report,
            changed=worker.changed,
            identity=identity,
        )

        async def main() -> None:
            shutdown, loop = Shutdown(), asyncio.get_running_loop()
            async with joined(membership) if join else contextlib.nullcontext():
                await serve(
                    worker,
                    listener,
                    token=token,
                    nodes_key=pairing.nodes_key if pairing else "",
                    identity=identity,
                    shutdown=shutdown,
                    on_ready=lambda: ready.set_result((loop, shutdown)),
                )

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())

        thread = threading.Thread(target=run, name=f"worker {worker_id}", daemon=True)
        thread.start()
        loop, shutdown = ready.result(_END_S)
        try:
            yield ServedWorker(
                url=identity.url(worker.url) if identity else worker.url,
                worker_id=worker_id,
                model=engine.card.model,
                lanes=tuple(engine.card.lanes),
                worker=worker,
            )
        finally:
            loop.call_soon_threadsafe(_end, shutdown)
            thread.join(_END_S)
            assert not thread.is_alive()


def _end(shutdown: Shutdown) -> None:
    for _ in range(2):  # the second request ends answers that still run
        shutdown.request()


@contextlib.contextmanager
def running_gateway(folder: Path) -> Iterator[RunningGateway]:
    """Run a gateway for the tests of a file, before the environment of each of them is clean."""
    with pytest.MonkeyPatch.context() as clean:
        remove_settings(clean)
        with RunningGateway(make_settings(folder)) as gateway:
            yield gateway


@contextlib.contextmanager
def gateway_with(folder: Path, engine: RunningEngine) -> Iterator[DemoGateway]:
    """Run a gateway that a worker with an engine has joined."""
    with running_gateway(folder) as gateway, served(engine, "demo", join=gateway.url):
        wait_until(lambda: gateway.client.get("/readyz").status_code == 200)
        yield DemoGateway(gateway=gateway, model=engine.card.model)


@contextlib.contextmanager
def gateway_of(folder: Path, worker: RunningWorker) -> Iterator[RunningGateway]:
    """Run a gateway that a worker has joined which sends no heartbeats itself."""
    with RunningGateway(make_settings(folder)) as gateway:
        path = f"/admin/v1/workers/{worker.worker_id}"
        token = {"authorization": f"Bearer {JOIN_TOKEN}"}

        def send_heartbeat() -> httpx.Response:
            report = httpx.get(f"{worker.url}/v1/status", timeout=60).json()["report"]
            return httpx.put(gateway.url + path, headers=token, json=report, timeout=60)

        with repeated(send_heartbeat):
            yield gateway
