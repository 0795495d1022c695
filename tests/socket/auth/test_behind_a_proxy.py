"""A gateway behind a real nginx on the same machine, as its operators set one up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.socket.api.test_auth import ADMIN_PLANE
from tests.support.compose_stack import free_port
from tests.support.nginx import nginx_process, require_nginx
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    status_and_code,
)

PATH = "/v1/chat/completions"
PLAIN = "location / { proxy_pass http://127.0.0.1:8000; }"
OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def documented_location() -> str:
    """Return the location that the page for operators recommends."""
    (location,) = re.findall(r"```nginx\n(.*?)```", OPERATIONS.read_text(), re.DOTALL)
    return str(location)


@pytest.fixture(params=[PLAIN, documented_location()], ids=["plain", "documented"])
def proxied(
    request: pytest.FixtureRequest, gateway_with_worker: RunningGateway, tmp_path: Path
) -> Iterator[httpx.Client]:
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


def test_c3_admin_routes_behind_a_proxy_need_the_stored_admin_key(
    proxied: httpx.Client, gateway_with_worker: RunningGateway
) -> None:
    """CVE-2026-12773: routes that create keys without authentication."""
    for method, path, _ in ADMIN_PLANE:
        response = proxied.request(method, path, json=None if method == "GET" else {})
        assert status_and_code(response) == (401, "invalid_api_key"), path
    assert gateway_with_worker.admin.get("/admin/v1/keys").json() == {"keys": [], "required": False}
    admin = {"authorization": f"Bearer {gateway_with_worker.admin_key}"}
    assert proxied.get("/admin/v1/keys", headers=admin).status_code == 200


def test_c3_a_chat_passes_a_proxy_and_needs_a_key_once_there_is_one(
    proxied: httpx.Client, gateway_with_worker: RunningGateway
) -> None:
    assert proxied.post(PATH, json=chat_body()).status_code == 200
    key = bearer_headers(gateway_with_worker.create_key())
    assert status_and_code(proxied.post(PATH, json=chat_body())) == (401, "invalid_api_key")
    assert proxied.post(PATH, json=chat_body(), headers=key).status_code == 200
    stream = proxied.post(PATH, json=chat_body(stream=True), headers=key)
    assert stream.text.endswith("data: [DONE]\n\n")
