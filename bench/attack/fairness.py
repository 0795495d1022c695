"""Fairness of the queue: the wait of one client while another floods the gateway.

`python -m bench.attack.fairness` starts a gateway with two keys. The client of one key sends its
requests one after another: first alone, then while the other key keeps every slot busy and the
queue half full, or full. Its 99th percentile wait must stay under twice its wait alone plus one
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

import httpx
from rich.console import Console

from bench.gateway import backend
from bench.gateway.contenders import ADMIN_KEY, OURS, gateway_parser, running, running_backend
from bench.gateway.load import Question, WrongAnswer, connect
from bench.harness import tables
from gateway.event_loop import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "fairness.md"
_QUEUE_LIMIT: Final = 128
_SLOTS: Final = (1, 4)
_REQUESTS: Final = 200
_FILL_S: Final = 4.0
"""Time that the process of the flood takes to start and to fill the queue."""
_RETRY_S: Final = 0.01
"""Pause of the flooding client after a rejection: it ignores `Retry-After`."""


class Times(NamedTuple):
    """The 99th percentiles of a client's requests."""

    wait_s: float
    """Time to the first word, which the worker writes at once."""
    answer_s: float
    """Time from the first word to the last."""


class _Counts(NamedTuple):
    """What a flooding client got."""

    answers: int
    rejections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """The times of one client alone, and beside a flood."""

    slots: int
    connections: int
    alone: Times
    flooded: Times
    flood: _Counts

    @property
    def bound_s(self) -> float:
        """Return the longest wait that is fair."""
        return 2 * self.alone.wait_s + self.alone.answer_s


class _Flooder:
    """A client that sends requests over many connections at once, and repeats rejected ones."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._question = Question(stream=True, mark=backend.BRIEF_MARK, key=key)
        self._answers = 0
        self._rejections = 0

    async def run(self, connections: int, stop: Connection) -> _Counts:
        """Flood the gateway until the other end of `stop` sends or closes."""
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_reader(stop.fileno(), stopped.set)
        tasks = [asyncio.create_task(self._repeat(stopped)) for _ in range(connections)]
        await asyncio.wait(
            [*tasks, asyncio.create_task(stopped.wait())], return_when="FIRST_COMPLETED"
        )
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return _Counts(self._answers, self._rejections)

    async def _repeat(self, stopped: asyncio.Event) -> None:
        request = self._question.request()
        connection = await connect(self._port)
        try:
            while not stopped.is_set():  # `wait_for` of Python 3.11 may lose a cancellation
                if connection.closing:
                    connection = await connect(self._port)
                try:
                    await connection.send(self._question, request)
                    self._answers += 1
                except WrongAnswer:
                    self._rejections += 1
                    await asyncio.sleep(_RETRY_S)
        finally:
            connection.close()


def _flood(port: int, key: str, connections: int, pipe: Connection) -> None:
    """Flood the gateway from a process of its own, and send the counts at the end."""
    pipe.send(run(_Flooder(port, key).run(connections, pipe)))


@contextlib.asynccontextmanager
async def _flooding(port: int, key: str, connections: int) -> AsyncIterator[list[_Counts]]:
    """Flood the gateway within the context; the counts are in the list at its end.

    The measured client would wait for the turns of a flood in its own process.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_flood, args=(port, key, connections, theirs), daemon=True)
    process.start()
    counts: list[_Counts] = []
    try:
        await asyncio.sleep(_FILL_S)
        yield counts
        ours.send(None)
        counts.append(await asyncio.to_thread(ours.recv))
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        ours.close()


async def _measure_client(port: int, key: str, requests: int) -> Times:
    """Send requests one after another."""
    question = Question(stream=True, mark=backend.BRIEF_MARK, key=key)
    request = question.request()
    connection = await connect(port)
    waits_s, answers_s = [], []
    try:
        for _ in range(requests):
            if connection.closing:
                connection = await connect(port)
            sent_s = time.perf_counter()
            wait_s = await connection.send(question, request)
            waits_s.append(wait_s)
            answers_s.append(time.perf_counter() - sent_s - wait_s)
    finally:
        connection.close()
    return Times(*(quantiles(times_s, n=100)[98] for times_s in (waits_s, answers_s)))


async def measure(home: Path, *, requests: int) -> list[Flood]:
    """Measure each number of slots, with a queue half full and a full one."""
    floods = []
    async with (
        running_backend() as worker_port,
        running(OURS, venvs=home, worker_port=worker_port) as gateway,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gateway.port}/admin/v1",
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
        ) as admin,
    ):
        client_key, flooding_key = [await _create_key(admin, name) for name in ("a", "b")]
        for slots in _SLOTS:
            await _set_slots(admin, slots)
            alone = await _measure_client(gateway.port, client_key, requests)
            for connections in (_QUEUE_LIMIT // 2, _QUEUE_LIMIT + slots + 16):
                async with _flooding(gateway.port, flooding_key, connections) as counts:
                    flooded = await _measure_client(gateway.port, client_key, requests)
                floods.append(
                    Flood(
                        slots=slots,
                        connections=connections,
                        alone=alone,
                        flooded=flooded,
                        flood=counts[0],
                    )
                )
    return floods


async def _create_key(admin: httpx.AsyncClient, name: str) -> str:
    response = await admin.post("/keys", json={"name": name})
    return str(response.raise_for_status().json()["secret"])


async def _set_slots(admin: httpx.AsyncClient, slots: int) -> None:
    """Route all requests to one pool with so many slots."""
    version = (await admin.get("/policy")).raise_for_status().headers["etag"]
    pool = {"lanes": ["text-mtp"], "slots": slots, "queue": {"limit": _QUEUE_LIMIT}}
    policy = {
        "version": 1,
        "routes": [{"name": "all", "to": ["text-mtp"]}],
        "pools": {"text-mtp": pool},
    }
    headers = {"if-match": version, "x-paceline-note": "bench"}
    (await admin.put("/policy", json=policy, headers=headers)).raise_for_status()


def table(floods: Sequence[Flood]) -> tables.Grid:
    """Return the times beside every flood."""
    return tables.Grid(
        title="Wait of a client while another floods the gateway, 99th percentiles",
        columns=(
            *("slots", "connections of the flood", "wait alone, ms", "answer alone, ms"),
            *("bound, ms", "wait, ms", "answers of the flood", "rejections"),
        ),
        rows=tuple(
            (
                str(flood.slots),
                str(flood.connections),
                f"{1000 * flood.alone.wait_s:.1f}",
                f"{1000 * flood.alone.answer_s:.1f}",
                f"{1000 * flood.bound_s:.1f}",
                f"{1000 * flood.flooded.wait_s:.1f}",
                f"{flood.flood.answers:,}",
                f"{flood.flood.rejections:,}",
            )
            for flood in floods
        ),
    )


def targets(floods: Sequence[Flood]) -> tables.Grid:
    """Return the bound of every wait."""
    return tables.targets(
        [
            tables.Target(
                name=f"{flood.slots} slots, {flood.connections} connections: wait, ms",
                reached=1000 * flood.flooded.wait_s,
                bound=1000 * flood.bound_s,
                at_least=False,
            )
            for flood in floods
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = gateway_parser("bench.attack.fairness", __doc__)
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with console.status("flooding"):
        floods = run(measure(options.log_dir, requests=10 if options.quick else _REQUESTS))
    grids = (table(floods), targets(floods))
    for grid in grids:
        console.print(grid.to_table())
    if options.quick:
        return
    tables.write_page(RESULTS, "Fairness of the queue", f"{tables.provenance()}.", *grids)


if __name__ == "__main__":
    main()
