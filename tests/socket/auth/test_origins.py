"""Allowed hosts and origins, and the headers that the gateway does not forward.

S22: a page of another site, open in a browser on this machine, gets no access to a gateway. A
browser sends forms, and requests that look like forms, to any address without a preflight request;
without keys, only headers that a page cannot set identify such requests.
"""

import itertools
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from gateway.auth.origins import Hosts
from gateway.config.settings import Settings
from gateway.errors import HostRefused
from tests.support.gateway_fixtures import gateway_of_module
from tests.support.running_gateway import RunningGateway, bearer_headers, chat_body, status_and_code
from tests.support.scripted_worker import JOIN_TOKEN, Script, ScriptedWorker

ROUTES = ("/livez", "/v1/models", "/v1/status", "/admin/v1/workers", "/nothing")


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost.", "127.0.0.1:1", "[::1]:8000", "192.168.1.5"),
        *(socket.gethostname(), f"{socket.gethostname().partition('.')[0]}.local:8000"),
        *("gateway.example", "GATEWAY.example:443", "host.docker.internal:8000"),
    ],
)
def test_ip_addresses_and_allowed_hosts_are_accepted(host: str) -> None:
    hosts = Hosts(Settings(allowed_hosts=("gateway.example",)))
    for _ in range(2):
        hosts.check([(b"accept", b"*/*"), (b"host", host.encode())])


@pytest.mark.parametrize(
    "hosts",
    [
        *(("",), ("evil.example",), ("localhost.evil.example",), ("127.0.0.1.evil.example",)),
        *(("x/v1/models?",), ("evil.example@localhost",), ("localhost@evil.example",)),
        *(("0x7f.1",), ("\xe9",), (), ("localhost", "localhost")),
    ],
)
def test_other_missing_and_duplicate_hosts_are_rejected(hosts: tuple[str, ...]) -> None:
    with pytest.raises(HostRefused):
        Hosts(Settings()).check([(b"host", host.encode("latin-1")) for host in hosts])


def test_an_unknown_host_returns_421_on_every_route(shared_gateway, module_worker) -> None:
    headers = {"host": "evil.example"}
    responses = [shared_gateway.client.get(route, headers=headers) for route in ROUTES]
    responses.append(shared_gateway.chat(headers=headers))
    assert {status_and_code(response) for response in responses} == {(421, "host_not_allowed")}
    assert "PACELINE_ALLOWED_HOSTS" in responses[0].json()["error"]["message"]
    assert not module_worker.requests


def test_allowed_hosts_and_origins_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ALLOWED_HOSTS", "gateway.example, other.example")
    monkeypatch.setenv("PACELINE_ALLOWED_ORIGINS", ", ".join(ALLOWED_ORIGINS))
    Hosts(Settings()).check([(b"host", b"other.example:8000")])
    assert Settings().allowed_origins == ALLOWED_ORIGINS


def test_no_client_header_reaches_a_worker(shared_gateway, module_worker) -> None:
    names = ("lane", "prefix-keys", "prefix-scope")
    sent = {f"x-paceline-{name}": "canary" for name in names} | {
        "authorization": "Bearer canary-key",
        "proxy-authorization": "Basic canary-proxy",
        "cookie": "session=canary-cookie",
        "connection": "keep-alive, x-hop",
        "x-hop": "canary-hop",
        "te": "trailers",
        "upgrade": "h2c",
        "user-agent": "canary-agent",
        "x-forwarded-for": "10.0.0.1",
        "forwarded": "for=10.0.0.1",
        "x-api-key": "canary-api",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "x-request-id": "canary id\twith spaces",
    }
    response = shared_gateway.chat(temperature=0, headers=sent)
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


def test_no_worker_header_reaches_the_client(gateway_with_worker, worker) -> None:
    names = (b"set-cookie", b"server", b"x-secret", b"www-authenticate", b"location", b"keep-alive")
    headers = tuple((name, b"canary") for name in names)
    body = b'{"choices": [], "error": {"message": "no"}}'
    for status in (200, 400, 500):
        worker.script = Script(status=status, body=body, headers=headers)
        response = gateway_with_worker.chat()
        assert "canary" not in repr(response.headers)
        assert set(response.headers) - {"date", "retry-after"} <= {
            *("content-type", "content-length", "x-request-id", "x-paceline-pool"),
            *("x-paceline-worker", "x-paceline-reason", "x-paceline-prefix"),
            *("x-paceline-attempts", "x-paceline-failovers"),
        }


ORIGINS = ("https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://", "")
FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
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
) -> httpx.Response:
    """Send a "simple request" (CORS): browsers send it cross-site without a preflight request.

    Header names use underscores.
    """
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    sent["content-type"] = content_type
    return gateway.client.post(path, content=json.dumps(BODIES[path]), headers=sent)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("origin", ORIGINS)
def test_without_keys_a_cross_origin_request_returns_403(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker, path: str, origin: str
) -> None:
    for content_type in FORM_TYPES:
        response = post_simple(shared_gateway, path, content_type, origin=origin)
        assert status_and_code(response) == (403, "permission_denied")
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert not module_worker.requests


