"""One life of a worker: it listens, beats, drains when asked, and ends the engine last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable

import uvicorn
from pydantic import SecretStr

from workers.config_file import InvalidSettings
from workers.heartbeat import Membership, keep_joined
from workers.lifecycle import Server, Shutdown, first_of
from workers.server.app import create_app
from workers.server.runtime import Worker

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""How long running answers may go on once the worker was asked to end."""
_LAST_WRITES_S = 2
_KEEP_ALIVE_S = 75
"""Longer than a gateway keeps idle connections: if both close at once, a request is lost."""
_ENGINE_CHECK_S = 0.5


def cannot_listen(host: str, port: int, error: OSError) -> InvalidSettings:
    """Say why no connection can be taken there."""
    return InvalidSettings(f"Cannot listen on {host} port {port}: {error.strerror}.")


async def serve(
    worker: Worker,
    listener: socket.socket,
    *,
    token: SecretStr | None,
    gateway_url: str,
    shutdown: Shutdown,
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
    try:
        # Not before the weights are loaded: a gateway that is refused at once sends its requests
        # elsewhere. Not by uvicorn: uvloop reports no error if another process listens already.
        listener.listen(config.backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise cannot_listen(host, port, error) from error
    async with Server(config).on(listener), _joined(worker, gateway_url, token):
        on_ready()
        await _until_over(worker, shutdown)
        worker.drain()
        if worker.engine.alive:
            await _until_idle(worker, shutdown)
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


async def _until_over(worker: Worker, shutdown: Shutdown) -> None:
    """Return when the end is asked for, or when the engine thread is no more."""
    while worker.engine.alive:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENGINE_CHECK_S):
                await shutdown.requested.wait()
                return
    log.error("engine.died")


async def _until_idle(worker: Worker, shutdown: Shutdown) -> None:
    log.info("worker.draining")
    await first_of(worker.traffic.idle(), shutdown.forced.wait(), timeout_s=DRAIN_S)


async def watch_leash(shutdown: Shutdown) -> None:
    """Ask for the end once standard input closes."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass
    shutdown.request()
