"""Authentication of every route, with every kind of key."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.app import create_app
from gateway.protocols import PROXY_PATHS
from tests.support.gateway_fixtures import gateway_of_module
from tests.support.gateway_routes import ADMIN_PAGE, BOTH_PORTS, PAIRING, PUBLIC, route_paths
from tests.support.heartbeats import send_heartbeats
from tests.support.running_gateway import RunningGateway, chat_body, make_settings
from tests.support.scripted_worker import JOIN_TOKEN

ROOT = Path(__file__).parents[3]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
KEYS: dict[str, Any] = {"api_key": SecretStr("static-key"), "admin_key": SecretStr("admin-key")}
WORKER = "/admin/v1/workers/fake-a"
DATA_PLANE = (
    ("POST", "/v1/chat/completions", 200),
    ("POST", "/v1/completions", 400),
    ("POST", "/v1/embeddings", 400),
    ("POST", "/v1/rerank", 400),
    ("POST", "/v2/rerank", 400),
    ("POST", "/v1/messages", 400),
    ("POST", "/v1/messages/count_tokens", 400),
    ("POST", "/v1/responses", 400),
    ("POST", "/v1/responses/input_tokens", 400),
    ("POST", "/v1/responses/compact", 400),
    ("GET", "/v1/responses/{response_id}", 404),
    ("DELETE", "/v1/responses/{response_id}", 404),
    ("POST", "/v1/responses/{response_id}/cancel", 404),
    ("GET", "/v1/responses/{response_id}/input_items", 404),
    ("POST", "/v1/conversations", 200),
    ("GET", "/v1/conversations/{conversation_id}", 404),
    ("POST", "/v1/conversations/{conversation_id}", 404),
    ("DELETE", "/v1/conversations/{conversation_id}", 404),
    ("GET", "/v1/conversations/{conversation_id}/items", 404),
    ("POST", "/v1/conversations/{conversation_id}/items", 400),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}", 404),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", 404),
    ("POST", "/v1/route/explain", 200),
    ("GET", "/v1/models", 200),
    ("GET", "/v1/models/demo", 200),
    ("GET", "/v1/status", 200),
    ("GET", "/v1/errors", 200),
    ("GET", "/v1/usage", 200),
)
ADMIN_PLANE = (
    ("GET", "/admin/v1/workers", 200),
    ("PUT", f"{WORKER}/cordon", 200),
    ("DELETE", f"{WORKER}/cordon", 204),
    ("DELETE", f"{WORKER}/prefix-cache", 502),
    ("POST", f"{WORKER}/drain", 200),
    ("POST", "/admin/v1/pairing/code", 201),
    ("DELETE", "/admin/v1/pairing/workers/fake-a", 404),
    ("GET", "/admin/v1/engines", 200),
    ("POST", "/admin/v1/engines", 400),
    ("DELETE", "/admin/v1/engines/fake-a", 404),
    ("GET", "/admin/v1/keys", 200),
    ("POST", "/admin/v1/keys", 400),
    ("GET", "/admin/v1/keys/key-000000000000", 404),
    ("PATCH", "/admin/v1/keys/key-000000000000", 404),
    ("DELETE", "/admin/v1/keys/key-000000000000", 404),
    ("POST", "/admin/v1/keys/key-000000000000/rotate", 404),
    ("GET", "/admin/v1/usage", 200),
    ("GET", "/admin/v1/errors", 200),
    ("GET", "/admin/v1/policy", 200),
    ("PUT", "/admin/v1/policy", 428),
    ("PATCH", "/admin/v1/policy", 428),
    ("POST", "/admin/v1/policy/rollback", 428),
    ("POST", "/admin/v1/policy/validate", 200),
    ("POST", "/admin/v1/policy/diff", 400),
    ("GET", "/admin/v1/policy/schema", 200),
    ("GET", "/admin/v1/policy/examples", 200),
    ("GET", "/admin/v1/policy/history", 200),
    ("GET", "/admin/v1/policy/history/1", 200),
)
JOINING = (
    ("PUT", WORKER, 400),
    ("GET", f"{WORKER}/joined", 200),
    ("GET", f"{WORKER}-unknown/joined", 404),
    ("DELETE", f"{WORKER}-unknown", 204),
)
AUTHORIZED = (
    *((route, {"static", "active", "admin"}) for route in DATA_PLANE),
    *((route, {"admin"}) for route in ADMIN_PLANE),
    *((route, {"join"}) for route in JOINING),
)
"""Each route, the status of its answer, and the kinds of keys that get it."""


def all_routes(state_dir: Path) -> set[tuple[str, str]]:
    app = asyncio.run(create_app(make_settings(state_dir)))
    return route_paths(app) | {("POST", path) for path in PROXY_PATHS}


@pytest.fixture(scope="module")
def gateway_with_keys(tmp_path_factory, module_worker) -> Iterator[RunningGateway]:
    """Run a gateway with every kind of key, which the tests only add to."""
    folder = tmp_path_factory.mktemp("keys")
    with gateway_of_module(folder, module_worker, **KEYS) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def secrets(gateway_with_keys: RunningGateway) -> dict[str, str]:
    """Return a secret of each kind, and what looks like one."""
    active = gateway_with_keys.create_key(name="active")
    revoked = gateway_with_keys.create_key(name="revoked")
    gateway_with_keys.admin.delete(f"/admin/v1/keys/{revoked['id']}")
    return {
        "static": "static-key",
        "active": active["secret"],
        "revoked": revoked["secret"],
        "id": active["id"],
        "admin": "admin-key",
        "join": JOIN_TOKEN,
    }


def request_with_key(
    gateway: RunningGateway, method: str, path: str, secret: str | None
) -> httpx.Response:
    scheme = "bearer" if method == "GET" else "Bearer"
    headers = {"authorization": f"{scheme} {secret}"} if secret else {}
    body = chat_body() if "chat" in path or "explain" in path else {}
    content = None if method == "GET" else body
    return gateway.client.request(method, path, headers=headers, json=content)


@pytest.mark.parametrize("admin_port", [None, 0], ids=["one port", "a port for admins"])
def test_every_route_is_in_the_public_list_or_requires_a_key(tmp_path, worker, admin_port) -> None:
    """S11, S17, S52 (CVE-2026-12795, CVE-2025-62727, vllm-mlx #68): every route, method and port
    returns 401 without a key unless the route is public."""
    settings = make_settings(tmp_path, admin_port=admin_port, **KEYS)
    app = asyncio.run(create_app(settings))
    expected_routes = all_routes(tmp_path)
    assert len(expected_routes) > 12
    assert expected_routes > PUBLIC
    paths = {path for _, path in expected_routes}
    asked = {*expected_routes, *itertools.product(["TRACE"] if app.admin_app else METHODS, paths)}
    with RunningGateway(settings) as gateway, send_heartbeats(gateway, worker):
        routes_by_url = {gateway.url: route_paths(app) | {("POST", path) for path in PROXY_PATHS}}
        if app.admin_app is not None:
            admin_routes = routes_by_url[gateway.admin_url] = route_paths(app.admin_app)
            assert routes_by_url[gateway.url] & admin_routes == BOTH_PORTS
            assert len(admin_routes) == len(ADMIN_PLANE) + len(ADMIN_PAGE) + 1
        assert set().union(*routes_by_url.values()) == expected_routes
        for url, port_routes in routes_by_url.items():
            with httpx.Client(base_url=url, timeout=30) as client:
                for method, path in asked:
                    name = "policy.md" if path.startswith("/docs/") else "shared/icon.svg"
                    file = path.replace("{name:path}", name)
                    response = client.request(method, file)
                    expected = expected_status(method, path, port_routes)
                    assert response.status_code == expected, f"{method} {path}: {response.text}"
                    if response.status_code == 405:
                        methods = methods_of(path, port_routes)
                        assert response.headers["allow"] == ", ".join(sorted(methods))
                    if method == "HEAD":
                        assert response.content == b""
                    elif response.status_code == 401:
                        error = response.json()["error"]
                        # The second is in Anthropic's shape.
                        codes = {"invalid_api_key", "authentication_error"}
                        assert error.get("code", error["type"]) in codes
                        assert response.headers["www-authenticate"] == "Bearer"


def expected_status(method: str, path: str, port_routes: set[tuple[str, str]]) -> int:
    if (method.replace("HEAD", "GET"), path) in PUBLIC & port_routes:
        return 400 if (method, path) in PAIRING else 200
    methods = methods_of(path, port_routes)
    return 401 if method in methods else 405 if methods else 404


def methods_of(path: str, port_routes: set[tuple[str, str]]) -> set[str]:
    """Return the methods of a path, whose last part may stand for the id of a response too."""
    as_id = f"{path.rpartition('/')[0]}/{{response_id}}"
    methods = {method for method, route_path in port_routes if route_path in (path, as_id)}
    return methods | ({"HEAD"} if "GET" in methods else set())


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1/models/..%2f..%2fadmin/v1/keys", "/admin/v1/keys/", "/ADMIN/v1/keys"),
        *("/admin/v1/keys;x", "/v1/../admin/v1/keys", "/admin/v1/keys%00", "/openapi.json/"),
        *("/v1/chat/completions/", "/redoc", "/tokenize", "/invocations", "/pause"),
    ],
)
def test_misspelled_paths_grant_no_access(gateway_with_keys: RunningGateway, path: str) -> None:
    """S01, S02, S03, S51 (CVE-2026-48710, CVE-2026-49468, CVE-2026-48746): the gateway
    authorizes the raw path and serves no undocumented routes."""
    url = httpx.URL(gateway_with_keys.url).copy_with(raw_path=path.encode())
    for method in ("GET", "POST"):
        refused = httpx.request(method, url, timeout=60)
    unserved = refused.status_code == 400 and b"endpoint_not_served" in refused.content
    assert unserved or refused.status_code in {401, 404, 405}


def test_the_route_lists_of_this_file_are_complete(tmp_path: Path) -> None:
    listed = {
        (method, path.replace("key-000000000000", "{name}").replace("fake-a", "{worker_id}"))
        for method, path, _ in (*DATA_PLANE, *ADMIN_PLANE)
    }
    listed -= {("GET", "/v1/models/demo"), ("GET", "/admin/v1/policy/history/1")}
    listed |= {("GET", "/v1/models/{name:path}"), ("GET", "/admin/v1/policy/history/{number}")}
    listed |= PUBLIC
    listed |= {
        ("PUT", "/admin/v1/workers/{worker_id}"),
        ("DELETE", "/admin/v1/workers/{worker_id}"),
        ("GET", "/admin/v1/workers/{worker_id}/joined"),
        ("GET", "/admin/v1/workers/{worker_id}/protocol"),
    }
    # This stream never ends; tests/socket/status tests its authentication.
    listed.add(("GET", "/v1/status/events"))
    assert listed == all_routes(tmp_path)


@pytest.mark.parametrize(("route", "expected"), AUTHORIZED)
def test_each_kind_of_key_authorizes_only_its_own_routes(
    gateway_with_keys, secrets, route, expected
) -> None:
    """S08, S10 (CVE-2026-42271, CVE-2026-47101): a route authorizes one role and denies all
    other keys."""
    method, path, status = route
    statuses = {
        kind: request_with_key(gateway_with_keys, method, path, secret).status_code
        for kind, secret in secrets.items()
    }
    assert {kind for kind, given in statuses.items() if given != 401} == expected
    assert statuses[next(iter(expected))] == status


def test_c3_without_a_given_admin_key_only_the_stored_one_is_accepted(module_gateway) -> None:
    stored = (module_gateway.state_dir / "admin-key").read_text()
    key = module_gateway.create_key()
    for method, path, status in ADMIN_PLANE:
        given = request_with_key(module_gateway, method, path, stored)
        assert given.status_code == status, (method, path)
        for secret in (None, key["secret"], JOIN_TOKEN):
            refused = request_with_key(module_gateway, method, path, secret)
            assert refused.status_code == 401, (method, path)
            words = "A valid admin key is required"
            assert refused.json()["error"]["message"].startswith(words)


def test_head_answers_as_get_without_a_body(gateway_with_keys, secrets) -> None:
    headers = {"authorization": f"Bearer {secrets['admin']}"}
    with httpx.Client(base_url=gateway_with_keys.url, headers=headers, timeout=30) as client:
        for path in ("/livez", "/openapi.json", "/v1/models", "/admin/v1/keys", "/v1/status"):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
        # Of a stream it ends with the head, and the connection serves the next request.
        events = client.head("/v1/status/events")
        assert events.headers["content-type"].startswith("text/event-stream")
        assert client.get("/livez").text == "alive\n"


def test_no_module_reads_url_path_which_a_host_header_can_change() -> None:
    """S02 (CVE-2026-49468): the gateway reads only the raw path."""
    for file in (ROOT / "gateway").rglob("*.py"):
        assert ".url.path" not in file.read_text(), file
