"""Heartbeats: authentication, validation, and the requests that workers get because of them."""

import asyncio
import contextlib
import gzip
import json
import re
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.cli import main
from gateway.engines.paceline import PacelineWorker
from gateway.fleet import health
from gateway.fleet import worker as fleet_worker
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.state.counters import MemoryCounters
from paceline.http import certificate_authorities, paired_tls
from paceline.protocol import PROTOCOL, WorkerReport
from tests.support.certificates import write_certificate
from tests.support.fault_proxy import Fault, FaultProxy, running_proxy
from tests.support.gateway_fixtures import QUICK, SILENCE_S
from tests.support.http_server import serve_streams
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_worker,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker
from tests.support.static_workers import static_worker

BEARER = {"authorization": f"Bearer {JOIN_TOKEN}"}


def lane_with(**counts: Any) -> dict[str, Any]:
    """Return lanes of a report, with counts that may be inconsistent."""
    return {"lanes": [{"name": "vlm", "speculation": counts}]}


def test_a_heartbeat_requires_the_join_token(gateway, worker) -> None:
    """S08 (CVE-2026-42271, CVE-2026-30623)."""
    path, report = "/admin/v1/workers/fake-a", worker.report().model_dump(mode="json")
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for response in (
            gateway.client.put(path, headers=headers, json=report),
            gateway.client.delete(path, headers=headers),
            gateway.client.get(f"{path}/joined", headers=headers),
        ):
            assert response.status_code == 401
    assert worker.authorizations == [], "it connects to no unauthenticated worker"
    response = gateway.client.put(path, headers=BEARER, json=report)
    assert response.json() == {"interval_s": 2.0}


