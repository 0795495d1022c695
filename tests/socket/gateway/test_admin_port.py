"""The admin port: it serves the admin routes, and the data port no longer does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.cli import main
from gateway.errors import StartupError
from gateway.server import serve
from tests.support.policies import ROUTES, PolicyAdmin, single_pool_policy
from tests.support.running_gateway import RunningGateway, chat_body, make_settings, status_and_code
from tests.support.scripted_worker import ScriptedWorker
from workers.lifecycle import Shutdown


@pytest.fixture
def split_gateway(tmp_path: Path, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    """Return a gateway with an admin port and one joined worker."""
    with RunningGateway(make_settings(tmp_path, admin_port=0)) as gateway:
        gateway.join(worker)
        yield gateway


def test_policy_routes_are_only_on_the_admin_port(split_gateway: RunningGateway) -> None:
    with (
        PolicyAdmin(split_gateway.url, split_gateway.admin_key) as data_client,
        PolicyAdmin(split_gateway.admin_url, split_gateway.admin_key) as admin,
    ):
        for method, path in ROUTES:
            assert status_and_code(data_client.request(method, path)) == (404, "path_not_found")
            assert admin.request(method, path).status_code != 404
        assert admin.put(single_pool_policy("moved")).status_code == 200
    assert split_gateway.chat().headers["x-paceline-pool"] == "moved"


def test_keys_created_on_the_admin_port_authorize_the_data_port(
    split_gateway: RunningGateway,
) -> None:
    rejected = split_gateway.client.post("/admin/v1/keys", json={"name": "ann"})
    assert status_and_code(rejected) == (404, "path_not_found")
    created = split_gateway.create_key()
    assert status_and_code(split_gateway.client.get("/v1/models")) == (401, "invalid_api_key")
    split_gateway.use_key(created["secret"])
    assert split_gateway.chat().status_code == 200
    for path in ("/admin/v1/usage", "/admin/v1/workers", "/admin", "/admin/page/main.js"):
        assert status_and_code(split_gateway.client.get(path)) == (404, "path_not_found")
        assert split_gateway.admin.get(path).status_code == 200


def test_the_admin_port_serves_only_admin_routes(split_gateway: RunningGateway) -> None:
    headers = split_gateway.admin.headers
    with httpx.Client(base_url=split_gateway.admin_url, headers=headers, timeout=60) as client:
        for path in ("/v1/models", "/v1/status", "/metrics", "/livez", "/v1/route/explain"):
            assert status_and_code(client.get(path)) == (404, "path_not_found")
        response = client.post("/v1/chat/completions", json=chat_body())
        assert status_and_code(response) == (404, "path_not_found")
        assert [
            entry["worker_id"] for entry in client.get("/admin/v1/workers").json()["workers"]
        ] == ["fake-a"]


def test_the_admin_port_rejects_unknown_hosts(split_gateway: RunningGateway) -> None:
    response = httpx.get(
        f"{split_gateway.admin_url}/admin/v1/policy",
        headers={"host": "evil.example"},
        timeout=60,
    )
    assert status_and_code(response) == (421, "host_not_allowed")


def test_the_admin_port_rejects_oversized_headers(split_gateway: RunningGateway) -> None:
    url = httpx.URL(split_gateway.admin_url)
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.settimeout(10)
        connection.sendall(b"GET /admin/v1/policy HTTP/1.1\r\nx: " + b"a" * 70_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")


def test_commands_use_the_gateways_settings_to_find_its_ports(
    split_gateway: RunningGateway,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PACELINE_PORT", str(httpx.URL(split_gateway.url).port))
    monkeypatch.setenv("PACELINE_HOST", "0.0.0.0")
    Path("paceline.yaml").write_text(f"admin_port: {httpx.URL(split_gateway.admin_url).port}\n")
    for command in ("policy show", "policy history", "keys list", "status --json"):
        assert main(command.split()) == 0, command
    assert '"workers"' in capsys.readouterr().out
    with pytest.raises(SystemExit, match="This path does not exist"):
        main(["policy", "show", "--url", split_gateway.url])
    monkeypatch.setenv("PACELINE_ADMIN_PORT", "0")
    with pytest.raises(SystemExit, match="name it with --url"):
        main(["keys", "list"])
    monkeypatch.setenv("PACELINE_ADMIN_PORT", "many")
    assert main(["keys", "list"]) == 2
    assert "PACELINE_ADMIN_PORT" in capsys.readouterr().err


def test_an_admin_port_beyond_loopback_requires_the_stored_admin_key(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, admin_port=0, admin_host="0.0.0.0")
    with RunningGateway(settings) as gateway:
        assert gateway.admin_url.startswith("http://0.0.0.0:")
        rejected = httpx.get(f"{gateway.admin_url}/admin/v1/keys", timeout=60)
        assert status_and_code(rejected) == (401, "invalid_api_key")
        assert gateway.admin.get("/admin/v1/keys").status_code == 200


async def test_an_occupied_admin_port_fails_the_start_with_one_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = make_settings(tmp_path, admin_port=port)
        with pytest.raises(
            StartupError, match=rf"Cannot listen on 127\.0\.0\.1 port {port}.*PACELINE_ADMIN_PORT"
        ):
            await serve(settings, shutdown=Shutdown())
