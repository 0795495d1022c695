"""Traces: OpenTelemetry names, context propagation to the worker, no cost when disabled."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_fixtures import MakeGateway, gateway_of_module
from tests.support.http_server import Request, ServerConnection
from tests.support.running_gateway import RunningGateway, running_server, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
ROOT = Path(__file__).parents[3]
SECRET_TEXT = "the-text-of-a-user"
MESSAGE = {"role": "user", "content": "Hi"}


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


@pytest.fixture(scope="module")
def module_collector() -> Iterator[Collector]:
    started = Collector()
    with running_server(started, sockets=[started.socket]):
        yield started


@pytest.fixture(scope="module")
def traced_gateway(tmp_path_factory, module_collector, module_worker) -> Iterator[RunningGateway]:
    """Run a gateway that exports to `module_collector`, with `module_worker`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", module_collector.url)
        patched.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        folder = tmp_path_factory.mktemp("traced")
        with gateway_of_module(folder, module_worker, traces="otlp") as gateway:
            yield gateway


@pytest.fixture
def collector(module_collector: Collector, module_worker: ScriptedWorker) -> Collector:
    """Return the collector, with nothing of earlier tests: each has waited for all of its spans."""
    module_collector.spans.clear()
    module_collector.raw = b""
    module_worker.reset()
    return module_collector


def test_spans_have_the_names_and_attributes_of_the_conventions(
    traced_gateway: RunningGateway, collector: Collector, module_worker: ScriptedWorker
) -> None:
    with traced_gateway.stream(temperature=0, max_tokens=9) as response:
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
    assert server_attributes["paceline.pool"] == "text-mtp"
    assert server_attributes["paceline.reason"] == "eligible"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE]}),
        ("/v1/messages", {"messages": [MESSAGE], "system": "Be brief."}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_a_clients_trace_continues_over_every_wire_in_gateway_and_worker(
    traced_gateway, collector, module_worker, path, fields, *, stream
) -> None:
    body = {"model": "demo", "temperature": 0, "stream": stream, **fields}
    sent = {"traceparent": PARENT, "tracestate": "vendor=1", "baggage": SECRET_TEXT}
    response = traced_gateway.client.post(path, json=body, headers=sent)
    assert response.status_code == 200
    wait_until(lambda: len(collector.spans) == 2)
    (server,), (client,) = collector.of(SERVER), collector.of(CLIENT)
    assert (server.name, client.name) == (f"POST {path}", "chat demo")
    assert server.trace_id.hex() == client.trace_id.hex() == TRACE_ID
    assert (server.parent_span_id.hex(), client.parent_span_id) == (SPAN_ID, server.span_id)
    headers = module_worker.requests[0].headers
    assert headers["traceparent"] == f"00-{TRACE_ID}-{client.span_id.hex()}-01"
    assert headers["tracestate"] == "vendor=1"
    assert "baggage" not in headers
    assert collector.services == {"paceline-gateway"}
    of_server, of_client = attributes(server), attributes(client)
    assert of_server["paceline.request"] == response.headers["x-request-id"]
    assert of_server["http.response.status_code"] == 200
    assert of_client["gen_ai.operation.name"] == "chat"
    assert of_client["gen_ai.request.model"] == "demo"
    assert of_client["gen_ai.request.stream"] is stream
    assert of_client["gen_ai.usage.input_tokens"] == 7
    assert of_client["gen_ai.usage.output_tokens"] == 3


def test_each_attempt_has_a_span_and_errors_have_a_type(
    traced_gateway, collector, module_worker, second_worker
) -> None:
    module_worker.script = second_worker.script = Script(status=503)
    traced_gateway.join(second_worker)
    assert traced_gateway.chat().status_code == 503
    wait_until(lambda: len(collector.spans) == 3)
    assert traced_gateway.remove_worker(second_worker).is_success
    (server,) = collector.of(SERVER)
    assert attributes(server)["error.type"] == "workers_busy"
    assert attributes(server)["paceline.attempts"] == 2
    attempts = collector.of(CLIENT)
    assert {attributes(span)["paceline.worker"] for span in attempts} == {"fake-a", "fake-b"}
    assert {span.status.code for span in (server, *attempts)} == {2}


def test_no_span_contains_text_of_a_request(traced_gateway, collector, module_worker) -> None:
    messages = [{"role": "user", "content": SECRET_TEXT}]
    traced_gateway.chat(messages=messages, user=SECRET_TEXT, stop=[SECRET_TEXT])
    traced_gateway.chat(messages=messages, model=SECRET_TEXT)
    traced_gateway.client.post(
        "/v1/chat/completions",
        content=SECRET_TEXT,
        headers={"traceparent": SECRET_TEXT, "user-agent": SECRET_TEXT},
    )
    wait_until(lambda: len(collector.of(SERVER)) == 3)
    assert SECRET_TEXT.encode() not in collector.raw


def test_an_unresponsive_collector_fails_no_request_and_no_shutdown(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch, worker: ScriptedWorker
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        url = f"http://127.0.0.1:{unresponsive.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        gateway = make_gateway(worker, traces="otlp")
        assert gateway.chat().status_code == 200
        gateway.request_shutdown()
        gateway.wait_closed()


def test_no_tracing_module_is_imported_without_traces_and_a_missing_extra_is_named(
    tmp_path: Path,
) -> None:
    program = """
import asyncio, sys
from gateway.app import create_app
from gateway.config.settings import Settings
from gateway.errors import StartupError
asyncio.run(create_app(Settings(state_dir=sys.argv[1])))
loaded = ("gateway.telemetry.tracing", "opentelemetry.sdk.trace.export", "opentelemetry.exporter")
assert not [name for name in sys.modules if name.startswith(loaded)]
sys.modules["opentelemetry.exporter"] = None
try:
    asyncio.run(create_app(Settings(traces="otlp", state_dir=sys.argv[1])))
except StartupError as error:
    sys.stdout.write(str(error))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install --require-hashes --requirement locks/dev.txt" in process.stdout
