"""One life of a worker: it listens, beats, drains when asked, and ends the engine last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from pydantic import SecretStr

from workers.config_file import InvalidSettings
from workers.heartbeat import Membership, keep_joined
from workers.server.app import create_app
from workers.server.runtime import Worker

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""How long running answers may go on once the worker was asked to end."""
_LAST_WRITES_S = 2
_KEEP_ALIVE_S = 75
"""Longer than a gateway keeps idle connections: if both close at once, a request is lost."""
_ENGINE_CHECK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a worker ends; each event is set once and never cleared."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    insisted: asyncio.Event = field(default_factory=asyncio.Event)
    """Asked twice: streams are not waited for."""

    def ask(self) -> None:
        """Ask for the end; asking again means at once."""
        (self.insisted if self.asked.is_set() else self.asked).set()


def cannot_listen(host: str, port: int, error: OSError) -> InvalidSettings:
    """Say why no connection can be taken there."""
    return InvalidSettings(f"Cannot listen on {host} port {port}: {error.strerror}.")


class _Server(uvicorn.Server):
    """uvicorn, but a signal starts the draining and says when connections are taken."""

    def __init__(self, config: uvicorn.Config, ending: Ending) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ending = ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            try:
                # Here, because uvloop goes on in silence where it cannot.
                listener.listen(self.config.backlog)
            except OSError as error:
                # Another process was bound to the port as well, and has begun to listen meanwhile.
                # To listen before the weights are loaded would tell earlier, but let requests wait
                # for minutes that a gateway sends elsewhere at once when they are refused.
                host, port = listener.getsockname()[:2]
                raise cannot_listen(host, port, error) from error
        await super().startup(sockets=sockets)
        self.listening.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would close the listener at once: nobody could see "draining" any more.
        self._loop.call_soon_threadsafe(self._ending.ask)


async def serve(
    worker: Worker,
    listener: socket.socket,
    *,
    token: SecretStr | None,
    gateway_url: str,
    ending: Ending,
    on_ready: Callable[[], None],
) -> bool:
    """Serve until the end is asked for or the engine dies; say whether the engine lived.

    Raises `InvalidSettings` where the listener cannot listen.
    """
    config = uvicorn.Config(
        create_app(worker, token),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_WRITES_S,
    )
    server = _Server(config, ending)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait((listening, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        async with _joined(worker, gateway_url, token):
            on_ready()
            await _until_over(worker, ending)
            worker.drain()
            if worker.engine.alive:
                await _until_idle(worker, ending)
    finally:
        listening.cancel()
        server.should_exit = True
        await serving
    return worker.engine.alive


@contextlib.asynccontextmanager
async def _joined(worker: Worker, gateway_url: str, token: SecretStr | None) -> AsyncIterator[None]:
    """Keep the gateway told inside the block; leave it on the way out."""
    if not gateway_url:
        yield
        return
    membership = Membership(
        gateway_url=gateway_url,
        token=token,
        worker_id=worker.identity.worker_id,
        report=worker.report,
        changed=worker.changed,
    )
    beating = asyncio.create_task(keep_joined(membership))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait((beating,))


async def _until_over(worker: Worker, ending: Ending) -> None:
    """Return when the end is asked for, or when the engine thread is no more."""
    while worker.engine.alive:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENGINE_CHECK_S):
                await ending.asked.wait()
                return
    log.error("engine.died")


async def _until_idle(worker: Worker, ending: Ending) -> None:
    log.info("worker.draining")
    waits = [asyncio.create_task(wait) for wait in (worker.traffic.idle(), ending.insisted.wait())]
    _, unfinished = await asyncio.wait(waits, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
    for wait in unfinished:
        wait.cancel()


async def watch_leash(ending: Ending) -> None:
    """Ask for the end once standard input closes."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass
    ending.ask()
