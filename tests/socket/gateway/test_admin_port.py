"""The admin port: it serves the admin routes, and the data port no longer does."""

import socket
from pathlib import Path

import httpx
import pytest

from gateway.cli import main
from tests.support.gateway_fixtures import MakeGateway
from tests.support.policies import PolicyAdmin, single_pool_policy
from tests.support.running_gateway import RunningGateway, make_settings, status_and_code
from tests.support.scripted_worker import ScriptedWorker


@pytest.fixture
def split_gateway(make_gateway: MakeGateway, worker: ScriptedWorker) -> RunningGateway:
    return make_gateway(worker, admin_port=0)


def test_keys_and_policies_of_the_admin_port_apply_to_the_data_port(split_gateway) -> None:
    rejected = split_gateway.client.post("/admin/v1/keys", json={"name": "ann"})
    assert status_and_code(rejected) == (404, "path_not_found")
    split_gateway.use_new_key()
    with PolicyAdmin(split_gateway.admin_url, split_gateway.admin_key) as admin:
        assert admin.put(single_pool_policy("moved")).status_code == 200
    assert split_gateway.chat().headers["x-paceline-pool"] == "moved"
    no_key = {"authorization": ""}
    assert status_and_code(split_gateway.chat(headers=no_key)) == (401, "invalid_api_key")


def test_the_admin_port_rejects_unknown_hosts_and_oversized_headers(split_gateway) -> None:
    response = split_gateway.admin.get("/admin/v1/policy", headers={"host": "evil.example"})
    assert status_and_code(response) == (421, "host_not_allowed")
    url = httpx.URL(split_gateway.admin_url)
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.settimeout(10)
        connection.sendall(b"GET /admin/v1/policy HTTP/1.1\r\nx: " + b"a" * 70_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")


def test_commands_use_the_gateways_settings_to_find_its_ports(
    split_gateway, monkeypatch, capsys
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
    with pytest.raises(SystemExit, match="name its address with --url"):
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
