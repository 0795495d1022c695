"""The routes of the gateway, and the public ones among them."""

from starlette.routing import Route

from gateway.app import PortApp
from tests.support.page_files import FOLDERS, page_files, page_path


def page_routes(page: str) -> set[tuple[str, str]]:
    names = {file.name for file in page_files(page)} - {"index.html"}
    return _readable(page_path(page), *(f"/{page}/page/{name}" for name in names))


def _readable(*paths: str) -> set[tuple[str, str]]:
    return {(method, path) for path in paths for method in ("GET", "HEAD")}


PROBES = {("GET", path) for path in ("/livez", "/readyz", "/health", "/metrics")}
"""For load balancers and Prometheus; they show no secret."""
OPENAPI_ROUTE = ("GET", "/openapi.json")
"""For authors of clients; each port describes its routes."""
_SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
BOTH_PORTS = (
    page_routes("docs")
    | _readable("/favicon.ico", *(f"/docs/page/{name}" for name in _SWAGGER_FILES))
    | {OPENAPI_ROUTE}
)
"""Each port describes its own routes."""
ADMIN_PAGE = page_routes("admin") | (BOTH_PORTS - {OPENAPI_ROUTE})
PAGE = ADMIN_PAGE.union(*map(page_routes, FOLDERS))
"""Pages for people; they show no data without a key."""
PUBLIC = PROBES | PAGE | {OPENAPI_ROUTE}


def route_paths(app: PortApp) -> set[tuple[str, str]]:
    """Return the routes that an app of the gateway serves; fail on a route of an unknown kind."""
    found = set()
    for route in app._fastapi.routes:
        assert isinstance(route, Route), f"{route} is no route of one path"
        found |= {(method, route.path) for method in route.methods or ()}
    return found
