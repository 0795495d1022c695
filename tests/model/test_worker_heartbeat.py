"""A worker reports to its gateway regularly, on each change, after outages and at its shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import SecretStr

from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_app
from tests.support.worker_process import running_worker
from workers import heartbeat
from workers.heartbeat import Membership, joined
from workers.protocol import WorkerReport
from workers.server.runtime import Worker


@dataclass
class Gateway:
    """A gateway that accepts heartbeats; their number decides the status of the response."""

    status_of_heartbeat: Callable[[int], int] = lambda _: 200
    interval_s: float = 5.0
    reports: list[WorkerReport] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    received: asyncio.Condition = field(default_factory=asyncio.Condition)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.put("/admin/v1/workers/{worker_id}")
        async def heartbeat(request: Request, worker_id: str) -> Response:
            self.authorizations.add(request.headers["authorization"])
            report = WorkerReport.model_validate_json(await request.body())
            assert report.worker_id == worker_id
            async with self.received:
                self.reports.append(report)
                self.received.notify_all()
            return JSONResponse(
                {"interval_s": self.interval_s}, self.status_of_heartbeat(len(self.reports))
            )

        @app.delete("/admin/v1/workers/{worker_id}")
        async def leave(worker_id: str) -> Response:
            self.removed.append(worker_id)
            return Response(status_code=204)

        return app

    async def reports_reach(self, count: int) -> None:
        async with self.received:
            await self.received.wait_for(lambda: len(self.reports) >= count)


def membership(
    worker: Worker, gateway_url: str, report: Callable[[], WorkerReport] | None = None
) -> Membership:
    return Membership(
        gateway_url=gateway_url,
        token=SecretStr("secret"),
        worker_id=worker.worker_id,
        report=report or worker.report,
        changed=worker.changed,
    )


async def test_a_worker_sends_reports_with_its_token_and_leaves_at_shutdown() -> None:
    gateway = Gateway()
    async with serve_app(gateway.app()) as url:
        async with joined(membership(make_worker(ScriptedEngine()), url)):
            await gateway.reports_reach(1)
            assert gateway.removed == []
        assert gateway.removed == ["scripted-1"]
    assert gateway.authorizations == {"Bearer secret"}
    assert gateway.reports[0].ready


async def test_heartbeats_use_the_interval_of_the_gateway() -> None:
    gateway = Gateway(interval_s=0.01)
    async with (
        serve_app(gateway.app()) as url,
        joined(membership(make_worker(ScriptedEngine()), url)),
    ):
        await gateway.reports_reach(5)


async def test_a_drain_is_reported_at_once() -> None:
    gateway, worker = Gateway(interval_s=5), make_worker(ScriptedEngine())
    async with serve_app(gateway.app()) as url, joined(membership(worker, url)):
        await gateway.reports_reach(1)
        worker.drain()
        await gateway.reports_reach(2)
    assert [report.draining for report in gateway.reports] == [False, True]


@pytest.mark.parametrize("status", [401, 409, 500])
async def test_a_rejected_heartbeat_is_sent_again(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "FIRST_RETRY_S", 0.001)
    gateway = Gateway(status_of_heartbeat=lambda count: status if count < 3 else 200)
    async with (
        serve_app(gateway.app()) as url,
        joined(membership(make_worker(ScriptedEngine()), url)),
    ):
        await gateway.reports_reach(3)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1  # an outage is logged once
    assert "secret" not in caplog.text


async def test_heartbeats_continue_after_an_error_in_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway, worker = Gateway(), make_worker(ScriptedEngine())
    errors = [ZeroDivisionError("odd")]

    def report() -> WorkerReport:
        if errors:
            raise errors.pop()
        return worker.report()

    async with serve_app(gateway.app()) as url, joined(membership(worker, url, report)):
        await gateway.reports_reach(1)
    assert "heartbeat.failed, retrying: odd" in caplog.text


async def test_a_worker_joins_again_after_a_restart_of_the_gateway() -> None:
    before, after = Gateway(interval_s=0.01), Gateway()
    async with serve_app(before.app()) as url:
        port = httpx.URL(url).port or 0
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(joined(membership(make_worker(ScriptedEngine()), url)))
            await before.reports_reach(1)
            leave = stack.pop_all()
    async with serve_app(after.app(), port), leave:
        await after.reports_reach(1)
    assert after.removed == ["scripted-1"]


async def test_a_worker_process_joins_and_leaves_a_gateway() -> None:
    gateway = Gateway()
    async with serve_app(gateway.app()) as url:
        environment = {"PACELINE_JOIN_TOKEN": "secret"}
        identity = ("--id", "studio", "--label", "big")
        starting = running_worker("--join", url, *identity, environment=environment)
        worker = await asyncio.to_thread(starting.__enter__)
        await gateway.reports_reach(1)
        async with httpx.AsyncClient(base_url=worker.url) as client:
            assert (await client.get("/v1/status")).status_code == 401
        await asyncio.to_thread(starting.__exit__, None, None, None)
    assert worker.process.returncode == 0
    assert gateway.reports[0].url == worker.url
    assert gateway.reports[0].labels == ("big",)
    assert gateway.removed == ["studio"]
