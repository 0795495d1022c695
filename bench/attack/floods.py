"""Floods of single connections: trailers, pipelined requests, and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

from bench.attack.http_client import connection
from bench.attack.neighbour import KEPT_SHARE, Neighbourhood, Resident
from bench.attack.stack import attacked_worker
from bench.gateway.contenders import running_ours
from bench.harness.parts import fixed_port, running_parts, wait_until_up
from bench.harness.tables import Grid, Target

_GET: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
_LAST_GET: Final = _GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
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
_GROWTH_MB: Final = 10.0
_CONNECTION_KB: Final = 20.0
_NEIGHBOUR_MS: Final = 50.0


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

    def targets(self) -> Iterator[Target]:
        """Yield the bounds of memory, of its return, and of the wait of a neighbour."""
        before, peak, after = self.memory
        grows_mb = self.sent * _CONNECTION_KB / 1000 if "bodies" in self.name else _GROWTH_MB
        for name, reached, bound in (
            ("growth to the peak, MB", peak - before, grows_mb),
            ("memory 60 s after, to that before", after / before, KEPT_SHARE),
            ("neighbour p99, ms", self.neighbour_p99_ms, _NEIGHBOUR_MS),
            ("connections not closed in time", float(not self.closed), 0.0),
        ):
            yield Target(f"{self.part}, {self.name}: {name}", reached, bound)


async def flood_all(folder: Path, *, scale: float, after_s: float) -> list[Flood]:
    """Flood a gateway of its own, which has a worker, and a worker alone."""
    async with running_ours(folder) as gateway:
        floods = await _run_floods("gateway", gateway.port, gateway.process_id, scale, after_s)
    port = fixed_port()
    with tempfile.TemporaryDirectory(prefix="paceline-attack-") as home:
        worker = attacked_worker(Path(home), port)
        async with running_parts(worker):
            await wait_until_up(port)
            floods += await _run_floods("worker", port, worker.pid, scale, after_s)
    return floods


async def _run_floods(
    part: str, port: int, process_id: int, scale: float, after_s: float
) -> list[Flood]:
    """Play every flood; `scale` 1.0 is the full size. Wait for memory as long as `after_s`."""
    watch = Neighbourhood({part: process_id}, after_s=after_s)
    floods = []
    for name, full, flood in (
        ("bytes of trailers", 50_000_000, _send_trailers),
        ("pipelined requests", 500_000, _send_pipelined),
        ("half-read bodies", 1_000, _send_half_read),
    ):
        count = int(full * scale)
        async with watch.beside(name, settle=True):
            p99_ms, closed = await _measure(port, count, flood)
        effect = watch.effects[name]
        memory = effect.memory[part]
        floods.append(Flood(part, name, count, memory, effect.after_s, p99_ms, closed))
    return floods


async def _measure(
    port: int, count: int, flood: Callable[[int, int], Awaitable[bool]]
) -> tuple[float, bool]:
    """Run a flood beside a neighbour's requests, again until the neighbour has enough times."""
    await _probe(port)  # the first request of a process is slow
    times_s: list[float] = []

    async def ask() -> None:
        while True:
            times_s.append(await _probe(port))
            await asyncio.sleep(_PROBE_S)

    async with _running(ask()) as neighbour:
        closed = await flood(port, count)
        while len(times_s) < _PROBES and not neighbour.done():
            closed &= await flood(port, count)
    return 1000 * quantiles(times_s, n=100, method="inclusive")[98], closed


@contextlib.asynccontextmanager
async def _running(work: Awaitable[None]) -> AsyncIterator[asyncio.Future[None]]:
    """Run an endless task within the context; raise what ended it before."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _probe(port: int) -> float:
    """Return the seconds of one request on a connection of its own."""
    began_s = time.perf_counter()
    async with connection(port) as opened:
        await opened.send(_LAST_GET)
        await opened.reader.read()
    return time.perf_counter() - began_s


async def _send_trailers(port: int, count: int) -> bool:
    """Send so many bytes, on a new connection each time that the server closes one."""
    piece, sent, closed = b"a:b\r\n" * (_PIECE_BYTES // 5), 0, True
    while sent < count:
        async with connection(port) as opened:
            open_yet = await opened.send(_CHUNKED + b"0\r\n")
            while open_yet and sent < count:
                open_yet = await opened.send(piece)
                sent += len(piece)
            closed &= await opened.is_closed(_CLOSED_WITHIN_S)
    return closed


async def _send_pipelined(port: int, count: int) -> bool:
    answered = 0
    async with connection(port) as opened:

        async def send() -> None:
            for _ in range(max(1, count // 1000)):
                await opened.send(_GET * 1000)
            await opened.send(_LAST_GET)

        sending = asyncio.create_task(send())
        try:
            while piece := await opened.reader.read(_PIECE_BYTES):
                answered += piece.count(b"alive")
        finally:
            sending.cancel()
    return answered >= count  # every request has its response, and the connection is closed


async def _send_half_read(port: int, count: int) -> bool:
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connection(port)) for _ in range(count)]
        for opened in connections:
            await opened.send(_HALF_READ)
        return all(await asyncio.gather(*(one.is_closed(_CLOSED_WITHIN_S) for one in connections)))


def table(floods: Sequence[Flood]) -> Grid:
    columns = (
        *("at", "sent", "count", "MB before", "MB at the peak", "MB after"),
        *("looked at after, s", "neighbour p99, ms", "closed"),
    )
    rows = [
        (
            *(flood.part, flood.name, f"{flood.sent:,}"),
            *(f"{value:.1f}" for value in flood.memory),
            *(f"{flood.after_s:.0f}", f"{flood.neighbour_p99_ms:.1f}"),
            "yes" if flood.closed else "NO",
        )
        for flood in floods
    ]
    return Grid("Floods at the port of a gateway, and at that of a worker", columns, rows)
