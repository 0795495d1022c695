"""Floods of single connections: trailers, pipelined requests, and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from statistics import quantiles
from typing import Any, Final, NamedTuple

from bench.harness.process_cost import resident_bytes

_GET: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
_CHUNKED: Final = (
    b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
)
_HALF_READ: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nx"
_PIECE_BYTES: Final = 1 << 20
_PROBE_S: Final = 0.005
_SAMPLE_S: Final = 0.05
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
    grown_mb: float
    """The most memory above that before the flood."""
    kept_mb: float
    """The memory above that before the flood once all connections are closed."""
    again_mb: float
    """The most memory above `kept_mb` while the same flood comes again."""
    neighbour_p99_ms: float
    closed: bool
    """The server closed every connection in time."""


async def run_floods(target: Target, *, scale: float) -> list[Flood]:
    """Play every flood; `scale` 1.0 is the full size.

    Pipelined requests take as much memory however many they are, so fewer of them come again.
    """
    pipelined = int(500_000 * scale)
    return [
        await _measure("bytes of trailers", target, (int(50e6 * scale),) * 2, _send_trailers),
        await _measure("pipelined requests", target, (pipelined, pipelined // 10), _send_pipelined),
        await _measure("half-read bodies", target, (int(1_000 * scale),) * 2, _send_half_read),
    ]


async def _measure(
    name: str, target: Target, counts: tuple[int, int], flood: Callable[[int, int], Awaitable[bool]]
) -> Flood:
    """Run a flood twice beside a neighbour's requests, and sample the memory of the process.

    The flood is repeated, without a look at the memory, until the neighbour has enough times.
    """
    await _probe(target.port)  # the first request of a process is slow
    times_s: list[float] = []

    async def sample(sampled_bytes: list[int]) -> None:
        while True:
            sampled_bytes.append(await asyncio.to_thread(resident_bytes, target.process_id))
            await asyncio.sleep(_SAMPLE_S)

    async def flooded(count: int) -> tuple[bool, float, float]:
        """Return whether all was closed, the most memory and that afterwards, above the first."""
        before = resident_bytes(target.process_id)
        sampled_bytes = [before]
        async with _running(sample(sampled_bytes)):
            closed = await flood(target.port, count)
            await asyncio.sleep(1.0)
        after = resident_bytes(target.process_id)
        return closed, (max(*sampled_bytes, after) - before) / 1e6, (after - before) / 1e6

    async def ask() -> None:
        while True:
            times_s.append(await _probe(target.port))
            await asyncio.sleep(_PROBE_S)

    async with _running(ask()) as neighbour:
        first_closed, grown_mb, kept_mb = await flooded(counts[0])
        again_closed, again_mb, _ = await flooded(counts[1])
        closed = first_closed and again_closed
        while len(times_s) < _PROBES and not neighbour.done():
            closed &= await flood(target.port, counts[1])
    return Flood(
        part=target.part,
        name=name,
        sent=counts[0],
        grown_mb=grown_mb,
        kept_mb=kept_mb,
        again_mb=again_mb,
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
