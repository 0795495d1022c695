"""The join token protects every route but /livez."""

import pytest
from fastapi.routing import APIRoute

from tests.support.scripted_engine import ScriptedEngine, make_worker, worker_client
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
    engine = ScriptedEngine()
    all_routes = [*router.routes, *create_app(make_worker(engine), None).routes]
    routes = [route for route in all_routes if isinstance(route, APIRoute)]
    assert len(routes) > 6
    async with worker_client(engine, "right", headers=headers) as client:
        for route in routes:
            for method in route.methods or ():
                response = await client.request(method, route.path)
                expected = 200 if route.path in PUBLIC else 401
                assert response.status_code == expected, route.path
        unknown = await client.get("/v1/nothing")
    assert (unknown.status_code, unknown.headers["www-authenticate"]) == (401, "Bearer")
    assert unknown.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("headers", "status"), [({"authorization": "Bearer right"}, 200), ({"host": "x/livez?"}, 401)]
)
async def test_the_right_token_authorizes_a_request_and_a_path_in_the_host_header_does_not(
    headers: dict[str, str], status: int
) -> None:
    async with worker_client(ScriptedEngine(), "right", headers=headers) as client:
        assert (await client.get("/v1/status")).status_code == status