def test_an_invalid_field_of_a_heartbeat_is_named_and_breaks_no_page(gateway, worker) -> None:
    """C5: its counts may be beyond all bounds."""
    report = worker.report().model_dump(mode="json")
    huge = "lanes.0.time_saved.decode_ms"
    for change, param in (
        ({"worker_id": "other"}, "worker_id"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://mac:9200/"}, "url"),
        ({"url": "http://mac:9200/v1"}, "url"),
        ({"url": "http://user@mac:9200"}, "url"),
        ({"boot_id": "earlier:demo"}, "boot_id"),
        ({"protocol": 3}, "protocol"),
        ({"model": "\x1b[2J"}, "model"),
        ({"lanes": [{"name": "vlm", "running": -1}]}, "lanes.0.running"),
        ({"lanes": [{"name": "vlm", "time_saved": {"decode_ms": 10**400}}]}, huge),
        ({"lanes": [{"name": "vlm", "mtp_enabled": True, "requested_draft_tokens": 2**53}]}, None),
        (lane_with(steps=10**4000), None),
        (lane_with(drafted=1, accepted=2), "lanes.0.speculation"),
        (lane_with(drafted=1, accepted=1, errors=1), "lanes.0.speculation"),
        (lane_with(steps=1, histogram=[1, 1]), "lanes.0.speculation"),
    ):
        response = gateway.client.put(
            "/admin/v1/workers/fake-a", headers=BEARER, json={**report, **change}
        )
        assert response.status_code == 400
        assert param in (None, response.json()["error"]["param"])
    for path in ("/v1/status", "/metrics"):
        assert gateway.client.get(path).status_code == 200


def test_the_gateway_is_ready_and_serves_requests_while_a_worker_neither_starts_nor_drains(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    def answers() -> list[int]:
        """Return the status of each probe, of which clients of vLLM use the last, and a chat."""
        probes = [gateway.client.get(path) for path in ("/livez", "/readyz", "/health")]
        return [one.status_code for one in (*probes, gateway.chat())]

    joined = "/admin/v1/workers/fake-a/joined"
    assert answers() == [200, 503, 503, 503]
    start = {"stage": "kernels", "done": 1, "total": 3, "elapsed_s": 12.4}
    starting = worker.report(ready=False, lanes=[], url="http://127.0.0.1:1", start=start)
    assert put(gateway, starting)[0] == 200
    assert gateway.status()["workers"]["fake-a"]["state"] == "starting"
    assert answers() == [200, 503, 503, 503]
    waiting = gateway.client.get("/readyz").text
    assert re.fullmatch(r"starting: fake-a \(compiling kernels, 1 of 3, [0-9]+ s\)\n", waiting)
    assert gateway.client.get(joined, headers=BEARER).status_code == 404
    gateway.join(worker)
    assert answers() == [200] * 4
    assert gateway.client.get(joined, headers=BEARER).status_code == 200
    gateway.join(worker, draining=True)
    assert answers() == [200, 503, 503, 503]
    assert gateway.client.get("/readyz").text == "no worker: fake-a (draining)\n"


def test_two_workers_share_the_load(gateway_with_worker, worker, second_worker) -> None:
    gateway_with_worker.join(second_worker)
    worker.script.hang = second_worker.script.hang = True
    with ThreadPoolExecutor(8) as pool:
        responses = [pool.submit(gateway_with_worker.chat) for _ in range(8)]
        wait_until(lambda: len(worker.requests) + len(second_worker.requests) == 8)
        assert (len(worker.requests), len(second_worker.requests)) == (4, 4)
        lanes = gateway_with_worker.status()["pools"]["vlm"]
        assert (lanes["in_flight"], lanes["slots"]) == (8, 8)
        assert lanes["workers"] == ["fake-a", "fake-b"]
        worker.resume.set()
        second_worker.resume.set()
        assert {response.result().status_code for response in responses} == {200}
    assert gateway_with_worker.status()["pools"]["vlm"]["in_flight"] == 0


def put(gateway: RunningGateway, report: WorkerReport) -> tuple[int, str]:
    """Send a heartbeat; return the status, and the code of an error."""
    path = f"/admin/v1/workers/{report.worker_id}"
    response = gateway.client.put(path, headers=BEARER, json=report.model_dump(mode="json"))
    return response.status_code, response.json().get("error", {}).get("code", "")


UNCONFIRMED = (422, "worker_unconfirmed")


def test_c5_a_url_counts_only_if_the_worker_answers_there_and_its_owner_learns_why_not(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    for url, reason in (
        (second_worker.url, "Another worker"),
        (gateway.url, "is not a worker"),
        ("http://127.0.0.1:1", "Nothing listens there"),
        ("http://worker.invalid:9200", "cannot resolve"),
    ):
        response = gateway.send_heartbeat(worker, url=url)
        assert status_and_code(response) == UNCONFIRMED
        problem = response.json()["error"]["message"]
        assert reason in problem
        assert gateway.status()["workers"]["fake-a"]["problem"] == problem
        (listed,) = gateway.admin.get("/admin/v1/workers").json()["workers"]
        assert (listed["state"], listed["problem"]) == ("unreachable", problem)
    assert put(gateway, worker.report(boot_id="boot-2")) == UNCONFIRMED, "another boot answers"
    assert {name: one["state"] for name, one in gateway.status()["workers"].items()} == {
        "fake-a": "unreachable"
    }
    assert gateway.chat().status_code == 503
    assert put(gateway, worker.report())[0] == 200
    assert gateway.status()["workers"]["fake-a"]["problem"] == ""
    assert put(gateway, worker.report(url=second_worker.url)) == UNCONFIRMED
    assert gateway.chat().status_code == 200
    assert (len(worker.requests), second_worker.requests) == (1, [])


def test_a_lost_worker_is_told_wherever_one_looks_for_it_until_it_signs_off(
    gateway, worker, capsys, monkeypatch
) -> None:
    """On the page of admins, in the status, by the command, in the metrics and to cordon it."""
    gateway.join(worker)
    monkeypatch.setattr(fleet_worker, "HEARTBEAT_TIMEOUT_S", 0.0)

    def shown() -> dict[str, Any]:
        (one,) = gateway.admin.get("/admin/v1/workers").json()["workers"]
        return one

    def metric(name: str) -> list[str]:
        text = gateway.client.get("/metrics").text
        return re.findall(rf'^paceline_worker_{name}{{worker="fake-a"}} (\S+)$', text, re.MULTILINE)

    lost = shown()
    assert (lost["state"], lost["gone_because"], lost["url"]) == ("gone", "silent", worker.url)
    since = datetime.fromisoformat(lost["gone_since"])
    assert since.timestamp() == int(gateway.status()["workers"]["fake-a"]["absence"]["unix_s"])
    assert (metric("available"), metric("cordoned")) == (["0.0"], ["0.0"])
    assert gateway.client.get("/readyz").text == "no worker: fake-a (gone)\n"
    assert main(["status", "--url", gateway.url]) == 1
    told = since.astimezone().isoformat(sep=" ")
    assert f"fake-a has sent nothing since {told}." in " ".join(capsys.readouterr().out.split())
    assert main(["prefix-cache", "clear", "--url", gateway.url]) == 0, "it is left out"
    assert gateway.admin.put("/admin/v1/workers/fake-a/cordon").status_code == 200
    assert (metric("available"), metric("cordoned")) == (["0.0"], ["1.0"])
    gateway.admin.delete("/admin/v1/workers/fake-a/cordon")
    gateway.remove_worker(worker)
    assert shown()["gone_because"] == "left"
    assert metric("available") == [], "nobody misses it"
    monkeypatch.setattr(fleet_worker, "HEARTBEAT_TIMEOUT_S", SILENCE_S)
    gateway.rejoin(worker)
    assert "gone_since" not in shown()
    assert metric("available") == ["1.0"]


@pytest.mark.parametrize("shared", [False, True], ids=["in a file", "over Redis"])
def test_f86_a_gateway_that_restarts_knows_its_workers_before_it_serves(
    tmp_path, redis, worker, second_worker, shared
) -> None:
    """Those that live and those that are gone; it never asks one that has signed off."""
    settings = make_settings(tmp_path, redis_url=SecretStr(redis.url) if shared else None)
    boots = "paceline:{workers}:boots"
    with (
        running_worker("fake-b") as lost,
        running_worker("fake-c") as left,
        RunningGateway(settings, QUICK) as first,
    ):
        lost.url = lost.url.replace("127.0.0.1", "0.0.0.0")  # no name of this machine alone
        for one in (worker, lost, left):
            first.join(one)
        if shared:
            wait_until(lambda: "fake-c/boot-1" in redis.client.hkeys(boots))
        first.remove_worker(left)
        if shared:
            wait_until(lambda: '"left": true' in "".join(redis.client.hvals(boots)))
    with RunningGateway(settings, QUICK) as again:
        assert again.client.get("/readyz").text == "ready\n"
        assert again.chat().status_code == 200
        assert worker.requests, "it is asked by the gateway before it sends a heartbeat"
        found = again.status()["workers"]
        states = {name: (one["state"], one["absence"]["kind"]) for name, one in found.items()}
        assert states["fake-a"] == ("ready", "")
        if not shared:
            assert states["fake-b"] == ("gone", "silent")
        assert states.get("fake-c", ("gone", ""))[0] == "gone"


def test_c5_the_call_back_names_the_join_token_once_a_boot(gateway, worker) -> None:
    for _ in range(3):
        assert put(gateway, worker.report())[0] == 200
    assert worker.authorizations == [BEARER["authorization"]]
    worker.boot_id = "boot-2"
    assert put(gateway, worker.report())[0] == 200
    assert len(worker.authorizations) == 2


def test_c5_a_slow_call_back_delays_no_other_request(
    make_gateway, worker, second_worker, monkeypatch
) -> None:
    monkeypatch.setattr(health, "CALL_BACK_TIMEOUT_S", 60.0)
    gateway = make_gateway(worker)
    with running_proxy(second_worker.url) as proxy, ThreadPoolExecutor(1) as executor:
        proxy.fault = Fault(blackhole=True)
        joining = executor.submit(put, gateway, second_worker.report(url=proxy.url))
        wait_until(lambda: proxy.open_connections == 1)
        assert gateway.chat().status_code == 200
        assert not joining.done()
        proxy.refuse()
        assert joining.result() == UNCONFIRMED


def test_c5_a_fetched_report_is_checked_as_a_heartbeat_and_changes_no_url(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """It is bounded in size too."""

    def context_tokens(body: bytes) -> int:
        """Return the tokens in the status when the worker answers for its report with a body."""
        worker.status_body = body
        return gateway_with_worker.status()["workers"]["fake-a"]["context_tokens"]

    report = worker.report(context_tokens=5, url="http://127.0.0.1:1").model_dump(mode="json")
    body = json.dumps({"report": report}).encode()
    for rejected in (
        *(
            json.dumps({"report": {**report, **change}}).encode()
            for change in (
                {"worker_id": "fake-b"},
                {"context_tokens": 10**400},
                {"prefixes": ["a"] * 65},
            )
        ),
        json.dumps({"padding": " " * 300_000, "report": report}).encode(),
        gzip.compress(body),
    ):
        assert context_tokens(rejected) == 4096
        assert gateway_with_worker.chat().status_code == 200
    assert context_tokens(body) == 5
    assert gateway_with_worker.chat().status_code == 200


def test_a_worker_that_refuses_connections_is_called_back_and_used_again_at_once(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, proxy: FaultProxy
) -> None:
    assert put(gateway_with_worker, worker.report(url=proxy.url))[0] == 200
    proxy.refuse()
    assert gateway_with_worker.chat().status_code == 503
    assert put(gateway_with_worker, worker.report(url=proxy.url)) == UNCONFIRMED
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "unreachable"
    proxy.listen()
    assert put(gateway_with_worker, worker.report(url=proxy.url))[0] == 200
    assert gateway_with_worker.chat().status_code == 200


def test_the_protocol_is_shown_to_holders_of_the_join_token_and_their_heartbeats_are_bounded(
    module_gateway: RunningGateway,
) -> None:
    path = "/admin/v1/workers/fake-a/protocol"
    assert module_gateway.client.get(path, headers=BEARER).json() == {"protocol": PROTOCOL}
    assert module_gateway.client.get(path).status_code == 401
    opened = module_gateway.admin.get(path)
    assert opened.status_code == 401, "the admin key opens no route of workers"
    path = "/admin/v1/workers/a"
    response = module_gateway.client.put(path, headers=BEARER, content=b" " * 300_000)
    assert response.status_code == 413


async def test_c5_a_restart_sends_the_join_token_only_where_a_worker_was_heard_lately(
    worker: ScriptedWorker,
) -> None:
    """Later another machine may have the address."""
    backend = PacelineWorker(JOIN_TOKEN)
    fleet = WorkerRegistry(time.monotonic, lambda: 0.0, backend=backend)
    control = ReportClient(backend, fleet, MemoryCounters(), paired_tls())
    async with control.client:
        await control.recall([(worker.report(), 601.0)])
        assert (worker.authorizations, fleet.workers()) == ([], ())
        await control.recall([(worker.report(), 599.0)])
    assert worker.authorizations == [BEARER["authorization"]]
    assert [one.report.worker_id for one in fleet.workers()] == ["fake-a"]


async def test_c5_a_report_without_end_is_not_read_to_the_timeout(worker: ScriptedWorker) -> None:
    sent = 0

    async def send_without_end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b" " * 65_536)
                await writer.drain()
                sent += 65_536
        writer.close()

    fleet = WorkerRegistry(time.monotonic, lambda: 0.0)
    client = ReportClient(PacelineWorker(JOIN_TOKEN), fleet, MemoryCounters(), paired_tls())
    async with serve_streams(send_without_end) as port, client.client:
        assert await client.call_back(worker.report(url=f"http://127.0.0.1:{port}"))
    assert sent < 20_000_000, "a report has 256 KB; the system buffers the rest"


async def test_a_worker_behind_a_proxy_with_tls_needs_a_certificate_that_is_trusted(
    worker: ScriptedWorker, tmp_path, monkeypatch
) -> None:
    """It has not paired: the trusted authorities count, not that of the fleet."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"report": worker.report().model_dump(mode="json")})
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    certificate, key = write_certificate(tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    fleet, backend = WorkerRegistry(time.monotonic, lambda: 0.0), PacelineWorker(JOIN_TOKEN)
    for trusted in (False, True):
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        authorities = certificate_authorities.__wrapped__
        monkeypatch.setattr(health, "certificate_authorities", authorities)
        control = ReportClient(backend, fleet, MemoryCounters(), paired_tls())
        async with serve_streams(answer, tls=served) as port, control.client:
            report = worker.report(url=f"https://127.0.0.1:{port}")
            problem = await control.call_back(report)
        assert ("certificate" in problem) is not trusted


def test_a_worker_with_a_taken_id_is_told_at_the_one_that_has_it(
    gateway_with_worker, worker, capsys
) -> None:
    gateway, other = gateway_with_worker, worker.report(boot_id="2", url="http://127.0.0.1:1")
    refused = gateway.client.put(
        "/admin/v1/workers/fake-a", headers=BEARER, json=other.model_dump(mode="json")
    )
    assert refused.status_code == 409
    (shown,) = gateway.admin.get("/admin/v1/workers").json()["workers"]
    told = "Another worker has started with the same id"
    assert (shown["state"], shown["problem"][: len(told)]) == ("ready", told)
    assert main(["status", "--url", gateway.url]) == 0
    assert f"fake-a has a problem: {told}" in " ".join(capsys.readouterr().out.split())
    assert 'paceline_worker_id_taken{worker="fake-a"} 1.0' in gateway.client.get("/metrics").text


def test_c5_a_heartbeat_under_the_id_of_a_static_worker_gets_neither_its_place_nor_its_key(
    make_gateway, worker, second_worker, monkeypatch
) -> None:
    monkeypatch.setenv("STUDIO_KEY", "key-of-the-studio")
    static = static_worker(id="fake-b", url=worker.url, api_key_env="STUDIO_KEY")
    gateway = make_gateway(workers=[static])
    wait_until(lambda: gateway.client.get("/readyz").status_code == 200)
    second_worker.boot_id = "static"
    assert put(gateway, second_worker.report()) == (409, "worker_id_taken")
    assert gateway.chat().status_code == 200
    assert (len(worker.requests), second_worker.requests) == (1, [])


async def test_c5_call_backs_are_bounded_in_time_and_number(worker, monkeypatch) -> None:
    assert health.CALL_BACK_TIMEOUT_S == 3
    monkeypatch.setattr(health, "CALL_BACK_TIMEOUT_S", 0.5)
    fleet = WorkerRegistry(time.monotonic, lambda: 0.0)
    client = ReportClient(PacelineWorker(JOIN_TOKEN), fleet, MemoryCounters(), paired_tls())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with client.client, asyncio.TaskGroup() as group:
            waiting = [
                group.create_task(client.call_back(worker.report(worker_id=f"w-{number}", url=url)))
                for number in range(64)
            ]
            await asyncio.sleep(0)
            assert "too many" in await client.call_back(worker.report())
            assert not any(task.done() for task in waiting), "refused without a wait"
        assert {"firewall" in task.result() for task in waiting} == {True}
    monkeypatch.setattr(health, "CALL_BACK_TIMEOUT_S", 60.0)
    async with httpx.AsyncClient(timeout=60) as client.client:
        assert await client.call_back(worker.report()) == "", "their places are free again"
