"""A wire format whose stream has other events than the engine's, over a real worker."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.protocols import CHAT, WIRE_FORMATS, StreamEncoder
from gateway.protocols.documents import NO_DOCUMENTS, AskedPdfs, Document
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from gateway.types import NO_CALLER, Caller, Header, Headers, Inspected
from policies.document import PolicyDocument
from policies.request.profile import Endpoint
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import ScriptedWorker

PATH = "/v1/poem"
POEM = {"theme": "a lighthouse", "stream": True}


def own_event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(fields)}\n\n".encode()


@dataclasses.dataclass
class PoemEncoder:
    """Encodes a stream as `start`, `line`, `usage` and `end`."""

    passthrough: bool = False
    failovers: int = 0
    started: bool = False

    def event(self, event: bytes, frame: dict[str, Any]) -> bytes:
        encoded = b"" if self.started else own_event("start", model=frame["model"])
        self.started = True
        for choice in frame["choices"]:
            if text := choice["delta"].get("content"):
                encoded += own_event("line", text=text)
        if usage := frame.get("usage"):
            encoded += own_event("usage", tokens=usage["completion_tokens"])
        return encoded

    def done(self) -> bytes:
        return own_event("end")


class PoemFormat:
    """Clients send a theme and get a poem, which a worker generates as a chat."""

    path = PATH
    endpoint = Endpoint.CHAT

    def pdfs(self, body: Mapping[str, Any]) -> AskedPdfs:
        return AskedPdfs()

    def inspect(
        self,
        body: Mapping[str, Any],
        policy: PolicyDocument,
        fleet: FleetView,
        documents: Mapping[str, Document] = NO_DOCUMENTS,
        caller: Caller = NO_CALLER,
    ) -> Inspected:
        message = {"role": "user", "content": f"A poem about {body['theme']}."}
        chat = {"model": "demo", "messages": [message], "stream": body.get("stream", False)}
        return CHAT.inspect(chat, policy, fleet)

    def is_complete(self, answer: Mapping[str, Any]) -> bool:
        return CHAT.is_complete(answer)

    def encode(self, request: RoutingRequest, response: dict[str, Any], body: bytes) -> bytes:
        return json.dumps({"poem": response["choices"][0]["message"]["content"]}).encode()

    def encoder(
        self, request: RoutingRequest, late_headers: Sequence[Header] = ()
    ) -> StreamEncoder:
        return PoemEncoder()

    def response_headers(self, request_id: str) -> Headers:
        return [(b"poem-id", request_id.encode())]

    def keep_alive(self, comment: bytes) -> bytes:
        return comment

    def error_body(self, error: GatewayError) -> bytes:
        return json.dumps({"failed": error.code}).encode()

    def error_event(self, error: GatewayError) -> bytes:
        return own_event("failed", code=error.code)


@pytest.fixture(autouse=True)
def poem_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WIRE_FORMATS, PATH, PoemFormat())


def stream_of(gateway: RunningGateway) -> bytes:
    with gateway.client.stream("POST", PATH, json=POEM) as response:
        return response.read()


def test_each_event_of_the_engine_becomes_events_of_the_format(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    assert stream_of(gateway_with_worker) == b"".join(
        (
            own_event("start", model="demo"),
            *(own_event("line", text=text) for text in ("one", " two", " three")),
            own_event("usage", tokens=3),
            own_event("end"),
        )
    )
    request = worker.requests[-1]
    assert request.path == "/v1/chat/completions"
    assert request.body["messages"][0]["content"] == "A poem about a lighthouse."


def test_a_response_is_encoded(gateway_with_worker: RunningGateway) -> None:
    response = gateway_with_worker.client.post(PATH, json={"theme": "tea"})
    assert response.json() == {"poem": "one two three"}
    assert response.headers["x-paceline-worker"] == "fake-a"
    assert response.headers["poem-id"] == response.headers["x-request-id"]


def test_a_broken_stream_ends_with_the_error_event_of_the_format(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.cut_after = 3
    received = stream_of(gateway_with_worker)
    assert received.startswith(own_event("start", model="demo"))
    assert received.endswith(own_event("failed", code="worker_lost"))
    assert own_event("end") not in received


def test_an_error_has_the_body_of_the_format(gateway: RunningGateway) -> None:
    response = gateway.client.post(PATH, json=POEM)
    assert (response.status_code, response.json()) == (503, {"failed": "no_worker"})


def test_requests_of_every_format_are_accounted(gateway_with_worker: RunningGateway) -> None:
    stream_of(gateway_with_worker)
    wait_until(lambda: gateway_with_worker.status()["outcomes"] == {"completed": 1})
