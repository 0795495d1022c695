"""The run of a worker's server: listen, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from starlette.types import ASGIApp

from paceline.http import BoundedProtocol, Server, raise_open_file_limit
from paceline.lifecycle import Shutdown, first_of
from paceline.settings import InvalidSettings
from paceline.wakefulness import awake_while
from workers.server.app import create_app
from workers.server.prefix_nodes import PrefixPeers
from workers.server.runtime import Worker

if TYPE_CHECKING:
    from workers.identity import WorkerIdentity

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30.0
"""Time for running requests to finish after a shutdown was requested."""
_BACKLOG = 2048
_ENGINE_CHECK_S = 0.5


def cannot_listen(host: str, port: int, error: OSError) -> InvalidSettings:
    """Return the error for a port that cannot be listened on."""
    return InvalidSettings(f"Cannot listen on {host} port {port}: {error.strerror}.")


async def serve(
    worker: Worker[Any],
    listener: socket.socket,
    *,
    token: SecretStr | None,
    nodes_key: str = "",
    identity: WorkerIdentity | None = None,
    shutdown: Shutdown,
    on_ready: Callable[[], None],
) -> bool:
    """Serve until a shutdown is requested or the engine dies; return whether the engine is alive.

    `nodes_key` and `identity` are those of a paired worker. Raises `InvalidSettings` if the
    listener cannot listen.
    """
    raise_open_file_limit()
    try:
        # After the weights are loaded: until then connections are refused, and the gateway sends
        # requests elsewhere. Not by uvicorn: uvloop ignores that another process listens already.
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise cannot_listen(host, port, error) from error
    async with contextlib.AsyncExitStack() as stack:
        tls = identity.client if identity else None
        peers = None
        if token:
            peers = await stack.enter_async_context(PrefixPeers(token, nodes_key, tls))
        server = _server(create_app(worker, token, peers), identity)
        await stack.enter_async_context(server.on(listener))
        if identity is not None and not identity.speaks_tls:
            securing = asyncio.create_task(_secure(server, identity, worker.changed))
            stack.callback(securing.cancel)
        await stack.enter_async_context(awake_while(lambda: worker.traffic.in_flight))
        worker.changed.set()
        on_ready()
        ready = worker.ready
        while worker.engine.alive and not shutdown.requested.is_set():
            await first_of(shutdown.requested.wait(), timeout_s=_ENGINE_CHECK_S)
            if worker.ready != ready:
                ready = worker.ready
                worker.changed.set()  # gateways learn it at once
        worker.drain()
        if worker.engine.alive:
            log.info("worker.draining")
            await first_of(
                worker.traffic.idle.wait(), shutdown.forced.wait(), timeout_s=DRAIN_TIMEOUT_S
            )
        else:
            log.error("engine.died")
    return bool(worker.engine.alive)


class _PairedProtocol(BoundedProtocol):
    """A connection that ends at once if it comes from a worker whose pairing has ended."""

    def __init__(self, identity: WorkerIdentity, **given: Any) -> None:
        super().__init__(**given)
        self._identity = identity

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look at the certificate of the other side."""
        super().connection_made(transport)
        if self._identity.refuses(transport.get_extra_info("peercert")):
            transport.abort()


def _server(app: ASGIApp, identity: WorkerIdentity | None) -> Server:
    """Return the server: of TLS, if the worker has a certificate."""
    if identity is None:
        return Server(app)
    identity.speaks_tls = identity.certified.is_set()
    tls = identity.server if identity.speaks_tls else None
    return Server(app, connection=partial(_PairedProtocol, identity), tls=tls)


async def _secure(server: Server, identity: WorkerIdentity, changed: asyncio.Event) -> None:
    """Speak only TLS once the first certificate has come, and report that to the gateways."""
    await identity.certified.wait()
    await server.secure(identity.server)
    identity.speaks_tls = True
    changed.set()


async def watch_leash(shutdown: Shutdown) -> None:
    """Request a shutdown when standard input closes."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass
    shutdown.request()
