"""Floods of single connections: trailers, pipelined requests, and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Final

from bench.attack.attack import Attack
from bench.attack.http_client import connection

_GET: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
_LAST_GET: Final = _GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
_CHUNKED: Final = (
    b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
)
_HALF_READ: Final = _GET.replace(b"\r\n\r\n", b"\r\ncontent-length: 10\r\n\r\nx")
_TRAILERS: Final = b"a:b\r\n" * 200_000
_TRAILERS_SENT: Final = 50
_PIPELINED: Final = 10_000
_CONNECTIONS: Final = 1000
_CLOSED_WITHIN_S: Final = 25.0
"""A gateway allows 15 s, and checks once a second."""


class Floods(Attack):
    """Each flood at the port of the gateway and at that of the worker, one at a time."""

    name = "floods"
    promise = "each connection is closed in time, and every pipelined request answered"
    share = 0.06
    concurrency = 1

    async def one(self, chance: Random) -> None:
        flood = chance.choice((_send_trailers, _send_pipelined, _send_half_read))
        port = chance.choice((self.target.gateway_port, self.target.worker_port))
        self.tally.begin(flood.__name__)
        closed = await flood(port)
        self.tally.answers["closed" if closed else "open"] += 1
        if not closed:
            self.tally.fail("a connection is open, or a request has no answer", flood.__name__)


async def _send_trailers(port: int) -> bool:
    """Send trailers, on a new connection each time that the server closes one."""
    left, closed = _TRAILERS_SENT, True
    while left > 0:
        async with connection(port) as opened:
            open_yet = await opened.send(_CHUNKED)
            while open_yet and left > 0:
                open_yet = await opened.send(_TRAILERS)
                left -= 1
            closed &= await opened.is_closed(_CLOSED_WITHIN_S)
    return closed


async def _send_pipelined(port: int) -> bool:
    answered = 0
    async with connection(port) as opened:

        async def send() -> None:
            for _ in range(_PIPELINED // 1000):
                await opened.send(_GET * 1000)
            await opened.send(_LAST_GET)

        sending = asyncio.create_task(send())
        try:
            while piece := await opened.read_some():
                answered += piece.count(b"alive")
        finally:
            sending.cancel()
    return answered >= _PIPELINED


async def _send_half_read(port: int) -> bool:
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(connection(port)) for _ in range(_CONNECTIONS)]
        for one in opened:
            await one.send(_HALF_READ)
        return all(await asyncio.gather(*(one.is_closed(_CLOSED_WITHIN_S) for one in opened)))
