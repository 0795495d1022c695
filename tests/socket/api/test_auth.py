"""Who may use which route: every one of them, by every kind of key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.app import create_app
from gateway.config.settings import Settings
from gateway.protocols import WIRE_FORMATS
from tests.support.gateway_routes import ADMIN_PAGE, OPENAPI_ROUTE, PUBLIC, route_paths
from tests.support.running_gateway import RunningGateway, chat_body, make_settings
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker

ROOT = Path(__file__).parents[3]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
WORKER = "/admin/v1/workers/fake-a"
DATA_PLANE = (
    ("POST", "/v1/chat/completions", 200),
    ("POST", "/v1/completions", 400),
    ("POST", "/v1/route/explain", 200),
    ("GET", "/v1/models", 200),
    ("GET", "/v1/models/demo", 200),
    ("GET", "/v1/status", 200),
)
ADMIN_PLANE = (
    ("GET", "/admin/v1/workers", 200),
    ("PUT", f"{WORKER}/cordon", 200),
    ("DELETE", f"{WORKER}/cordon", 204),
    ("POST", f"{WORKER}/drain", 200),
    ("GET", "/admin/v1/keys", 200),
    ("POST", "/admin/v1/keys", 400),
    ("GET", "/admin/v1/keys/key-000000000000", 404),
    ("PATCH", "/admin/v1/keys/key-000000000000", 404),
    ("DELETE", "/admin/v1/keys/key-000000000000", 404),
    ("GET", "/admin/v1/usage", 200),
    ("GET", "/admin/v1/policy", 200),
    ("PUT", "/admin/v1/policy", 428),
    ("PATCH", "/admin/v1/policy", 428),
    ("POST", "/admin/v1/policy/rollback", 428),
    ("POST", "/admin/v1/policy/validate", 200),
    ("POST", "/admin/v1/policy/diff", 400),
    ("GET", "/admin/v1/policy/history", 200),
    ("GET", "/admin/v1/policy/history/1", 200),
)
JOINING = (
    ("PUT", WORKER, 400),
    ("GET", f"{WORKER}/joined", 200),
    ("DELETE", f"{WORKER}-that-left", 204),
)


def every_route(state_dir: Path) -> set[tuple[str, str]]:
    app = asyncio.run(create_app(make_settings(state_dir)))
    return route_paths(app) | {("POST", path) for path in WIRE_FORMATS}


@pytest.fixture
def gateway_with_keys(tmp_path: Path, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    """A gateway with every kind of key."""
    with RunningGateway(settings_with_keys(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        yield gateway


def settings_with_keys(state_dir: Path, **changes: Any) -> Settings:
    keys = {"api_key": SecretStr("static-key"), "admin_key": SecretStr("admin-key")}
    return make_settings(state_dir, **keys, **changes)


def asked(gateway: RunningGateway, method: str, path: str, secret: str | None) -> httpx.Response:
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    body = chat_body() if "chat" in path or "explain" in path else {}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=30) as client:
        return client.request(method, path, json=body if method != "GET" else None)


@pytest.mark.parametrize("admin_port", [None, 0], ids=["one port", "a port for admins"])
def test_every_route_is_public_by_list_or_wants_a_key(
    tmp_path: Path, worker: ScriptedWorker, admin_port: int | None
) -> None:
    """S11, S17, S52 (CVE-2026-12795, CVE-2025-62727, vllm-mlx #68): no route was forgotten, with
    whatever method and on whichever port, and none hands out files."""
    settings = settings_with_keys(tmp_path, admin_port=admin_port)
    app = asyncio.run(create_app(settings))
    every = every_route(tmp_path)
    assert len(every) > 12
    assert every > PUBLIC
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        doors = {gateway.url: route_paths(app) | {("POST", path) for path in WIRE_FORMATS}}
        if app.admin_app is not None:
            doors[gateway.admin_url] = route_paths(app.admin_app)
        assert set().union(*doors.values()) == every
        for url, here in doors.items():
            with httpx.Client(base_url=url, timeout=30) as client:
                for path in {path for _, path in every}:
                    found = {method: client.request(method, path) for method in METHODS}
                    for method, response in found.items():
                        asked_for = f"{method} {path}: {response.text}"
                        assert response.status_code == expected(method, path, here), asked_for
                        if response.status_code == 405:
                            methods = {one for one, where in here if where == path}
                            assert response.headers["allow"] == ", ".join(sorted(methods))
                        if response.status_code == 401:
                            assert response.json()["error"]["code"] == "invalid_api_key"
                            assert response.headers["www-authenticate"] == "Bearer"


def expected(method: str, path: str, here: set[tuple[str, str]]) -> int:
    """Tell what must come where nobody shows a key."""
    if (method, path) in here:
        return 200 if (method, path) in PUBLIC else 401
    return 405 if path in {path for _, path in here} else 404


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1/models/..%2f..%2fadmin/v1/keys", "/admin/v1/keys/", "/ADMIN/v1/keys"),
        *("/admin/v1/keys;x", "/v1/../admin/v1/keys", "/admin/v1/keys%00", "/openapi.json/"),
        *("/v1/chat/completions/", "/docs", "/tokenize", "/invocations", "/pause"),
    ],
)
def test_no_other_spelling_of_a_path_opens_anything(
    gateway_with_keys: RunningGateway, path: str
) -> None:
    """S01, S02, S03, S51 (CVE-2026-48710, CVE-2026-49468, CVE-2026-48746): the raw path decides,
    and there are no side doors."""
    url = httpx.URL(gateway_with_keys.url).copy_with(raw_path=path.encode())
    for method in ("GET", "POST"):
        assert httpx.request(method, url).status_code in {401, 404, 405}


def test_the_lists_below_name_every_route(tmp_path: Path) -> None:
    named = {
        (method, path.replace("key-000000000000", "{name}").replace("fake-a", "{worker_id}"))
        for method, path, _ in (*DATA_PLANE, *ADMIN_PLANE)
    }
    named -= {("GET", "/v1/models/demo"), ("GET", "/admin/v1/policy/history/1")}
    named |= {("GET", "/v1/models/{name:path}"), ("GET", "/admin/v1/policy/history/{number}")}
    named |= PUBLIC
    named |= {
        ("PUT", "/admin/v1/workers/{worker_id}"),
        ("DELETE", "/admin/v1/workers/{worker_id}"),
        ("GET", "/admin/v1/workers/{worker_id}/joined"),
    }
    named.add(("GET", "/v1/status/events"))  # it has no end; its own tests show it keys
    assert named == every_route(tmp_path)


def test_where_admins_have_a_port_what_only_they_may_do_is_there_and_nowhere_else(
    tmp_path: Path,
) -> None:
    apart = asyncio.run(create_app(make_settings(tmp_path, admin_port=0)))
    assert apart.admin_app is not None
    here, there = route_paths(apart), route_paths(apart.admin_app)
    assert here & there == {OPENAPI_ROUTE}, "each tells of itself"
    assert here | there | {("POST", path) for path in WIRE_FORMATS} == every_route(tmp_path)
    assert len(there) == len(ADMIN_PLANE) + len(ADMIN_PAGE) + 1


@pytest.mark.parametrize(("method", "path", "status"), [*DATA_PLANE, *ADMIN_PLANE, *JOINING])
def test_each_kind_of_key_opens_its_own_routes_and_no_other(
    gateway_with_keys: RunningGateway, method: str, path: str, status: int
) -> None:
    """S08, S10 (CVE-2026-42271, CVE-2026-47101): roles by routes, and denied by default."""
    made = gateway_with_keys.create_key(name="made")
    gone = gateway_with_keys.create_key(name="gone")
    gateway_with_keys.admin.delete(f"/admin/v1/keys/{gone['id']}")
    secrets = {
        "static": "static-key",
        "made": made["secret"],
        "revoked": gone["secret"],
        "id": made["id"],
        "admin": "admin-key",
        "join": JOIN_TOKEN,
    }
    opened = {
        kind
        for kind, secret in secrets.items()
        if asked(gateway_with_keys, method, path, secret).status_code != 401
    }
    right = (
        {"static", "made"}
        if (method, path, status) in DATA_PLANE
        else {"admin"}
        if (method, path, status) in ADMIN_PLANE
        else {"join"}
    )
    assert opened == right
    assert asked(gateway_with_keys, method, path, secrets[next(iter(right))]).status_code == status


@pytest.mark.parametrize(("method", "path", "status"), ADMIN_PLANE)
def test_without_an_admin_key_this_machine_needs_none_but_another_kind_opens_nothing(
    gateway_with_worker: RunningGateway, method: str, path: str, status: int
) -> None:
    made = gateway_with_worker.create_key()
    assert asked(gateway_with_worker, method, path, None).status_code == status
    assert asked(gateway_with_worker, method, path, made["secret"]).status_code == 401
    assert asked(gateway_with_worker, method, path, JOIN_TOKEN).status_code == 401


def test_where_nobody_needs_a_key_the_planes_are_apart_all_the_same(
    gateway_with_worker: RunningGateway,
) -> None:
    assert asked(gateway_with_worker, "GET", "/v1/models", None).status_code == 200
    beat: dict[str, Any] = {}
    assert gateway_with_worker.client.put(WORKER, json=beat).status_code == 401
    assert asked(gateway_with_worker, "GET", f"{WORKER}/joined", None).status_code == 401


def test_no_answer_invites_a_page_of_another_site(gateway_with_keys: RunningGateway) -> None:
    """S22: no CORS, on the admin plane neither."""
    headers = {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    for path in ("/v1/chat/completions", "/admin/v1/keys"):
        response = httpx.options(f"{gateway_with_keys.url}{path}", headers=headers)
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.status_code in {401, 405}


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1"])
def test_a_form_on_another_page_makes_no_key(
    gateway_with_worker: RunningGateway, origin: str
) -> None:
    """S22: a browser sends such a form from this machine, and asks nobody before."""
    headers = {"origin": origin, "content-type": "text/plain"}
    sent = gateway_with_worker.admin.post(
        "/admin/v1/keys", content=b'{"name": "drive-by"}', headers=headers
    )
    assert (sent.status_code, sent.json()["error"]["code"]) == (403, "permission_denied")
    assert gateway_with_worker.admin.get("/admin/v1/keys").json() == {"keys": []}
    own = gateway_with_worker.admin.post(
        "/admin/v1/keys", json={"name": "own"}, headers={"origin": gateway_with_worker.url}
    )
    assert own.status_code == 201, "a page that the gateway itself serves"


def test_no_decision_is_made_on_a_path_that_a_host_header_can_shift() -> None:
    """S02 (CVE-2026-49468): such a path is never looked at."""
    for file in (ROOT / "gateway").rglob("*.py"):
        assert ".url.path" not in file.read_text(), file


def test_a_worker_that_nobody_knows_has_not_joined(gateway_with_keys: RunningGateway) -> None:
    response = asked(gateway_with_keys, "GET", "/admin/v1/workers/nobody/joined", JOIN_TOKEN)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "worker_not_found")
