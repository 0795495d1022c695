"""Floods of single connections: trailers, pipelined requests, and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from statistics import quantiles
from typing import Final, NamedTuple

from bench.harness.process_cost import resident_bytes

_GET: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
_CHUNKED: Final = (
    b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
)
_HALF_READ: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nx"
_PIECE_BYTES: Final = 1 << 20
_PROBE_S: Final = 0.02
_CLOSED_WITHIN_S: Final = 25.0
"""A gateway allows 15 s, and checks once a second."""


class Target(NamedTuple):
    """The port under attack, and its process."""

    port: int
    process_id: int


class Flood(NamedTuple):
    """The effect of one flood."""

    name: str
    sent: int
    """Connections or requests, as the name says; of trailers, bytes."""
    grown_mb: float
    """The most memory above that before the flood."""
    kept_mb: float
    """The memory above that before the flood once all connections are closed."""
    neighbour_p99_ms: float
    closed: bool
    """The server closed every connection in time."""


async def run_floods(target: Target, *, scale: float) -> list[Flood]:
    """Play every flood; `scale` 1.0 is the full size."""
    return [
        await _measure("bytes of trailers", target, int(50e6 * scale), _send_trailers),
        await _measure("pipelined requests", target, int(500_000 * scale), _send_pipelined),
        await _measure("half-read bodies", target, int(1_000 * scale), _send_half_read),
    ]


async def _measure(
    name: str, target: Target, count: int, flood: Callable[[int, int], Awaitable[bool]]
) -> Flood:
    """Run a flood beside a neighbour's requests, and sample the memory of the process."""
    await _probe(target.port)  # the first request of a process is slow
    before = resident_bytes(target.process_id)
    most, ended = before, asyncio.Event()
    times_s: list[float] = []

    async def watch() -> None:
        nonlocal most
        while not ended.is_set():
            times_s.append(await _probe(target.port))
            if len(times_s) % 10 == 0:
                sampled = await asyncio.to_thread(resident_bytes, target.process_id)
                most = max(most, sampled)
            await asyncio.sleep(_PROBE_S)

    watching = asyncio.create_task(watch())
    try:
        closed = await flood(target.port, count)
    finally:
        ended.set()
        await watching
    await asyncio.sleep(1.0)
    times_s += [await _probe(target.port) for _ in range(2)]  # a flood may end at once
    after = resident_bytes(target.process_id)
    return Flood(
        name=name,
        sent=count,
        grown_mb=(max(most, after) - before) / 1e6,
        kept_mb=(after - before) / 1e6,
        neighbour_p99_ms=1000 * quantiles(times_s, n=100)[98],
        closed=closed,
    )


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
