"""The routes of the gateway, and the public ones among them."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from gateway.app import PortApp
from tests.support.page_files import FOLDERS, page_files, page_path


def page_routes(page: str) -> set[tuple[str, str]]:
    """Return the routes of a page."""
    names = {file.name for file in page_files(page)} - {"index.html"}
    return {("GET", page_path(page))} | {("GET", f"/{page}/page/{name}") for name in names}


PROBES = {("GET", path) for path in ("/livez", "/readyz", "/health", "/metrics")}
"""For load balancers and Prometheus; they show no secret."""
OPENAPI_ROUTE = ("GET", "/openapi.json")
"""For authors of clients; each port describes its routes."""
_SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
BOTH_PORTS = (
    page_routes("docs")
    | {("GET", f"/docs/page/{name}") for name in _SWAGGER_FILES}
    | {OPENAPI_ROUTE, ("GET", "/favicon.ico")}
)
"""Each port describes its own routes."""
ADMIN_PAGE = page_routes("admin") | (BOTH_PORTS - {OPENAPI_ROUTE})
PAGE = ADMIN_PAGE.union(*map(page_routes, FOLDERS), {("HEAD", "/")})
"""Pages for people; they show no data without a key."""
PUBLIC = PROBES | PAGE | {OPENAPI_ROUTE}


def iter_routes(routes: list[BaseRoute]) -> Iterator[APIRoute]:
    """Yield the API routes; fail on a route of an unknown kind."""
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from iter_routes(router.routes)
        else:
            assert isinstance(route, APIRoute), f"{route} is no API route"
            yield route


def route_paths(app: PortApp) -> set[tuple[str, str]]:
    """Return the routes that an app of the gateway serves."""
    return {
        (method, route.path)
        for route in iter_routes(app._fastapi.routes)
        for method in route.methods or ()
    }
