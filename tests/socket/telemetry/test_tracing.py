"""Traces: OpenTelemetry names, context propagation to the worker, no cost when disabled."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
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
SECRET_TEXT = "the-text-of-a-user"


class Collector:
    """An OpenTelemetry collector that stores all received spans."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.raw = b""

    async def __call__(self, link: ServerConnection, request: Request) -> None:
        assert request.path == "/v1/traces"
        export = ExportTraceServiceRequest.FromString(request.body)
        self.raw += request.body
        for resource_spans in export.resource_spans:
            self.services |= {
                attribute.value.string_value
                for attribute in resource_spans.resource.attributes
                if attribute.key == "service.name"
            }
            for scope in resource_spans.scope_spans:
                self.spans.extend(scope.spans)
        await link.send_head(200, ((b"content-type", b"application/x-protobuf"),), length=0)

    def of(self, kind: int) -> list[Any]:
        return [span for span in self.spans if span.kind == kind]


SERVER, CLIENT = 2, 3


def attributes(span: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in span.attributes
    }


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    started = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with running_server(started, sockets=[started.socket]):
        yield started


@contextlib.contextmanager
def traced(folder: Path, *workers: ScriptedWorker) -> Iterator[RunningGateway]:
    with RunningGateway(make_settings(folder, traces="otlp")) as gateway:
        for worker in workers:
            gateway.send_heartbeat(worker)
        yield gateway


def test_a_clients_trace_continues_in_gateway_and_worker(
    tmp_path: Path, collector: Collector, worker: ScriptedWorker
) -> None:
    with traced(tmp_path, worker) as gateway:
        response = gateway.client.post(
            "/v1/chat/completions",
            json=chat_body(temperature=0, max_tokens=9),
            headers={"traceparent": PARENT, "tracestate": "vendor=1", "baggage": SECRET_TEXT},
        )
        assert response.status_code == 200
        wait_until(lambda: len(collector.spans) == 2)
    (server,), (client,) = collector.of(SERVER), collector.of(CLIENT)
    assert server.trace_id.hex() == client.trace_id.hex() == TRACE_ID
    assert server.parent_span_id.hex() == SPAN_ID
    assert client.parent_span_id == server.span_id
    headers = worker.requests[0].headers
    assert headers["traceparent"] == f"00-{TRACE_ID}-{client.span_id.hex()}-01"
    assert headers["tracestate"] == "vendor=1"
    assert "baggage" not in headers
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
    span_attributes = attributes(client)
    assert span_attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    assert span_attributes == {
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
    server_attributes = attributes(server)
    assert server_attributes["http.response.status_code"] == 200
    assert server_attributes["paceline.request"] == response.headers["x-request-id"]
    assert (server_attributes["paceline.pool"], server_attributes["paceline.reason"]) == (
        "text-mtp",
        "eligible",
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief."},
        ),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_requests_of_every_wire_are_traced_as_the_chats_that_they_become(
    tmp_path: Path,
    collector: Collector,
    worker: ScriptedWorker,
    asked: tuple[str, dict[str, Any]],
    stream: bool,
) -> None:
    path, fields = asked
    body = {"model": "demo", "temperature": 0, "stream": stream, **fields}
    with traced(tmp_path, worker) as gateway:
        response = gateway.client.post(path, json=body, headers={"traceparent": PARENT})
        assert response.status_code == 200
        wait_until(lambda: len(collector.spans) == 2)
    (server,), (client,) = collector.of(SERVER), collector.of(CLIENT)
    assert (server.name, client.name) == (f"POST {path}", "chat demo")
    assert server.trace_id.hex() == client.trace_id.hex() == TRACE_ID
    assert (server.parent_span_id.hex(), client.parent_span_id) == (SPAN_ID, server.span_id)
    traceparent = f"00-{TRACE_ID}-{client.span_id.hex()}-01"
    assert worker.requests[0].headers["traceparent"] == traceparent
    of_server, of_client = attributes(server), attributes(client)
    assert of_server["paceline.request"] == response.headers["x-request-id"]
    assert of_server["http.response.status_code"] == 200
    assert (of_client["gen_ai.operation.name"], of_client["gen_ai.request.model"]) == (
        "chat",
        "demo",
    )
    assert of_client["gen_ai.request.stream"] is stream
    assert (of_client["gen_ai.usage.input_tokens"], of_client["gen_ai.usage.output_tokens"]) == (
        7,
        3,
    )


def test_each_attempt_has_a_span_and_errors_have_a_type(
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


def test_no_span_contains_text_of_a_request(
    tmp_path: Path, collector: Collector, worker: ScriptedWorker
) -> None:
    messages = [{"role": "user", "content": SECRET_TEXT}]
    with traced(tmp_path, worker) as gateway:
        gateway.chat(messages=messages, user=SECRET_TEXT, stop=[SECRET_TEXT])
        gateway.chat(messages=messages, model=SECRET_TEXT)
        gateway.client.post(
            "/v1/chat/completions",
            content=SECRET_TEXT,
            headers={"traceparent": SECRET_TEXT, "user-agent": SECRET_TEXT},
        )
        wait_until(lambda: len(collector.of(SERVER)) == 3)
    assert SECRET_TEXT.encode() not in collector.raw


def test_an_unresponsive_collector_fails_no_request_and_no_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: ScriptedWorker
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{unresponsive.getsockname()[1]}"
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        with traced(tmp_path, worker) as gateway:
            assert gateway.chat().status_code == 200
            gateway.request_shutdown()
            gateway.wait_closed()


def test_without_traces_no_tracing_module_is_imported_and_no_context_is_sent(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    httpx.post(
        f"{gateway_with_worker.url}/v1/chat/completions",
        json=chat_body(),
        headers={"traceparent": PARENT},
        timeout=60,
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


def test_without_the_extra_the_start_fails_with_the_install_command(tmp_path: Path) -> None:
    program = """
import asyncio, sys
sys.modules["opentelemetry.exporter"] = None
from gateway.app import create_app
from gateway.errors import StartupError
from gateway.config.settings import Settings
try:
    asyncio.run(create_app(Settings(traces="otlp", state_dir=sys.argv[1])))
except StartupError as error:
    sys.stdout.write(str(error))
"""
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "pip install --require-hashes --requirement locks/dev.txt" in process.stdout
