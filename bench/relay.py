"""What the gateway itself costs: CPU time for each request, with a worker that costs nothing.

The gateway's CPU time is known once it has ended, so each figure is the difference between a long
run and a short one: start, warm-up and end cancel out.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass

import aiohttp
from rich.table import Table

from bench import canned_worker
from workers.adapters.report import WorkerReport

TOKEN = "bench"
SHORT_RUN, LONG_RUN = 300, 2300
AT_A_TIME = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one kind of request costs."""

    kind: str
    cpu_us: float
    requests_per_s: float


async def measure() -> list[Cost]:
    """Measure whole and streamed answers."""
    async with canned_worker.serving() as worker:
        return [
            await _cost("whole answer", worker, stream=False),
            await _cost(f"stream of {canned_worker.EVENTS} events", worker, stream=True),
        ]


def table(costs: list[Cost]) -> Table:
    """Draw the figures."""
    drawn = Table(title="Gateway alone, one process", title_justify="left")
    drawn.add_column("Request")
    for column in ("CPU us/request", "Requests/s"):
        drawn.add_column(column, justify="right")
    for cost in costs:
        drawn.add_row(cost.kind, f"{cost.cpu_us:.0f}", f"{cost.requests_per_s:.0f}")
    return drawn


async def _cost(kind: str, worker: WorkerReport, *, stream: bool) -> Cost:
    short_cpu_s, _ = await _run(worker, SHORT_RUN, stream=stream)
    long_cpu_s, elapsed_s = await _run(worker, LONG_RUN, stream=stream)
    cpu_us = (long_cpu_s - short_cpu_s) / (LONG_RUN - SHORT_RUN) * 1e6
    return Cost(kind=kind, cpu_us=cpu_us, requests_per_s=LONG_RUN / elapsed_s)


async def _run(worker: WorkerReport, requests: int, *, stream: bool) -> tuple[float, float]:
    """Send requests through a fresh gateway; return its CPU time and the time they took."""
    before_s = _children_cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        gateway = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "gateway", "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PACELINE_JOIN_TOKEN": TOKEN, "PACELINE_STATE_DIR": folder},
        )
        try:
            assert gateway.stdout is not None
            address = (await gateway.stdout.readline()).decode().split()[-1]
            began_s = time.perf_counter()
            await _load(address, worker, requests, stream=stream)
            elapsed_s = time.perf_counter() - began_s
        finally:
            gateway.send_signal(signal.SIGINT)  # SIGTERM would serve on for a while
            await gateway.wait()
    return _children_cpu_s() - before_s, elapsed_s


async def _load(address: str, worker: WorkerReport, requests: int, *, stream: bool) -> None:
    body = {
        "model": worker.model,
        "temperature": 0,
        "stream": stream,
        "messages": [{"role": "user", "content": "word " * 200}],
    }
    waiting = iter(range(requests))
    async with aiohttp.ClientSession(address) as client:
        beating = asyncio.create_task(_beat(client, worker))

        async def one_after_another() -> None:
            for _ in waiting:
                async with client.post("/v1/chat/completions", json=body) as answer:
                    await answer.read()
                    answer.raise_for_status()

        try:
            await _until_joined(client)
            await asyncio.gather(*(one_after_another() for _ in range(AT_A_TIME)))
        finally:
            beating.cancel()


async def _beat(client: aiohttp.ClientSession, worker: WorkerReport) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    report = worker.model_dump(mode="json")
    while True:
        path = f"/admin/v1/workers/{worker.worker_id}"
        async with client.put(path, json=report, headers=headers) as answer:
            answer.raise_for_status()
        await asyncio.sleep(2)


async def _until_joined(client: aiohttp.ClientSession) -> None:
    while True:
        async with client.get("/readyz") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.02)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
