"""Traces: OpenTelemetry's names, the client's trace through to the worker, nothing when off."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_server import Request, ServerConnection
from tests.support.running_gateway import (
    RunningGateway,
    chat_body,
    make_settings,
    running_server,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
ROOT = Path(__file__).parents[3]
SECRET_WORDS = "the-words-of-a-user"


class Collector:
    """An OpenTelemetry collector that remembers what it gets."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.raw = b""
        self.got = threading.Event()

    async def __call__(self, link: ServerConnection, request: Request) -> None:
        assert request.path == "/v1/traces"
        sent = ExportTraceServiceRequest.FromString(request.body)
        self.raw += request.body
        for of_resource in sent.resource_spans:
            self.services |= {
                one.value.string_value
                for one in of_resource.resource.attributes
                if one.key == "service.name"
            }
            for scope in of_resource.scope_spans:
                self.spans.extend(scope.spans)
        await link.send_head(200, ((b"content-type", b"application/x-protobuf"),), length=0)

    def of(self, kind: int) -> list[Any]:
        return [span for span in self.spans if span.kind == kind]


SERVER, CLIENT = 2, 3


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with running_server(made, sockets=[made.socket]):
        yield made


@contextlib.contextmanager
def traced(folder: Path, *workers: ScriptedWorker) -> Iterator[RunningGateway]:
    with RunningGateway(make_settings(folder, traces="otlp")) as gateway:
        for worker in workers:
            gateway.send_heartbeat(worker)
        yield gateway


def test_a_clients_trace_goes_on_in_the_gateway_and_in_the_worker(
    tmp_path: Path, collector: Collector, worker: ScriptedWorker
) -> None:
    with traced(tmp_path, worker) as gateway:
        response = gateway.client.post(
            "/v1/chat/completions",
            json=chat_body(temperature=0, max_tokens=9),
            headers={"traceparent": PARENT, "tracestate": "vendor=1", "baggage": SECRET_WORDS},
        )
        assert response.status_code == 200
        wait_until(lambda: len(collector.spans) == 2)
    (server,), (client,) = collector.of(SERVER), collector.of(CLIENT)
    assert server.trace_id.hex() == client.trace_id.hex() == TRACE_ID
    assert server.parent_span_id.hex() == SPAN_ID
    assert client.parent_span_id == server.span_id
    heard = worker.requests[0].headers
    assert heard["traceparent"] == f"00-{TRACE_ID}-{client.span_id.hex()}-01"
    assert heard["tracestate"] == "vendor=1"
    assert "baggage" not in heard
    assert collector.services == {"paceline-gateway"}


def test_spans_have_the_names_and_attributes_of_the_conventions(
    tmp_path: Path, collector: Collector, worker: ScriptedWorker
) -> None:
    with traced(tmp_path, worker) as gateway:
        with gateway.stream(temperature=0, max_tokens=9) as response:
            response.read()
        wait_until(lambda: len(collector.spans) == 2)
    (server,), (client,) = collector.of(SERVER), collector.of(CLIENT)
    assert (server.name, client.name) == ("POST /v1/chat/completions", "chat demo")
    told = attributes(client)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "demo",
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "paceline.worker": "fake-a",
        "paceline.lane": "text-mtp",
        "paceline.drafts": 1,
        "paceline.drafted_tokens": 2,
        "paceline.accepted_tokens": 1,
    }
    way = attributes(server)
    assert way["http.response.status_code"] == 200
    assert way["paceline.request"] == response.headers["x-request-id"]
    assert (way["paceline.pool"], way["paceline.reason"]) == ("text-mtp", "eligible")


def test_each_attempt_is_a_span_and_an_error_is_named(
    tmp_path: Path, collector: Collector, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script = second_worker.script = Script(status=503)
    with traced(tmp_path, worker, second_worker) as gateway:
        assert gateway.chat().status_code == 503
        wait_until(lambda: len(collector.spans) == 3)
    (server,) = collector.of(SERVER)
    assert attributes(server)["error.type"] == "workers_busy"
    assert attributes(server)["paceline.attempts"] == 2
    attempts = collector.of(CLIENT)
    assert {attributes(span)["paceline.worker"] for span in attempts} == {"fake-a", "fake-b"}
    assert {span.status.code for span in (server, *attempts)} == {2}


def test_no_span_has_a_word_of_a_client(
    tmp_path: Path, collector: Collector, worker: ScriptedWorker
) -> None:
    said = [{"role": "user", "content": SECRET_WORDS}]
    with traced(tmp_path, worker) as gateway:
        gateway.chat(messages=said, user=SECRET_WORDS, stop=[SECRET_WORDS])
        gateway.chat(messages=said, model=SECRET_WORDS)
        gateway.client.post(
            "/v1/chat/completions",
            content=SECRET_WORDS,
            headers={"traceparent": SECRET_WORDS, "user-agent": SECRET_WORDS},
        )
        wait_until(lambda: len(collector.of(SERVER)) == 3)
    assert SECRET_WORDS.encode() not in collector.raw


def test_a_collector_that_is_away_costs_no_request_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: ScriptedWorker
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        with traced(tmp_path, worker) as gateway:
            assert gateway.chat().status_code == 200
            gateway.request_shutdown()
            gateway.wait_closed()


def test_without_traces_nothing_is_loaded_and_no_context_is_passed_on(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    httpx.post(
        f"{gateway_with_worker.url}/v1/chat/completions",
        json=chat_body(),
        headers={"traceparent": PARENT},
    ).raise_for_status()
    assert "traceparent" not in worker.requests[0].headers
    program = """
import asyncio, sys
from gateway.app import create_app
from gateway.config.settings import Settings
async def main():
    await create_app(Settings(state_dir=sys.argv[1]))
asyncio.run(main())
loaded = ("gateway.telemetry.tracing", "opentelemetry.sdk.trace.export", "opentelemetry.exporter")
assert not [name for name in sys.modules if name.startswith(loaded)]
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)


def test_without_the_extra_the_start_says_what_to_install(tmp_path: Path) -> None:
    program = """
import asyncio, sys
sys.modules["opentelemetry.exporter"] = None
from gateway.app import create_app
from gateway.errors import StartupError
from gateway.config.settings import Settings
try:
    asyncio.run(create_app(Settings(traces="otlp", state_dir=sys.argv[1])))
except StartupError as refused:
    sys.stdout.write(str(refused))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "pip install -e '.[otel]'" in ran.stdout
