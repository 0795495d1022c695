"""Pages that need fresh reports ask each worker once for all of their readers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from gateway.api.status import READERS_LIMIT
from gateway.fleet import health
from gateway.periodic import SharedRuns
from tests.support.http_server import Request, ServerConnection
from tests.support.running_gateway import RunningGateway, running_server
from tests.support.scripted_worker import ScriptedWorker

READERS = READERS_LIMIT + 16


class GatedWorker(ScriptedWorker):
    """A worker that holds requests for its report back while `gate` is set to an event."""

    gate: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        self.loop = asyncio.get_running_loop()
        if request.method == "GET" and self.gate is not None:
            await self.gate.wait()
        await super().__call__(connection, request)


@pytest.fixture
def gated_worker() -> Iterator[GatedWorker]:
    scripted = GatedWorker()
    with running_server(scripted, sockets=[scripted.socket]):
        yield scripted


@pytest.fixture
def patient_gateway(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> RunningGateway:
    """Return a gateway that asks a worker once, however long the gate of its report is closed."""
    monkeypatch.setattr(health, "REPORT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(health, "CALL_BACK_TIMEOUT_S", 60.0)
    gateway: RunningGateway = request.getfixturevalue("gateway")
    return gateway


@pytest.mark.parametrize("path", ["/metrics", "/v1/status"])
async def test_l2_many_readers_cost_each_worker_a_few_reports(
    patient_gateway: RunningGateway, gated_worker: GatedWorker, path: str
) -> None:
    gateway = patient_gateway
    assert (await asyncio.to_thread(gateway.send_heartbeat, gated_worker)).status_code == 200
    gated_worker.gate = asyncio.Event()
    before = len(gated_worker.authorizations)
    statuses: Counter[int] = Counter()
    others_rejected = asyncio.Event()
    limits = httpx.Limits(max_connections=READERS)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60) as client:

        async def read() -> None:
            statuses[(await client.get(path)).status_code] += 1
            if statuses[503] == READERS - READERS_LIMIT:
                others_rejected.set()

        readers = [asyncio.create_task(read()) for _ in range(READERS)]
        await asyncio.wait_for(others_rejected.wait(), 60)
        gated_worker.loop.call_soon_threadsafe(gated_worker.gate.set)
        await asyncio.gather(*readers)
    assert statuses == {200: READERS_LIMIT, 503: READERS - READERS_LIMIT}
    assert len(gated_worker.authorizations) - before <= 2


async def test_l2_a_call_gets_the_result_of_a_run_that_began_after_it() -> None:
    gate = asyncio.Event()
    begun: list[int] = []

    async def work() -> int:
        begun.append(len(begun))
        await gate.wait()
        return begun[-1]

    runs = SharedRuns(work)
    first = asyncio.create_task(runs())
    while not begun:
        await asyncio.sleep(0)
    later = [asyncio.create_task(runs()) for _ in range(200)]
    await asyncio.sleep(0)
    later.pop().cancel()
    gate.set()
    assert await first == 0
    assert await asyncio.gather(*later) == [1] * 199


async def test_l2_a_failed_run_fails_its_callers_and_no_later_one() -> None:
    faults = [ValueError("once")]

    async def work() -> str:
        if faults:
            raise faults.pop()
        return "done"

    runs = SharedRuns(work)
    results = await asyncio.gather(runs(), runs(), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError]
    assert await runs() == "done"
