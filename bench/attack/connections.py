"""Floods of single connections: trailers, pipelined requests, and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from statistics import quantiles
from typing import Any, Final, NamedTuple

from bench.attack.neighbour import Neighbourhood, Resident

_GET: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
_CHUNKED: Final = (
    b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
)
_HALF_READ: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nx"
_PIECE_BYTES: Final = 1 << 20
_PROBE_S: Final = 0.005
_PROBES: Final = 200
"""At least so many, for a 99th percentile: a flood that ends sooner is sent again."""
_CLOSED_WITHIN_S: Final = 25.0
"""A gateway allows 15 s, and checks once a second."""


class Target(NamedTuple):
    """The port under attack, and its process."""

    part: str
    port: int
    process_id: int


class Flood(NamedTuple):
    """The effect of one flood."""

    part: str
    name: str
    sent: int
    """Connections or requests, as the name says; of trailers, bytes."""
    memory: Resident
    after_s: float
    """How long after the flood the memory was within its bound, or was last looked at."""
    neighbour_p99_ms: float
    closed: bool
    """The server closed every connection in time."""


async def run_floods(target: Target, *, scale: float, after_s: float) -> list[Flood]:
    """Play every flood; `scale` 1.0 is the full size. Wait for memory as long as `after_s`."""
    watch = Neighbourhood({target.part: target.process_id}, after_s=after_s)
    return [
        await _measure(name, target, int(count * scale), flood, watch)
        for name, count, flood in (
            ("bytes of trailers", 50_000_000, _send_trailers),
            ("pipelined requests", 500_000, _send_pipelined),
            ("half-read bodies", 1_000, _send_half_read),
        )
    ]


async def _measure(
    name: str,
    target: Target,
    count: int,
    flood: Callable[[int, int], Awaitable[bool]],
    watch: Neighbourhood,
) -> Flood:
    """Run a flood beside a neighbour's requests, again until the neighbour has enough times."""
    await _probe(target.port)  # the first request of a process is slow
    times_s: list[float] = []

    async def ask() -> None:
        while True:
            times_s.append(await _probe(target.port))
            await asyncio.sleep(_PROBE_S)

    async with watch.beside(name, settle=True), _running(ask()) as neighbour:
        closed = await flood(target.port, count)
        while len(times_s) < _PROBES and not neighbour.done():
            closed &= await flood(target.port, count)
    effect = watch.effects[name]
    return Flood(
        part=target.part,
        name=name,
        sent=count,
        memory=effect.memory[target.part],
        after_s=effect.after_s,
        neighbour_p99_ms=1000 * quantiles(times_s, n=100, method="inclusive")[98],
        closed=closed,
    )


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run an endless task within the context; raise what ended it before."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _probe(port: int) -> float:
    """Return the seconds of one request on a connection of its own."""
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    await reader.read()
    writer.close()
    return time.perf_counter() - began_s


async def _send_trailers(port: int, count: int) -> bool:
    """Send so many bytes, on a new connection each time that the server closes one."""
    piece, sent, closed = b"a:b\r\n" * (_PIECE_BYTES // 5), 0, True
    while sent < count:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(_CHUNKED + b"0\r\n")
            while sent < count:
                writer.write(piece)
                sent += len(piece)
                await writer.drain()
        closed &= await _is_closed(reader, writer)
    return closed


async def _send_pipelined(port: int, count: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    batch = _GET * 1000

    async def send() -> None:
        for _ in range(max(1, count // 1000)):
            writer.write(batch)
            await writer.drain()
        writer.write(_GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))

    sending = asyncio.create_task(send())
    answered = 0
    try:
        while piece := await reader.read(_PIECE_BYTES):
            answered += piece.count(b"alive")
    finally:
        sending.cancel()
        writer.close()
    return answered >= count  # every request has its response, and the connection is closed


async def _send_half_read(port: int, count: int) -> bool:
    connections = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_HALF_READ)
        connections.append((reader, writer))
    return all(await asyncio.gather(*(_is_closed(*connection) for connection in connections)))


async def _is_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Return whether the server closes the connection in time, with or without a reset."""
    try:
        async with asyncio.timeout(_CLOSED_WITHIN_S):
            with contextlib.suppress(ConnectionError):
                while await reader.read(_PIECE_BYTES):
                    pass
            return True
    except TimeoutError:
        return False
    finally:
        writer.close()
