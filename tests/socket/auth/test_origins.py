"""Under which names a gateway answers, and which headers cross it: none."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from gateway.auth.origins import Hosts
from gateway.config.settings import Settings
from gateway.errors import HostRefused
from tests.support.running_gateway import Gateway, chat_body, settings_for_tests
from tests.support.scripted_worker import TOKEN, FakeWorker, Script

ROUTES = ("/livez", "/v1/models", "/v1/status", "/admin/v1/workers", "/nothing")


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost.", "127.0.0.1:1", "[::1]:8000", "192.168.1.5"),
        *(socket.gethostname(), f"{socket.gethostname().partition('.')[0]}.local:8000"),
        *("line.example", "LINE.example:443"),
    ],
)
def test_addresses_and_own_names_are_answered(host: str) -> None:
    hosts = Hosts(Settings(allowed_hosts=("line.example",)))
    for _ in range(2):
        hosts.check([(b"accept", b"*/*"), (b"host", host.encode())])


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "x/v1/models?"),
        *("evil.example@localhost", "localhost@evil.example", "0x7f.1", "\xe9"),
    ],
)
def test_other_names_are_refused(host: str) -> None:
    with pytest.raises(HostRefused):
        Hosts(Settings()).check([(b"host", host.encode("latin-1"))])


def test_no_name_and_two_names_are_refused() -> None:
    hosts = Hosts(Settings())
    for headers in ([], [(b"host", b"localhost"), (b"host", b"localhost")]):
        with pytest.raises(HostRefused):
            hosts.check(headers)


def test_a_foreign_name_opens_no_route(line: Gateway, worker: FakeWorker) -> None:
    headers = {"host": "evil.example"}
    answers = [line.client.get(route, headers=headers) for route in ROUTES]
    answers.append(line.client.post("/v1/chat/completions", json=chat_body(), headers=headers))
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {
        (421, "host_not_allowed")
    }
    assert "PACELINE_ALLOWED_HOSTS" in answers[0].json()["error"]["message"]
    assert not worker.heard


def test_names_are_configured_with_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: FakeWorker
) -> None:
    monkeypatch.setenv("PACELINE_ALLOWED_HOSTS", "line.example, other.example")
    with Gateway(settings_for_tests(tmp_path)) as gateway:
        answer = gateway.client.get("/livez", headers={"host": "other.example:8000"})
        assert answer.status_code == 200


def test_no_header_of_the_client_reaches_a_worker(line: Gateway, worker: FakeWorker) -> None:
    sent = {
        "authorization": "Bearer canary-key",
        "proxy-authorization": "Basic canary-proxy",
        "cookie": "session=canary-cookie",
        "connection": "keep-alive, x-hop",
        "x-hop": "canary-hop",
        "te": "trailers",
        "upgrade": "h2c",
        "x-forwarded-for": "10.0.0.1",
        "forwarded": "for=10.0.0.1",
        "x-api-key": "canary-api",
        "x-paceline-lane": "canary-lane",
        "x-paceline-prefix-key": "canary-prefix",
        "user-agent": "canary-agent",
        "x-request-id": "canary id\twith spaces",
    }
    answer = line.client.post("/v1/chat/completions", json=chat_body(temperature=0), headers=sent)
    assert answer.status_code == 200
    (heard,) = worker.heard
    assert "canary" not in repr(heard)
    assert heard.headers["authorization"] == f"Bearer {TOKEN}"
    assert heard.headers["x-paceline-lane"] == "text-mtp"
    assert heard.headers["x-request-id"] == answer.headers["x-request-id"]
    assert set(heard.headers) <= {
        *("host", "accept", "authorization", "content-type", "content-length", "x-request-id"),
        *("x-paceline-lane", "x-paceline-prefix-key"),
    }


@pytest.mark.parametrize("status", [200, 400, 500])
def test_no_header_of_a_worker_reaches_the_client(
    line: Gateway, worker: FakeWorker, status: int
) -> None:
    canaries = ("set-cookie", "server", "x-secret", "www-authenticate", "location", "keep-alive")
    body = httpx.Response(200, json={"choices": [], "error": {"message": "no"}}).content
    worker.script = Script(
        status=status,
        body=body,
        headers=tuple((name.encode(), b"canary") for name in canaries),
    )
    answer = line.chat()
    assert "canary" not in repr(answer.headers)
    assert set(answer.headers) - {"date", "retry-after"} <= {
        *("content-type", "content-length", "x-request-id", "x-paceline-pool"),
        *("x-paceline-worker", "x-paceline-reason", "x-paceline-prefix", "x-paceline-attempts"),
    }
