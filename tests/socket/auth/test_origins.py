"""Allowed hosts and origins, and the headers that the gateway does not forward.

S22: a page of another site, open in a browser on this machine, gets no access to a gateway. A
browser sends forms, and requests that look like forms, to any address without a preflight request;
without keys, only headers that a page cannot set identify such requests.
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
from tests.support.gateway_fixtures import remove_settings
from tests.support.heartbeats import send_heartbeats
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
        *("gateway.example", "GATEWAY.example:443"),
    ],
)
def test_ip_addresses_and_allowed_hosts_are_accepted(host: str) -> None:
    hosts = Hosts(Settings(allowed_hosts=("gateway.example",)))
    for _ in range(2):
        hosts.check([(b"accept", b"*/*"), (b"host", host.encode())])


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "x/v1/models?"),
        *("evil.example@localhost", "localhost@evil.example", "0x7f.1", "\xe9"),
    ],
)
def test_other_hosts_are_rejected(host: str) -> None:
    with pytest.raises(HostRefused):
        Hosts(Settings()).check([(b"host", host.encode("latin-1"))])


def test_missing_and_duplicate_host_headers_are_rejected() -> None:
    hosts = Hosts(Settings())
    for headers in ([], [(b"host", b"localhost"), (b"host", b"localhost")]):
        with pytest.raises(HostRefused):
            hosts.check(headers)


def test_an_unknown_host_returns_421_on_every_route(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    headers = {"host": "evil.example"}
    responses = [shared_gateway.client.get(route, headers=headers) for route in ROUTES]
    responses.append(
        shared_gateway.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
    )
    assert {(response.status_code, response.json()["error"]["code"]) for response in responses} == {
        (421, "host_not_allowed")
    }
    assert "PACELINE_ALLOWED_HOSTS" in responses[0].json()["error"]["message"]
    assert not module_worker.requests


def test_allowed_hosts_are_separated_by_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: ScriptedWorker
) -> None:
    monkeypatch.setenv("PACELINE_ALLOWED_HOSTS", "gateway.example, other.example")
    with RunningGateway(make_settings(tmp_path)) as gateway:
        response = gateway.client.get("/livez", headers={"host": "other.example:8000"})
        assert response.status_code == 200


def test_no_client_header_reaches_a_worker(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
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
        "x-paceline-prefix-keys": "canary-prefix",
        "x-paceline-prefix-scope": "canary-scope",
        "user-agent": "canary-agent",
        "x-request-id": "canary id\twith spaces",
    }
    response = shared_gateway.client.post(
        "/v1/chat/completions", json=chat_body(temperature=0), headers=sent
    )
    assert response.status_code == 200
    (received,) = module_worker.requests
    assert "canary" not in repr(received)
    assert received.headers["authorization"] == f"Bearer {JOIN_TOKEN}"
    assert received.headers["x-paceline-lane"] == "text-mtp"
    assert received.headers["x-request-id"] == response.headers["x-request-id"]
    assert set(received.headers) <= {
        *("host", "accept", "authorization", "content-type", "content-length", "x-request-id"),
        *("x-paceline-lane", "x-paceline-prefix-keys", "x-paceline-prefix-scope"),
    }


@pytest.mark.parametrize("status", [200, 400, 500])
def test_no_worker_header_reaches_the_client(
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
        "x-paceline-failovers",
    }


ORIGINS = ("https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://", "")
FORM_CONTENT_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
)
NAVIGATION = {
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
}
BODIES = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "demo", "prompt": "x"},
    "/v1/route/explain": chat_body(),
}


def post_simple(
    gateway: RunningGateway, path: str, content_type: str = "text/plain", **headers: str
) -> tuple[int, str, httpx.Headers]:
    """Send a "simple request" (CORS): browsers send it cross-site without a preflight request.

    Header names use underscores.
    """
    request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request_headers["content-type"] = content_type
    response = httpx.post(
        gateway.url + path,
        content=json.dumps(BODIES[path]),
        headers=request_headers,
        timeout=60,
    )
    body = response.json()
    return response.status_code, body.get("error", {}).get("code", ""), response.headers


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("origin", ORIGINS)
def test_without_keys_a_cross_origin_request_returns_403(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker, path: str, origin: str
) -> None:
    for content_type in FORM_CONTENT_TYPES:
        status, code, headers = post_simple(shared_gateway, path, content_type, origin=origin)
        assert (status, code) == (403, "permission_denied")
        assert not [name for name in headers if name.startswith("access-control")]
    assert not module_worker.requests


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", BODIES)
def test_a_cross_site_request_without_an_origin_returns_403(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker, path: str, site: str
) -> None:
    assert (
        post_simple(shared_gateway, path, sec_fetch_site=site, sec_fetch_mode="no-cors")[0] == 403
    )
    assert not module_worker.requests


@pytest.mark.parametrize("path", BODIES)
def test_programs_and_pages_of_the_gateway_are_served(
    shared_gateway: RunningGateway, path: str
) -> None:
    assert post_simple(shared_gateway, path)[0] == 200
    assert post_simple(shared_gateway, path, sec_fetch_mode="cors")[0] == 200, (
        "Node's fetch sends this header"
    )
    for site in ("same-origin", "none"):
        assert (
            post_simple(shared_gateway, path, sec_fetch_site=site, sec_fetch_mode="cors")[0] == 200
        )
    same_origin = post_simple(
        shared_gateway, path, origin=shared_gateway.url, sec_fetch_site="same-origin"
    )
    assert same_origin[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/status"])
def test_cross_site_navigation_is_allowed_and_cross_site_fetch_is_not(
    module_gateway: RunningGateway, path: str
) -> None:
    assert module_gateway.client.get(path, headers=NAVIGATION).status_code == 200
    fetch_headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert status_and_code(module_gateway.client.get(path, headers=fetch_headers)) == (
        403,
        "permission_denied",
    )


@pytest.mark.parametrize(
    "fetch_headers",
    [
        {"origin": "http://evil.example", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
        {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"sec-fetch-mode": "navigate", "sec-fetch-dest": "object"},
    ],
)
def test_a_cross_site_page_cannot_open_the_event_stream(
    module_gateway: RunningGateway, fetch_headers: dict[str, str]
) -> None:
    """An EventSource sends its origin; an image or a frame sends only `Sec-Fetch-Site`."""
    headers = {"sec-fetch-site": "cross-site", **fetch_headers}
    response = module_gateway.client.get("/v1/status/events", headers=headers)
    assert status_and_code(response) == (403, "permission_denied")


def test_a_request_with_a_key_may_have_any_origin(gateway_with_worker: RunningGateway) -> None:
    """A browser extension has its own origin and a key that its user entered."""
    headers = {
        "origin": "chrome-extension://abc",
        **bearer_headers(gateway_with_worker.create_key()),
    }
    assert (
        gateway_with_worker.client.post("/v1/chat/completions", json=chat_body()).status_code == 401
    )
    assert post_simple(gateway_with_worker, "/v1/chat/completions", **headers)[0] == 200


@pytest.fixture(scope="module", params=[None, 0], ids=["one port", "a port for admins"])
def unkeyed_gateway(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    module_worker: ScriptedWorker,
) -> Iterator[RunningGateway]:
    with pytest.MonkeyPatch.context() as patched:
        remove_settings(patched)
        settings = make_settings(tmp_path_factory.mktemp("unkeyed"), admin_port=request.param)
    with RunningGateway(settings) as gateway, send_heartbeats(gateway, module_worker):
        yield gateway


WORKER = "/admin/v1/workers/fake-a"
EDITS = (
    ("POST", "/admin/v1/keys"),
    ("POST", "/admin/v1/policy/validate"),
    ("POST", f"{WORKER}/drain"),
)


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_cross_site_page_cannot_read_or_edit_the_admin_plane(
    unkeyed_gateway: RunningGateway, origin: str
) -> None:
    header_sets = (
        {"origin": origin},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    )
    with httpx.Client(base_url=unkeyed_gateway.admin.base_url, timeout=60) as page:
        for headers in header_sets:
            for method, path in EDITS:
                form_headers = headers | {"content-type": "text/plain"}
                response = page.request(
                    method, path, content=b'{"name": "x"}', headers=form_headers
                )
                assert status_and_code(response) == (401, "invalid_api_key")
            read = page.get("/admin/v1/keys", headers=headers)
            assert status_and_code(read) == (401, "invalid_api_key")
    assert unkeyed_gateway.admin.get("/admin/v1/keys").json() == {"keys": [], "required": False}
    (entry,) = unkeyed_gateway.admin.get("/admin/v1/workers").json()["workers"]
    assert entry["state"] == "ready"


def test_the_admin_page_opens_from_a_link_and_may_call_its_own_gateway(
    unkeyed_gateway: RunningGateway,
) -> None:
    assert unkeyed_gateway.admin.get("/admin", headers=NAVIGATION).status_code == 200
    same_origin = {
        "origin": str(unkeyed_gateway.admin.base_url).rstrip("/"),
        "sec-fetch-site": "same-origin",
    }
    created = unkeyed_gateway.admin.post(
        "/admin/v1/keys", json={"name": "own"}, headers=same_origin
    )
    assert created.status_code == 201


APP = "https://app.example"
DESKTOP_APP = "app://obsidian.md"


@pytest.fixture(scope="module")
def gateway_with_origin(
    tmp_path_factory: pytest.TempPathFactory, module_worker: ScriptedWorker
) -> Iterator[RunningGateway]:
    with pytest.MonkeyPatch.context() as patched:
        remove_settings(patched)
        origins = f"{APP}, http://localhost:3000, {DESKTOP_APP}"
        patched.setenv("PACELINE_ALLOWED_ORIGINS", origins)
        settings = make_settings(tmp_path_factory.mktemp("with-origin"))
    with RunningGateway(settings) as gateway, send_heartbeats(gateway, module_worker):
        yield gateway


ASKED = {
    "/v1/chat/completions": chat_body(),
    "/v1/messages": {**chat_body(), "max_tokens": 9},
    "/v1/responses": {"model": "demo", "input": "x"},
}


@pytest.mark.parametrize("path", ASKED)
def test_a_page_of_an_allowed_origin_may_use_the_data_plane(
    gateway_with_origin: RunningGateway, path: str
) -> None:
    """Its preflight needs no key, a stream and an error can be read, and the header names it."""
    client, body = gateway_with_origin.client, ASKED[path]
    wanted = "authorization,x-api-key,anthropic-version,x-stainless-os"
    asked = {
        "origin": APP,
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    preflight = client.options(path, headers=asked)
    assert (preflight.status_code, preflight.content) == (204, b"")
    assert preflight.headers["access-control-allow-headers"] == wanted
    assert "POST" in preflight.headers["access-control-allow-methods"]
    answers = [
        preflight,
        client.post(path, json=body, headers={"origin": APP}),
        client.post(path, json={**body, "stream": True}, headers={"origin": APP}),
        client.post(path, json={}, headers={"origin": APP}),
        client.get("/v1/models", headers={"origin": APP}),
    ]
    assert [answer.status_code for answer in answers] == [204, 200, 200, 400, 200]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == APP
        assert answer.headers["vary"] == "origin"


def test_a_desktop_app_may_use_the_data_plane(gateway_with_origin: RunningGateway) -> None:
    page = {"origin": DESKTOP_APP}
    response = gateway_with_origin.client.post(
        "/v1/chat/completions", json=chat_body(), headers=page
    )
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == DESKTOP_APP


def test_a_page_of_an_allowed_origin_may_delete_its_response(
    gateway_with_origin: RunningGateway,
) -> None:
    client, page = gateway_with_origin.client, {"origin": APP}
    made = client.post("/v1/responses", json=ASKED["/v1/responses"], headers=page).json()
    path = f"/v1/responses/{made['id']}"
    asked = {**page, "access-control-request-method": "DELETE"}
    preflight = client.options(path, headers=asked)
    assert preflight.status_code == 204
    assert "DELETE" in preflight.headers["access-control-allow-methods"]
    deleted = client.delete(path, headers=page)
    assert deleted.is_success
    assert deleted.headers["access-control-allow-origin"] == APP


def test_no_other_page_and_no_admin_route_is_opened(gateway_with_origin: RunningGateway) -> None:
    client = gateway_with_origin.client
    asked = {"origin": APP, "access-control-request-method": "GET"}
    other = {**asked, "origin": "https://app.example.evil"}
    answers = [
        client.options("/admin/v1/keys", headers=asked),
        client.get("/admin/v1/keys", headers={"origin": APP}),
        client.options("/v1/models", headers=other),
        client.post("/v1/chat/completions", json=chat_body(), headers=other),
    ]
    assert all(answer.is_error for answer in answers)
    for answer in answers:
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "origin", ["*", "null", "app.example", "https://app.example/", "https://a b"]
)
def test_an_allowed_origin_has_a_scheme_and_no_path(origin: str) -> None:
    with pytest.raises(ValueError, match="must be an origin"):
        Settings(allowed_origins=(origin,))


def test_containers_reach_the_gateway_by_the_name_of_their_machine() -> None:
    Hosts(Settings()).check([(b"host", b"host.docker.internal:8000")])
