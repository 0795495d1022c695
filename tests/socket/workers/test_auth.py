"""The join token protects every route but /livez."""

from __future__ import annotations

import httpx
import pytest
from fastapi.routing import APIRoute

from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker
from workers.server.app import create_app, router

PUBLIC = {"/livez"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b"Bearer wrong"},
        {b"authorization": b"Bearer \xe9\x80"},
        {b"authorization": b"Basic right"},
        {b"authorization": b"right"},
    ],
)
async def test_every_route_but_livez_requires_the_token(headers: dict[bytes, bytes]) -> None:
    worker = make_worker(ScriptedEngine())
    all_routes = [*router.routes, *create_app(worker, None).routes]
    routes = [route for route in all_routes if isinstance(route, APIRoute)]
    assert len(routes) > 6
    async with (
        serve_worker(worker, token="right") as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client,
    ):
        for route in routes:
            for method in route.methods or ():
                response = await client.request(method, route.path)
                expected = 200 if route.path in PUBLIC else 401
                assert response.status_code == expected, route.path
        unknown = await client.get("/v1/nothing")
    assert (unknown.status_code, unknown.headers["www-authenticate"]) == (401, "Bearer")
    assert unknown.json()["error"]["type"] == "authentication_error"


async def test_the_right_token_authorizes_a_request() -> None:
    headers = {"authorization": "Bearer right"}
    async with (
        serve_worker(make_worker(ScriptedEngine()), token="right") as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client,
    ):
        assert (await client.get("/v1/status")).status_code == 200


async def test_a_path_in_the_host_header_grants_no_access() -> None:
    async with (
        serve_worker(make_worker(ScriptedEngine()), token="right") as url,
        httpx.AsyncClient(base_url=url, headers={"host": "x/livez?"}, timeout=60) as client,
    ):
        assert (await client.get("/v1/status")).status_code == 401
