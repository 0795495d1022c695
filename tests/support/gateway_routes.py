"""The routes that are really there, and those of them that are open to everybody."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from gateway.app import AdminApp, GatewayApp
from tests.support.page_files import page_files


def page_routes(page: str) -> set[tuple[str, str]]:
    """Name the routes of a page."""
    names = {file.name for file in page_files(page)} - {"index.html"}
    return {("GET", f"/{page}")} | {("GET", f"/{page}/page/{name}") for name in names}


PROBES = {("GET", path) for path in ("/livez", "/readyz", "/health", "/metrics")}
"""For load balancers and Prometheus; they tell no secret."""
OPENAPI_ROUTE = ("GET", "/openapi.json")
"""For who writes a client; each port tells of itself."""
ADMIN_PAGE = page_routes("admin")
PAGE = ADMIN_PAGE | page_routes("dashboard")
"""Pages for people; they tell nothing until a key is typed into them."""
PUBLIC = PROBES | PAGE | {OPENAPI_ROUTE}


def iter_routes(routes: list[BaseRoute]) -> Iterator[APIRoute]:
    """List what is really there; a kind of route that is not known here is a fault."""
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from iter_routes(router.routes)
        else:
            assert isinstance(route, APIRoute), f"{route} serves something else"
            yield route


def route_paths(app: GatewayApp | AdminApp) -> set[tuple[str, str]]:
    """Name the routes that the gateway itself answers at a door; it relays the others."""
    return {
        (method, route.path)
        for route in iter_routes(app._fastapi.routes)
        for method in route.methods or ()
    }
