"""A gateway behind a real nginx or Caddy on its machine, as its operators set one up."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.socket.api.test_auth import ADMIN_PLANE
from tests.support.compose_stack import answers
from tests.support.nginx import nginx_process, require_nginx
from tests.support.redis_server import free_port
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE

PATH = "/v1/chat/completions"
PLAIN = "location / { proxy_pass http://127.0.0.1:8000; }"
SECURITY = Path(__file__).parents[3] / "docs" / "security.md"


def documented_location() -> str:
    """Return the location that the page for operators recommends."""
    (location,) = re.findall(r"```nginx\n(.*?)```", SECURITY.read_text(), re.DOTALL)
    return str(location)


@pytest.fixture(params=[PLAIN, documented_location()], ids=["plain", "documented"])
def proxied(request, gateway_with_worker, tmp_path) -> Iterator[httpx.Client]:
    """Yield a client of nginx in front of a gateway to which no key was given."""
    require_nginx()
    port = free_port()
    location = request.param.replace("http://127.0.0.1:8000", gateway_with_worker.url)
    folders = "".join(
        f"{name}_temp_path {tmp_path}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration = f"""
        daemon off; pid {tmp_path}/nginx.pid; error_log {tmp_path}/error.log; events {{}}
        http {{ access_log off; {folders} server {{ listen 127.0.0.1:{port}; {location} }} }}
    """
    with (
        nginx_process(configuration, tmp_path, port),
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"host": "llm.example"}, timeout=30
        ) as client,
    ):
        yield client


def check_keys(client: httpx.Client, gateway: RunningGateway) -> None:
    """Check that chats need a key once there is one, with streams, and admin routes their own."""
    assert status_and_code(client.get("/admin/v1/keys")) == (401, "invalid_api_key")
    admin = {"authorization": f"Bearer {gateway.admin_key}"}
    assert client.get("/admin/v1/keys", headers=admin).json() == {"keys": [], "required": False}
    assert client.post(PATH, json=chat_body()).status_code == 200
    key = bearer_headers(gateway.create_key())
    assert status_and_code(client.post(PATH, json=chat_body())) == (401, "invalid_api_key")
    assert client.post(PATH, json=chat_body(), headers=key).status_code == 200
    stream = client.post(PATH, json=chat_body(stream=True), headers=key)
    assert stream.content.endswith(DONE)


def test_c3_behind_a_proxy_admin_routes_need_their_key_and_chats_once_there_is_one(
    proxied: httpx.Client, gateway_with_worker: RunningGateway
) -> None:
    """CVE-2026-12773: routes that create keys without authentication."""
    for method, path, _ in ADMIN_PLANE:
        response = proxied.request(method, path, json=None if method == "GET" else {})
        assert status_and_code(response) == (401, "invalid_api_key"), path
    check_keys(proxied, gateway_with_worker)


def test_c3_caddy_passes_the_name_on_which_the_gateway_must_know(worker, tmp_path) -> None:
    """The documented block of a real Caddy, without its TLS, since no authority knows the name."""
    if not shutil.which("caddy"):
        pytest.skip("caddy is not installed")
    block = re.findall(r"```\n(llm.example.com \{.*?)```", SECURITY.read_text(), re.DOTALL)[0]
    port = free_port()
    settings = make_settings(tmp_path, allowed_hosts=("llm.example.com",))
    with RunningGateway(settings) as gateway:
        assert gateway.send_heartbeat(worker).is_success
        block = block.replace("llm.example.com", f"http://llm.example.com:{port}")
        file = tmp_path / "Caddyfile"
        file.write_text("{\nadmin off\n}\n" + block.replace("127.0.0.1:8000", gateway.url[7:]))
        home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        command = ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"]
        with subprocess.Popen(command, env=home, stderr=subprocess.DEVNULL) as caddy:
            try:
                wait_until(lambda: answers(port))
                url, host = f"http://127.0.0.1:{port}", {"host": f"llm.example.com:{port}"}
                with httpx.Client(base_url=url, headers=host, timeout=30) as client:
                    check_keys(client, gateway)
            finally:
                caddy.terminate()
