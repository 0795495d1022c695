"""A worker keeps its gateway told: at once, regularly, through outages, and when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import SecretStr

from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_app
from tests.support.worker_process import running_worker
from workers import heartbeat as join
from workers.heartbeat import Membership, keep_joined
from workers.protocol import WorkerReport
from workers.server.runtime import Worker


@dataclass
class Gateway:
    """The heartbeat end of a gateway; `answers` decides by the number of the beat."""

    status_of_beat: Callable[[int], int] = lambda _: 200
    interval_s: float = 5.0
    reports: list[WorkerReport] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.put("/admin/v1/workers/{worker_id}")
        async def beat(request: Request, worker_id: str) -> Response:
            self.authorizations.add(request.headers["authorization"])
            report = WorkerReport.model_validate_json(await request.body())
            assert report.worker_id == worker_id
            async with self.heard:
                self.reports.append(report)
                self.heard.notify_all()
            return JSONResponse(
                {"interval_s": self.interval_s}, self.status_of_beat(len(self.reports))
            )

        @app.delete("/admin/v1/workers/{worker_id}")
        async def leave(worker_id: str) -> Response:
            self.left.append(worker_id)
            return Response(status_code=204)

        return app

    async def reports_reach(self, count: int) -> None:
        async with self.heard:
            await self.heard.wait_for(lambda: len(self.reports) >= count)


@asynccontextmanager
async def joined(
    worker: Worker, gateway_url: str, report: Callable[[], WorkerReport] | None = None
) -> AsyncIterator[None]:
    membership = Membership(
        gateway_url=gateway_url,
        token=SecretStr("secret"),
        worker_id=worker.identity.worker_id,
        report=report or worker.report,
        changed=worker.changed,
    )
    beating = asyncio.create_task(keep_joined(membership))
    try:
        yield
    finally:
        beating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beating


async def test_report_is_sent_with_the_token_and_the_worker_leaves_in_the_end() -> None:
    gateway = Gateway()
    async with serve_app(gateway.app()) as url:
        async with joined(make_worker(ScriptedEngine()), url):
            await gateway.reports_reach(1)
            assert gateway.left == []
        assert gateway.left == ["scripted-1"]
    assert gateway.authorizations == {"Bearer secret"}
    assert gateway.reports[0].ready


async def test_beats_follow_the_interval_the_gateway_wishes() -> None:
    gateway = Gateway(interval_s=0.01)
    async with serve_app(gateway.app()) as url, joined(make_worker(ScriptedEngine()), url):
        await gateway.reports_reach(5)


async def test_draining_is_told_at_once() -> None:
    gateway, worker = Gateway(interval_s=5), make_worker(ScriptedEngine())
    async with serve_app(gateway.app()) as url, joined(worker, url):
        await gateway.reports_reach(1)
        worker.drain()
        await gateway.reports_reach(2)
    assert [report.draining for report in gateway.reports] == [False, True]


@pytest.mark.parametrize("status", [401, 409, 500])
async def test_refused_beat_is_tried_again(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(join, "FIRST_RETRY_S", 0.001)
    gateway = Gateway(status_of_beat=lambda count: status if count < 3 else 200)
    async with serve_app(gateway.app()) as url, joined(make_worker(ScriptedEngine()), url):
        await gateway.reports_reach(3)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1  # an outage is one event in the log
    assert "secret" not in caplog.text


async def test_a_beat_that_fails_by_a_fault_of_our_own_is_not_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway, worker = Gateway(), make_worker(ScriptedEngine())
    faults = [ZeroDivisionError("odd")]

    def report() -> WorkerReport:
        if faults:
            raise faults.pop()
        return worker.report()

    async with serve_app(gateway.app()) as url, joined(worker, url, report):
        await gateway.reports_reach(1)
    assert "trying again until heard: odd" in caplog.text


async def test_worker_joins_again_after_the_gateway_came_back() -> None:
    before, after = Gateway(interval_s=0.01), Gateway()
    async with serve_app(before.app()) as url:
        port = httpx.URL(url).port or 0
        joining = joined(make_worker(ScriptedEngine()), url)
        await joining.__aenter__()
        await before.reports_reach(1)
    async with serve_app(after.app(), port):
        await after.reports_reach(1)
        await joining.__aexit__(None, None, None)
    assert after.left == ["scripted-1"]


async def test_real_worker_joins_and_leaves_a_gateway() -> None:
    gateway = Gateway()
    async with serve_app(gateway.app()) as url:
        environment = {"PACELINE_JOIN_TOKEN": "secret"}
        named = ("--id", "studio", "--label", "big")
        starting = running_worker("--join", url, *named, environment=environment)
        worker = await asyncio.to_thread(starting.__enter__)
        await gateway.reports_reach(1)
        async with httpx.AsyncClient(base_url=worker.url) as client:
            assert (await client.get("/v1/status")).status_code == 401
        await asyncio.to_thread(starting.__exit__, None, None, None)
    assert worker.process.returncode == 0
    assert gateway.reports[0].url == worker.url
    assert gateway.reports[0].labels == ("big",)
    assert gateway.left == ["studio"]