@pytest.mark.parametrize("path", BODIES)
def test_only_programs_and_pages_of_the_gateway_are_served_without_an_origin(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker, path: str
) -> None:
    for site in ("cross-site", "same-site"):
        response = post_simple(shared_gateway, path, sec_fetch_site=site, sec_fetch_mode="no-cors")
        assert response.status_code == 403
    assert not module_worker.requests
    for headers in (
        {},
        {"sec_fetch_mode": "cors"},  # Node's fetch sends it
        {"sec_fetch_mode": "cors", "sec_fetch_site": "none"},
        {"sec_fetch_mode": "cors", "sec_fetch_site": "same-origin"},
        {"origin": shared_gateway.url, "sec_fetch_site": "same-origin"},
    ):
        assert post_simple(shared_gateway, path, **headers).status_code == 200


def test_a_page_of_another_site_may_open_the_status_and_cannot_read_it(module_gateway) -> None:
    """An EventSource sends its origin; an image or a frame sends only `Sec-Fetch-Site`."""
    for path in ("/v1/models", "/v1/status"):
        assert module_gateway.client.get(path, headers=NAVIGATION).status_code == 200
    for path, fetch in itertools.product(
        ("/v1/models", "/v1/status", "/v1/status/events"),
        (
            {"origin": "http://evil.example", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
            {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
            {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
            {"sec-fetch-mode": "navigate", "sec-fetch-dest": "object"},
        ),
    ):
        headers = {"sec-fetch-site": "cross-site", **fetch}
        response = module_gateway.client.get(path, headers=headers)
        assert status_and_code(response) == (403, "permission_denied")


def test_a_request_with_a_key_may_have_any_origin(gateway_with_worker: RunningGateway) -> None:
    """A browser extension has its own origin and a key that its user entered."""
    key = bearer_headers(gateway_with_worker.create_key())
    page = {"origin": "chrome-extension://abc"}
    assert gateway_with_worker.chat().status_code == 401
    assert post_simple(gateway_with_worker, "/v1/chat/completions", **page, **key).is_success


@pytest.fixture(scope="module", params=[None, 0], ids=["one port", "a port for admins"])
def unkeyed_gateway(request, tmp_path_factory, module_worker) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("unkeyed")
    with gateway_of_module(folder, module_worker, admin_port=request.param) as gateway:
        yield gateway


WORKER = "/admin/v1/workers/fake-a"
EDITS = (
    ("POST", "/admin/v1/keys"),
    ("POST", "/admin/v1/policy/validate"),
    ("POST", f"{WORKER}/drain"),
)


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_cross_site_page_cannot_read_or_edit_the_admin_plane(unkeyed_gateway, origin) -> None:
    header_sets = (
        {"origin": origin},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    )
    with httpx.Client(base_url=unkeyed_gateway.admin.base_url, timeout=60) as page:
        for headers in header_sets:
            form = headers | {"content-type": "text/plain"}
            answers = [
                page.request(method, path, content=b'{"name": "x"}', headers=form)
                for method, path in EDITS
            ]
            for response in (*answers, page.get("/admin/v1/keys", headers=headers)):
                assert status_and_code(response) == (401, "invalid_api_key")
    assert unkeyed_gateway.admin.get("/admin/v1/keys").json() == {"keys": [], "required": False}
    (entry,) = unkeyed_gateway.admin.get("/admin/v1/workers").json()["workers"]
    assert entry["state"] == "ready"


def test_the_admin_page_opens_from_a_link_and_may_call_its_own_gateway(unkeyed_gateway) -> None:
    assert unkeyed_gateway.admin.get("/admin", headers=NAVIGATION).status_code == 200
    origin = str(unkeyed_gateway.admin.base_url).rstrip("/")
    same_origin = {"origin": origin, "sec-fetch-site": "same-origin"}
    created = unkeyed_gateway.admin.post(
        "/admin/v1/keys", json={"name": "own"}, headers=same_origin
    )
    assert created.status_code == 201


APP = "https://app.example"
DESKTOP_APP = "app://obsidian.md"
ALLOWED_ORIGINS = (APP, "http://localhost:3000", DESKTOP_APP)


@pytest.fixture(scope="module")
def gateway_with_origin(tmp_path_factory, module_worker) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("with-origin")
    with gateway_of_module(folder, module_worker, allowed_origins=ALLOWED_ORIGINS) as gateway:
        yield gateway


ASKED = {
    "/v1/chat/completions": chat_body(),
    "/v1/messages": {**chat_body(), "max_tokens": 9},
    "/v1/responses": {"model": "demo", "input": "x"},
}


@pytest.mark.parametrize("path", ASKED)
def test_a_page_of_an_allowed_origin_may_use_the_data_plane(gateway_with_origin, path) -> None:
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
    desktop = client.post(path, json=body, headers={"origin": DESKTOP_APP})
    assert desktop.headers["access-control-allow-origin"] == DESKTOP_APP
    if path == "/v1/responses":
        path = f"{path}/{answers[1].json()['id']}"
        asked["access-control-request-method"] = "DELETE"
        methods = client.options(path, headers=asked).headers["access-control-allow-methods"]
        assert "DELETE" in methods
        deleted = client.delete(path, headers={"origin": APP})
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
