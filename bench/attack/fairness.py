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
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

import httpx

from bench.gateway import backend
from bench.gateway.contenders import running_ours
from bench.gateway.load import Question, WrongAnswer, connected
from bench.harness.options import parser
from bench.harness.parts import AS_ADMIN
from bench.harness.tables import Grid, Target, console, provenance, report, targets
from gateway.event_loop import run

_QUEUE_LIMIT: Final = 128
_SLOTS: Final = (1, 4)
_REQUESTS: Final = 200
_FILL_S: Final = 4.0
"""Time that the process of the flood takes to start and to fill the queue."""
_RETRY_S: Final = 0.01
"""Pause of the flooding client after a rejection: it ignores `Retry-After`."""


class Flood(NamedTuple):
    """The 99th percentiles of one client alone, and beside a flood, in ms."""

    slots: int
    connections: int
    wait_alone: float
    """To the first word, which the worker writes at once."""
    answer_alone: float
    """From the first word to the last."""
    wait: float
    answers: int
    """That the flooding client got, and its rejections."""
    rejections: int

    @property
    def bound(self) -> float:
        return 2 * self.wait_alone + self.answer_alone


class _Flooder:
    """A client that sends requests over many connections at once, and repeats rejected ones."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._question = Question(stream=True, mark=backend.BRIEF_MARK, key=key)
        self._answers = 0
        self._rejections = 0

    async def run(self, connections: int, stop: Connection) -> tuple[int, int]:
        """Flood the gateway until the other end of `stop` sends or closes; return the counts."""
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_reader(stop.fileno(), stopped.set)
        tasks = [asyncio.create_task(self._repeat(stopped)) for _ in range(connections)]
        await asyncio.wait(
            [*tasks, asyncio.create_task(stopped.wait())], return_when="FIRST_COMPLETED"
        )
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return self._answers, self._rejections

    async def _repeat(self, stopped: asyncio.Event) -> None:
        request = self._question.request()
        async with connected(self._port) as connection:
            while not stopped.is_set():  # `wait_for` of Python 3.11 may lose a cancellation
                try:
                    await connection.send(self._question, request)
                    self._answers += 1
                except WrongAnswer:
                    self._rejections += 1
                    await asyncio.sleep(_RETRY_S)


def _flood(port: int, key: str, connections: int, pipe: Connection) -> None:
    """Flood the gateway from a process of its own, and send the counts at the end."""
    pipe.send(run(_Flooder(port, key).run(connections, pipe)))


@contextlib.asynccontextmanager
async def _flooding(port: int, key: str, connections: int) -> AsyncIterator[list[int]]:
    """Flood the gateway within the context; the counts are in the list at its end.

    The measured client would wait for the turns of a flood in its own process.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_flood, args=(port, key, connections, theirs), daemon=True)
    process.start()
    counts: list[int] = []
    try:
        await asyncio.sleep(_FILL_S)
        yield counts
        ours.send(None)
        counts += await asyncio.to_thread(ours.recv)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        ours.close()


async def _measure_client(port: int, key: str, requests: int) -> list[float]:
    """Send requests one after another; return the percentiles of waits and answers."""
    question = Question(stream=True, mark=backend.BRIEF_MARK, key=key)
    request = question.request()
    waits_s, answers_s = [], []
    async with connected(port) as connection:
        for _ in range(requests):
            sent_s = time.perf_counter()
            wait_s = await connection.send(question, request)
            waits_s.append(wait_s)
            answers_s.append(time.perf_counter() - sent_s - wait_s)
    return [1000 * quantiles(times_s, n=100)[98] for times_s in (waits_s, answers_s)]


async def measure(folder: Path, *, requests: int) -> list[Flood]:
    """Measure each number of slots, with a queue half full and a full one."""
    floods = []
    async with running_ours(folder) as gateway:
        url = f"{gateway.url}/admin/v1"
        async with httpx.AsyncClient(base_url=url, headers=AS_ADMIN) as admin:
            keys = [await _create_key(admin, name) for name in ("a", "b")]
            for slots in _SLOTS:
                await _set_slots(admin, slots)
                alone = await _measure_client(gateway.port, keys[0], requests)
                for connections in (_QUEUE_LIMIT // 2, _QUEUE_LIMIT + slots + 16):
                    async with _flooding(gateway.port, keys[1], connections) as counts:
                        wait, _ = await _measure_client(gateway.port, keys[0], requests)
                    floods.append(Flood._make([slots, connections, *alone, wait, *counts]))
    return floods


async def _create_key(admin: httpx.AsyncClient, name: str) -> str:
    response = await admin.post("/keys", json={"name": name})
    return str(response.raise_for_status().json()["secret"])


async def _set_slots(admin: httpx.AsyncClient, slots: int) -> None:
    version = (await admin.get("/policy")).raise_for_status().headers["etag"]
    pool = {"lanes": ["text-mtp"], "slots": slots, "queue": {"limit": _QUEUE_LIMIT}}
    policy = {
        "version": 1,
        "routes": [{"name": "all", "to": ["text-mtp"]}],
        "pools": {"text-mtp": pool},
    }
    headers = {"if-match": version, "x-paceline-note": "bench"}
    (await admin.put("/policy", json=policy, headers=headers)).raise_for_status()


def main() -> None:
    options = parser("attack.fairness", __doc__).parse_args()
    with console().status("flooding"):
        floods = run(measure(options.folder, requests=10 if options.quick else _REQUESTS))
    columns = (
        *("slots", "connections of the flood", "wait alone, ms", "answer alone, ms"),
        *("bound, ms", "wait, ms", "answers of the flood", "rejections"),
    )
    rows, judged = [], []
    for one in floods:
        times = one.wait_alone, one.answer_alone, one.bound, one.wait
        counts = one.answers, one.rejections
        shown = (*(f"{ms:.1f}" for ms in times), *(f"{count:,}" for count in counts))
        rows.append((one.slots, one.connections, *shown))
        name = f"{one.slots} slots, {one.connections} connections: wait, ms"
        judged.append(Target(name, one.wait, one.bound))
    title = "Wait of a client while another floods the gateway, 99th percentiles"
    grids = Grid(title, columns, rows), targets(judged)
    about = f"{provenance()}."
    report("fairness.md", "Fairness of the queue", about, *grids, write=not options.quick)


if __name__ == "__main__":
    main()
