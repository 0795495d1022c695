"""Under which names a gateway answers, and which headers cross it: none.

S22: a page of another site, open in a browser on this machine, gets nothing out of a gateway.

A browser sends a form, or what looks like one, to any address and asks nobody before; where no key
is asked for, the headers that no page can choose are all that tells.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.auth.origins import Hosts
from gateway.config.settings import Settings
from gateway.errors import HostRefused
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    make_settings,
    status_and_code,
)
from tests.support.scripted_worker import JOIN_TOKEN, Script, ScriptedWorker

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


def test_a_foreign_name_opens_no_route(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    headers = {"host": "evil.example"}
    responses = [gateway_with_worker.client.get(route, headers=headers) for route in ROUTES]
    responses.append(
        gateway_with_worker.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
    )
    assert {(response.status_code, response.json()["error"]["code"]) for response in responses} == {
        (421, "host_not_allowed")
    }
    assert "PACELINE_ALLOWED_HOSTS" in responses[0].json()["error"]["message"]
    assert not worker.requests


def test_names_are_configured_with_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: ScriptedWorker
) -> None:
    monkeypatch.setenv("PACELINE_ALLOWED_HOSTS", "line.example, other.example")
    with RunningGateway(make_settings(tmp_path)) as gateway:
        response = gateway.client.get("/livez", headers={"host": "other.example:8000"})
        assert response.status_code == 200


def test_no_header_of_the_client_reaches_a_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
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
    response = gateway_with_worker.client.post(
        "/v1/chat/completions", json=chat_body(temperature=0), headers=sent
    )
    assert response.status_code == 200
    (heard,) = worker.requests
    assert "canary" not in repr(heard)
    assert heard.headers["authorization"] == f"Bearer {JOIN_TOKEN}"
    assert heard.headers["x-paceline-lane"] == "text-mtp"
    assert heard.headers["x-request-id"] == response.headers["x-request-id"]
    assert set(heard.headers) <= {
        *("host", "accept", "authorization", "content-type", "content-length", "x-request-id"),
        *("x-paceline-lane", "x-paceline-prefix-key"),
    }


@pytest.mark.parametrize("status", [200, 400, 500])
def test_no_header_of_a_worker_reaches_the_client(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, status: int
) -> None:
    canaries = ("set-cookie", "server", "x-secret", "www-authenticate", "location", "keep-alive")
    body = httpx.Response(200, json={"choices": [], "error": {"message": "no"}}).content
    worker.script = Script(
        status=status,
        body=body,
        headers=tuple((name.encode(), b"canary") for name in canaries),
    )
    response = gateway_with_worker.chat()
    assert "canary" not in repr(response.headers)
    assert set(response.headers) - {"date", "retry-after"} <= {
        *("content-type", "content-length", "x-request-id", "x-paceline-pool"),
        *("x-paceline-worker", "x-paceline-reason", "x-paceline-prefix", "x-paceline-attempts"),
    }


ORIGINS = ("https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://", "")
KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
FOLLOWED = {
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
}
ROUTES_test_foreign_pages = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "demo", "prompt": "x"},
    "/v1/route/explain": chat_body(),
}


def blind(
    gateway: RunningGateway, path: str, kind: str = "text/plain", **headers: str
) -> tuple[int, str, httpx.Headers]:
    """Send what a page can send to another site; headers are named with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["content-type"] = kind
    response = httpx.post(
        gateway.url + path, content=json.dumps(ROUTES_test_foreign_pages[path]), headers=named
    )
    told = response.json()
    return response.status_code, told.get("error", {}).get("code", ""), response.headers


@pytest.mark.parametrize("path", ROUTES_test_foreign_pages)
@pytest.mark.parametrize("origin", ORIGINS)
def test_where_no_key_is_asked_for_a_page_of_another_site_is_refused(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, path: str, origin: str
) -> None:
    for kind in KINDS:
        status, code, headers = blind(gateway_with_worker, path, kind, origin=origin)
        assert (status, code) == (403, "permission_denied")
        assert not [name for name in headers if name.startswith("access-control")]
    assert not worker.requests


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ROUTES_test_foreign_pages)
def test_a_page_that_hides_its_origin_is_refused_too(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, path: str, site: str
) -> None:
    assert blind(gateway_with_worker, path, sec_fetch_site=site, sec_fetch_mode="no-cors")[0] == 403
    assert not worker.requests


