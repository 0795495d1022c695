"""A worker reports to its gateway regularly, on each change, after outages and at its shutdown."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import SecretStr

from paceline.http import certificate_authorities
from paceline.protocol import PROTOCOL, WorkerReport
from tests.support.certificates import write_certificate
from tests.support.compose_stack import gateway_addresses
from tests.support.http_server import serve_streams
from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_app
from workers import heartbeat
from workers.heartbeat import Membership, joined, source_address
from workers.server.runtime import Worker


@dataclass
class Gateway:
    """A gateway that accepts heartbeats; their number decides the status of the response."""

    status_of_heartbeat: Callable[[int], int] = lambda _: 200
    interval_s: float = 5.0
    reports: list[WorkerReport] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    received: asyncio.Condition = field(default_factory=asyncio.Condition)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/admin/v1/workers/{worker_id}/protocol")
        async def show_protocol(worker_id: str) -> dict[str, int]:
            return {"protocol": PROTOCOL}

        @app.put("/admin/v1/workers/{worker_id}")
        async def heartbeat(request: Request, worker_id: str) -> Response:
            self.authorizations.add(request.headers["authorization"])
            self.hosts.add(request.headers["host"])
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
async def test_a_rejected_heartbeat_is_sent_again(status, monkeypatch, caplog) -> None:
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


async def test_heartbeats_continue_after_an_error_in_the_worker(caplog) -> None:
    gateway, worker = Gateway(), make_worker(ScriptedEngine())
    errors = [ZeroDivisionError("odd")]

    def report() -> WorkerReport:
        if errors:
            raise errors.pop()
        return worker.report()

    async with serve_app(gateway.app()) as url, joined(membership(worker, url, report)):
        await gateway.reports_reach(1)
    assert f"heartbeat.failed, retrying: {url} (127.0.0.1): odd" in caplog.text


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


@asynccontextmanager
async def gateways_at(*hosts: str) -> AsyncIterator[tuple[str, list[Gateway]]]:
    """Serve a gateway at each address, on one port; yield the URL of a name and the gateways."""
    gateways = [Gateway(interval_s=0.05) for _ in hosts]
    async with AsyncExitStack() as servers:
        port = 0
        for gateway, host in zip(gateways, hosts, strict=True):
            served = serve_app(gateway.app(), port, host=host)
            port = httpx.URL(await servers.enter_async_context(served)).port or 0
        yield f"http://gateway.test:{port}", gateways


async def test_every_address_of_a_name_gets_heartbeats_and_the_name_as_host() -> None:
    hosts = gateway_addresses(3)
    dead, silent = hosts[2], "127.0.2.1"

    async def resolver(_: httpx.URL) -> set[str]:
        return {*hosts[:2], dead, silent}

    async with gateways_at(*hosts[:2]) as (url, gateways):
        accepts_only = serve_streams(wait_for_end, silent, httpx.URL(url).port or 0)
        worker = make_worker(ScriptedEngine())
        async with accepts_only, joined(membership(worker, url), resolver):
            for gateway in gateways:
                await gateway.reports_reach(3)
            worker.drain()
            for gateway in gateways:
                await gateway.reports_reach(len(gateway.reports) + 2)
    for gateway in gateways:
        assert gateway.reports[-1].draining
        assert gateway.hosts == {url.removeprefix("http://")}
        assert gateway.removed == ["scripted-1"]


async def test_heartbeats_over_tls_name_the_host_and_check_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is connected; the certificate, of a company's own authority, has the name."""
    certificate, key = write_certificate(tmp_path, "gateway.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    certificate_authorities.cache_clear()
    names: list[str | None] = []
    beaten = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\nhost: gateway.test:" in head.lower()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()
        beaten.set()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.sni_callback = lambda _, name, __: names.append(name)

    async def resolver(_: httpx.URL) -> set[str]:
        return {"127.0.0.1"}

    worker = make_worker(ScriptedEngine())
    try:
        async with (
            serve_streams(serve, tls=context) as port,
            joined(membership(worker, f"https://gateway.test:{port}"), resolver),
        ):
            await beaten.wait()
    finally:
        certificate_authorities.cache_clear()
    assert set(names) == {"gateway.test"}


async def test_each_gateway_is_given_the_address_that_faces_it_now() -> None:
    """Unless the owner has set one: then the gateway gets it with every heartbeat."""
    hosts = gateway_addresses(2)

    async def resolver(_: httpx.URL) -> set[str]:
        return set(hosts)

    async with gateways_at(*hosts) as (url, gateways):
        worker = make_worker(ScriptedEngine())
        async with joined(replace(membership(worker, url), port=9200), resolver):
            for gateway in gateways:
                await gateway.reports_reach(2)
        faces = {address: source_address(address) for address in hosts}
        for host, gateway in zip(hosts, gateways, strict=True):
            assert {report.url for report in gateway.reports} == {f"http://{faces[host]}:9200"}


async def wait_for_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read all and answer nothing."""
    while await reader.read(65536):
        pass
    writer.close()


async def test_heartbeats_follow_the_addresses_of_the_name(monkeypatch, caplog) -> None:
    monkeypatch.setattr(heartbeat, "RESOLVE_INTERVAL_S", 0.01)
    hosts = gateway_addresses(2)
    found: list[set[str] | Exception] = [
        *(OSError("no such name"), OSError("no such name")),
        {hosts[0]},
        UnicodeError("odd"),
    ]

    async def resolver(_: httpx.URL) -> set[str]:
        result = found.pop(0) if found else {hosts[1]}
        if isinstance(result, Exception):
            raise result
        return result

    async with gateways_at(*hosts) as (url, (_, second)):
        async with joined(membership(make_worker(ScriptedEngine()), url), resolver):
            await second.reports_reach(3)
        assert second.removed == ["scripted-1"]
    assert caplog.text.count("no such name") == 1


async def test_names_and_addresses_are_resolved() -> None:
    assert await heartbeat.resolve(httpx.URL("http://127.0.0.1:8000")) == {"127.0.0.1"}
    assert await heartbeat.resolve(httpx.URL("http://localhost")) & {"127.0.0.1", "::1"}
    with pytest.raises(OSError, match=r"not known|nodename"):
        await heartbeat.resolve(httpx.URL("http://gateway.invalid:8000"))
