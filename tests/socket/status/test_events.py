"""Many readers of the status: its event stream, and one look at each worker for all of them."""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from gateway.api.status import READERS_LIMIT
from gateway.errors import ShuttingDown
from gateway.fleet import health
from gateway.periodic import SharedRuns
from gateway.status.events import VIEWERS_LIMIT, StatusFeed
from tests.support.gateway_fixtures import MakeGateway
from tests.support.http_server import Request, ServerConnection
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    begun,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker

EVENTS = "/v1/status/events"


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send events five times a second, not once."""
    monkeypatch.setattr("gateway.status.events.PERIOD_S", 0.2)


@contextlib.contextmanager
def open_events(gateway: RunningGateway, **headers: str) -> Iterator[Iterator[str]]:
    """Open the event stream with a client of its own; yield its lines that are not empty."""
    with (
        httpx.Client(base_url=gateway.url, timeout=30, headers=headers) as client,
        client.stream("GET", EVENTS) as stream,
    ):
        assert stream.status_code == 200
        assert stream.headers["content-type"] == "text/event-stream"
        yield filter(None, stream.iter_lines())


def event_data(line: str) -> dict[str, Any]:
    assert line.startswith("data: ")
    return json.loads(line.removeprefix("data: "))


def test_each_event_has_the_content_of_the_status_and_all_viewers_get_the_same(
    gateway_with_worker: RunningGateway,
) -> None:
    assert gateway_with_worker.chat().status_code == 200
    with open_events(gateway_with_worker) as one, open_events(gateway_with_worker) as other:
        lines, others = ([next(events) for _ in range(4)] for events in (one, other))
    assert len({*lines}) == len({*others}) == 4
    assert {*lines} & {*others}
    first, second = map(event_data, lines[:2])
    status = gateway_with_worker.status()
    assert first.keys() == second.keys() == status.keys()
    assert first["decisions"] == status["decisions"]
    assert first["workers"].keys() == {"fake-a"}
    assert second["gateway"]["uptime_s"] > first["gateway"]["uptime_s"]


def test_a_viewer_over_the_limit_gets_503_until_another_disconnects(gateway_with_worker) -> None:
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(open_events(gateway_with_worker)) for _ in range(VIEWERS_LIMIT)
        ]
        for events in streams:
            next(events)
        rejected = gateway_with_worker.client.get(EVENTS)
        assert status_and_code(rejected) == (503, "too_many_viewers")
        assert rejected.headers["retry-after"] == "10"
        assert gateway_with_worker.client.get("/v1/status").status_code == 200

    def below_limit() -> bool:
        with gateway_with_worker.client.stream("GET", EVENTS) as stream:
            return stream.status_code == 200

    wait_until(below_limit)


def test_the_event_stream_requires_the_permission_of_the_status_until_its_end(
    gateway_with_worker: RunningGateway,
) -> None:
    gateway = gateway_with_worker
    with open_events(gateway) as events:
        assert "workers" in event_data(next(events))
        key = gateway.create_key()
        *_, last = events
    assert event_data(last)["error"]["code"] == "invalid_api_key", "one is needed from now on"
    assert status_and_code(gateway.client.get(EVENTS)) == (401, "invalid_api_key")
    restricted = bearer_headers(gateway.create_key(models=["demo"]))
    forbidden = gateway.client.get(EVENTS, headers=restricted)
    assert status_and_code(forbidden) == (403, "permission_denied")
    with open_events(gateway, **bearer_headers(key)) as events:
        assert "workers" in event_data(next(events))
        gateway.revoke_key(key)
        *_, last = events
    assert event_data(last)["error"]["code"] == "invalid_api_key"


def test_an_exception_while_rendering_becomes_an_error_event_and_is_logged(
    gateway_with_worker, monkeypatch, caplog
) -> None:
    with open_events(gateway_with_worker) as events:
        assert "workers" in event_data(next(events))
        monkeypatch.setattr("gateway.status.render.mtp_status", lambda _lanes: 1 / 0)
        *_, last = events
    assert event_data(last)["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text


def test_shutdown_ends_event_streams_after_all_responses_and_accepts_no_viewer(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    """The gateway closes the connection after the last event, so that it can exit at once."""
    worker.script = Script(hang_after=1)
    gateway = make_gateway(worker, drain_timeout_s=600)
    with open_events(gateway) as events, begun(gateway.stream()) as read:
        gateway.request_shutdown()
        while not event_data(next(events))["gateway"]["stopping"]:
            pass
        threading.Timer(0.1, worker.resume.set).start()
        assert read().endswith(DONE)
        *_, name, last = events
    assert (name, last) == ("event: end", "data: {}")
    gateway.wait_closed()
    with pytest.raises(httpx.ConnectError):
        gateway.client.get(EVENTS)


async def test_a_request_after_the_feed_was_closed_raises_shutting_down() -> None:
    async def take_snapshot() -> BaseModel:
        raise AssertionError("a closed feed takes no snapshot")

    async def check_permission() -> None:
        pass

    feed = StatusFeed(take_snapshot)
    feed.close()
    with pytest.raises(ShuttingDown):
        await feed.stream_to({}, check_permission)
    assert feed.viewers == 0


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
def patient_gateway(monkeypatch, request) -> RunningGateway:
    """Return a gateway that asks a worker once, however long the gate of its report is closed."""
    monkeypatch.setattr(health, "REPORT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(health, "CALL_BACK_TIMEOUT_S", 60.0)
    return request.getfixturevalue("gateway")


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
