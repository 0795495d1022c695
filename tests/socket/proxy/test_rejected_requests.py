"""Requests that the gateway rejects before it contacts a worker, and their errors."""

import gc
import json
import weakref
from typing import Any

import httpx

from gateway.proxy import handler
from gateway.proxy.context import RequestContext
from tests.support.gateway_fixtures import Served
from tests.support.raw_client import open_socket, raw_client, wait_for_outcomes
from tests.support.running_gateway import RunningGateway, chat_body, wait_until
from tests.support.scripted_worker import ScriptedWorker

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


def error_of(response: Any) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["param"]


INVALID_JSON = (
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
    b'{"model": %b}' % (b"[" * 201 + b"]" * 201),
    b'{"model": %b}' % (b"[" * 100_000),
    b'{"model": %b}' % (b"[" * 100_000 + b"]" * 100_000),
)
INVALID_VALUES: tuple[tuple[dict[str, Any], str], ...] = (
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
)


def test_f40_f42_f44_an_invalid_body_or_field_returns_400_and_reaches_no_worker(
    module_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    for body in INVALID_JSON:
        response = module_gateway.client.post("/v1/chat/completions", content=body)
        assert error_of(response) == (400, "invalid_json", None), body[:24]
    for fields, param in INVALID_VALUES:
        assert error_of(module_gateway.chat(**fields)) == (400, "invalid_value", param)
    assert not module_worker.requests


def test_an_unknown_model_returns_404(module_gateway: RunningGateway) -> None:
    assert error_of(module_gateway.chat(model="gpt-9")) == (404, "model_not_found", "model")


def test_without_workers_any_model_returns_503(gateway: RunningGateway) -> None:
    response = gateway.chat(model="Qwen/Qwen3.5-4B")
    assert error_of(response) == (503, "no_worker", None)
    assert int(response.headers["retry-after"]) >= 1


def test_an_unknown_path_returns_404_in_openais_error_format(module_gateway) -> None:
    for path in ("//v1/chat/completions", "/nothing", "/no/docs"):
        assert error_of(module_gateway.client.post(path, json=chat_body()))[0] == 404
    slashed = module_gateway.client.post("/v1/chat/completions/", json=chat_body())
    assert error_of(slashed) == (400, "endpoint_not_served", None)


BEHIND_WRONG_BASE_URLS = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/responses/resp_1": "/v1/responses/{response_id}",
    "/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/models": "/v1/models",
    "/models/org/name": "/v1/models/{name}",
    "/embeddings": "/v1/embeddings",
    "/rerank": "/v1/rerank",
    "/conversations": "/v1/conversations",
    "/status": "/v1/status",
    "/openai/chat/completions": "/v1/chat/completions",
    "/v1/v1/messages": "/v1/messages",
    "/v1/v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/v1/v2/rerank": "/v2/rerank",
    "/api/v1/chat/completions": "/v1/chat/completions",
}
OF_OTHER_MAKERS = ("/v1/threads/t/messages", "/v1/chats/completions", "/v1/v1/x")


def test_a_path_behind_a_wrong_base_url_gets_a_404_that_names_the_right_one(gateway) -> None:
    """A client needs no key to learn it."""
    gateway.create_key()
    with httpx.Client(base_url=gateway.url) as client:
        answers = {
            path: client.post(path, json={}) for path in (*BEHIND_WRONG_BASE_URLS, *OF_OTHER_MAKERS)
        }
    for path, meant in BEHIND_WRONG_BASE_URLS.items():
        error = answers[path].json()["error"]
        advice = "shorten the base URL" if "/v" in path else "add '/v1' to the base URL"
        assert error["message"] == f"This path does not exist. {meant} does: {advice}."
        if "messages" in path:
            assert (answers[path].status_code, error["type"]) == (404, "not_found_error"), path
        else:
            assert error_of(answers[path]) == (404, "path_not_found", None), path
    for path in OF_OTHER_MAKERS:
        assert error_of(answers[path]) == (400, "endpoint_not_served", None), path


def test_f39_f11_a_body_that_is_too_large_or_never_ends_is_rejected(make_gateway) -> None:
    gateway = make_gateway(check_s=0.05, body_limit_bytes=1000, body_timeout_s=0.05)
    chunked = (b"x" * 100 for _ in range(20))
    response = gateway.client.post("/v1/chat/completions", content=chunked)
    assert error_of(response) == (413, "body_too_large", None)
    with open_socket(gateway) as raw:
        raw.sendall(HEAD % 10 + b"{")
        assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_f41_gateway_and_worker_use_the_same_value_of_a_duplicate_key(served: Served) -> None:
    body = json.dumps(chat_body())[:-1] + ', "temperature": 1.0, "temperature": 0}'
    response = served.gateway.client.post("/v1/chat/completions", content=body)
    assert response.headers["x-paceline-pool"] == "text-mtp"
    assert served.worker.requests[0].body["temperature"] == 0


def test_c16_a_rejected_body_is_freed_without_the_garbage_collector(served, monkeypatch) -> None:
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
            served.gateway.client.post("/v1/chat/completions", content=body)
        served.gateway.chat(model="unknown")
        served.worker.script.hang = True
        with raw_client(served.gateway) as client:
            client.send_chat()
            assert served.worker.request_received.wait(60)
        wait_for_outcomes(served.gateway, refused=4, client_left=1)
        assert len(begun) == 5
        wait_until(lambda: not any(context() for context in begun))
    finally:
        gc.enable()