@pytest.mark.parametrize("path", ROUTES_test_foreign_pages)
def test_programs_and_own_pages_are_served_as_ever(
    gateway_with_worker: RunningGateway, path: str
) -> None:
    assert blind(gateway_with_worker, path)[0] == 200
    assert blind(gateway_with_worker, path, sec_fetch_mode="cors")[0] == 200, "as Node's fetch says"
    for site in ("same-origin", "none"):
        assert (
            blind(gateway_with_worker, path, sec_fetch_site=site, sec_fetch_mode="cors")[0] == 200
        )
    own = blind(
        gateway_with_worker, path, origin=gateway_with_worker.url, sec_fetch_site="same-origin"
    )
    assert own[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/status"])
def test_a_link_may_be_followed_from_anywhere_and_a_page_may_not_look(
    gateway_with_worker: RunningGateway, path: str
) -> None:
    assert gateway_with_worker.client.get(path, headers=FOLLOWED).status_code == 200
    looked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert status_and_code(gateway_with_worker.client.get(path, headers=looked)) == (
        403,
        "permission_denied",
    )


@pytest.mark.parametrize(
    "marks",
    [
        {"origin": "http://evil.example", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
        {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"sec-fetch-mode": "navigate", "sec-fetch-dest": "object"},
    ],
)
def test_no_page_of_another_site_can_hold_a_stream_of_the_state_open(
    gateway_with_worker: RunningGateway, marks: dict[str, str]
) -> None:
    """An EventSource tells its origin, a picture or a frame only that it is of another site."""
    headers = {"sec-fetch-site": "cross-site", **marks}
    refused = gateway_with_worker.client.get("/v1/status/events", headers=headers)
    assert status_and_code(refused) == (403, "permission_denied")


def test_who_shows_a_key_may_come_from_anywhere(gateway_with_worker: RunningGateway) -> None:
    """An extension of a browser has an origin of its own, and a key that was typed into it."""
    headers = {
        "origin": "chrome-extension://abc",
        **bearer_headers(gateway_with_worker.create_key()),
    }
    assert (
        gateway_with_worker.client.post("/v1/chat/completions", json=chat_body()).status_code == 401
    )
    assert blind(gateway_with_worker, "/v1/chat/completions", **headers)[0] == 200


@pytest.fixture(params=[None, 0], ids=["one port", "a port for admins"])
def unkeyed_gateway(
    request: pytest.FixtureRequest, tmp_path: Path, worker: ScriptedWorker
) -> Iterator[RunningGateway]:
    with RunningGateway(make_settings(tmp_path, admin_port=request.param)) as gateway:
        assert gateway.send_heartbeat(worker).status_code == 200
        yield gateway


WORKER = "/admin/v1/workers/fake-a"
EDITS = (
    ("POST", "/admin/v1/keys"),
    ("POST", "/admin/v1/policy/validate"),
    ("POST", f"{WORKER}/drain"),
)


@pytest.mark.parametrize("origin", ORIGINS)
def test_nothing_of_the_admin_plane_opens_to_a_page_of_another_site(
    unkeyed_gateway: RunningGateway, origin: str
) -> None:
    marks = ({"origin": origin}, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"})
    for headers in marks:
        for method, path in EDITS:
            sent = headers | {"content-type": "text/plain"}
            refused = unkeyed_gateway.admin.request(
                method, path, content=b'{"name": "x"}', headers=sent
            )
            assert status_and_code(refused) == (403, "permission_denied")
        looked = unkeyed_gateway.admin.get("/admin/v1/keys", headers=headers)
        assert status_and_code(looked) == (403, "permission_denied")
    assert unkeyed_gateway.admin.get("/admin/v1/keys").json() == {"keys": []}
    (told,) = unkeyed_gateway.admin.get("/admin/v1/workers").json()["workers"]
    assert told["state"] == "ready"


def test_the_page_for_admins_opens_by_a_link_and_asks_its_own_gateway(
    unkeyed_gateway: RunningGateway,
) -> None:
    assert unkeyed_gateway.admin.get("/admin", headers=FOLLOWED).status_code == 200
    own = {
        "origin": str(unkeyed_gateway.admin.base_url).rstrip("/"),
        "sec-fetch-site": "same-origin",
    }
    made = unkeyed_gateway.admin.post("/admin/v1/keys", json={"name": "own"}, headers=own)
    assert made.status_code == 201
