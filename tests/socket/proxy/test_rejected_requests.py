"""Requests that the gateway rejects before it contacts a worker, and their errors."""

from __future__ import annotations

import gc
import json
import socket
import weakref
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.assembly import Timing
from gateway.proxy import handler
from gateway.proxy.context import RequestContext
from tests.support.raw_client import raw_client, wait_for_outcomes
from tests.support.running_gateway import RunningGateway, chat_body, make_settings, wait_until
from tests.support.scripted_worker import ScriptedWorker


def error_of(response: Any) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"model": "demo", "temperature": NaN}',
        b'{"model": "demo", "temperature": Infinity}',
        b'{"model": "\xff"}',
        b'\xef\xbb\xbf{"model": "demo"}',
        '{"model": "demo"}'.encode("utf-16"),
        b'{"model": "\\ud800"}',
        b'{"model":' + b"[" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_f42_a_body_that_is_no_strict_json_object_returns_400(
    module_gateway: RunningGateway, body: bytes
) -> None:
    response = module_gateway.client.post("/v1/chat/completions", content=body)
    assert error_of(response) == (400, "invalid_json", None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"n": 0}, "n"),
        ({"api_base": "http://evil.example"}, "api_base"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_f44_an_invalid_field_returns_400_and_is_named(
    module_gateway: RunningGateway,
    module_worker: ScriptedWorker,
    fields: dict[str, Any],
    param: str,
) -> None:
    assert error_of(module_gateway.chat(**fields)) == (400, "invalid_value", param)
    assert not module_worker.requests


def test_an_unknown_model_returns_404(module_gateway: RunningGateway) -> None:
    assert error_of(module_gateway.chat(model="gpt-9")) == (404, "model_not_found", "model")


def test_without_workers_any_model_returns_503(gateway: RunningGateway) -> None:
    response = gateway.chat(model="Qwen/Qwen3.5-4B")
    assert error_of(response) == (503, "no_worker", None)
    assert int(response.headers["retry-after"]) >= 1


def test_a_wrong_method_returns_405_with_the_allowed_one(
    module_gateway: RunningGateway,
) -> None:
    response = module_gateway.client.get("/v1/chat/completions")
    assert error_of(response) == (405, "method_not_allowed", None)
    assert response.headers["allow"] == "POST"
    response = module_gateway.client.delete("/v1/status")
    assert error_of(response) == (405, "method_not_allowed", None)
    assert response.headers["allow"] == "GET"


def test_an_unknown_path_returns_404_in_openais_error_format(
    module_gateway: RunningGateway,
) -> None:
    for path in ("//v1/chat/completions", "/nothing", "/docs/no"):
        assert error_of(module_gateway.client.post(path, json=chat_body()))[0] == 404
    slashed = module_gateway.client.post("/v1/chat/completions/", json=chat_body())
    assert error_of(slashed) == (400, "endpoint_not_served", None)


def test_f39_an_oversized_content_length_is_rejected_before_the_body(
    module_gateway: RunningGateway,
) -> None:
    with socket.create_connection(("127.0.0.1", int(module_gateway.url.rpartition(":")[2]))) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 99999999999\r\n\r\n"
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_f39_an_oversized_chunked_body_is_rejected(tmp_path: Path) -> None:
    with RunningGateway(make_settings(tmp_path, body_limit_bytes=1000)) as gateway:
        chunked = (b"x" * 100 for _ in range(20))
        response = gateway.client.post("/v1/chat/completions", content=chunked)
        assert error_of(response) == (413, "body_too_large", None)


def test_f11_a_body_that_never_ends_returns_408(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, body_timeout_s=0.05)
    with RunningGateway(settings, Timing(check_s=0.05)) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"
            )
            assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_f41_gateway_and_worker_use_the_same_value_of_a_duplicate_key(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    body = json.dumps(chat_body())[:-1] + ', "temperature": 1.0, "temperature": 0}'
    response = gateway_with_worker.client.post("/v1/chat/completions", content=body)
    assert response.headers["x-paceline-pool"] == "text-mtp"
    assert worker.requests[0].body["temperature"] == 0


@pytest.fixture
def gateway_with_keys(tmp_path: Path) -> Any:
    settings = make_settings(
        tmp_path, api_key=SecretStr("data-key"), admin_key=SecretStr("admin-key")
    )
    with RunningGateway(settings) as running:
        yield running


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", "Basic data-key", "Bearer \xe9", "data-key"],
)
def test_without_a_valid_key_every_route_returns_401(
    gateway_with_keys: RunningGateway, authorization: str | None
) -> None:
    headers = [(b"authorization", authorization.encode("latin-1"))] if authorization else []
    client = gateway_with_keys.client
    responses = [
        client.post("/v1/chat/completions", json=chat_body(), headers=headers),
        client.post("/v1/completions", json={}, headers=headers),
        client.post("/v1/route/explain", json=chat_body(), headers=headers),
        client.get("/v1/models", headers=headers),
        client.get("/v1/models/demo", headers=headers),
        client.get("/v1/status", headers=headers),
        client.get("/admin/v1/workers", headers=headers),
    ]
    assert {error_of(response) for response in responses} == {(401, "invalid_api_key", None)}


def test_each_key_authorizes_its_own_plane(
    gateway_with_keys: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_keys.join(worker)
    data = {"authorization": "Bearer data-key"}
    admin = {"authorization": "bearer admin-key"}
    chat = gateway_with_keys.client.post("/v1/chat/completions", json=chat_body(), headers=data)
    assert chat.status_code == 200
    assert gateway_with_keys.client.get("/v1/status", headers=data).status_code == 200
    assert gateway_with_keys.client.get("/v1/status", headers=admin).status_code == 401
    assert gateway_with_keys.client.get("/admin/v1/workers", headers=admin).status_code == 200
    assert gateway_with_keys.client.get("/admin/v1/workers", headers=data).status_code == 401
    heartbeat = gateway_with_keys.client.put("/admin/v1/workers/x", headers=admin, json={})
    assert heartbeat.status_code == 401


def test_c16_a_rejected_body_is_freed_without_the_garbage_collector(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway collects garbage so seldom that a few hundred such bodies fill its memory."""
    begun: list[weakref.ref[RequestContext]] = []

    class WatchedContext(RequestContext):
        def __init__(self, *values: Any, **fields: Any) -> None:
            super().__init__(*values, **fields)
            begun.append(weakref.ref(self))

    monkeypatch.setattr(handler, "RequestContext", WatchedContext)
    gc.disable()
    try:
        for body in (b'{"model": "demo", "x": [[], []]}', b"[[", b"{}"):
            gateway_with_worker.client.post("/v1/chat/completions", content=body)
        gateway_with_worker.chat(model="unknown")
        worker.script.hang = True
        with raw_client(gateway_with_worker) as client:
            client.send_chat()
            assert worker.request_received.wait(60)
        wait_for_outcomes(gateway_with_worker, refused=4, client_left=1)
        assert len(begun) == 5
        wait_until(lambda: not any(context() for context in begun))
    finally:
        gc.enable()
