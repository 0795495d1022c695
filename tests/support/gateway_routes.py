"""The routes of the gateway, and the public ones among them."""

from starlette.routing import Route

from gateway.app import PortApp


def _readable(*paths: str) -> set[tuple[str, str]]:
    return {(method, path) for path in paths for method in ("GET", "HEAD")}


PROBES = {("GET", path) for path in ("/livez", "/readyz", "/health", "/metrics")}
"""For load balancers and Prometheus; they show no secret."""
OPENAPI_ROUTE = ("GET", "/openapi.json")
"""For authors of clients; each port describes its routes."""
DOCS = _readable("/docs", "/docs/{name:path}")
BOTH_PORTS = DOCS | _readable("/pages/{name:path}", "/favicon.ico") | {OPENAPI_ROUTE}
"""Each port describes its own routes."""
ADMIN_PAGE = _readable("/admin") | (BOTH_PORTS - {OPENAPI_ROUTE})
PAGE = ADMIN_PAGE | _readable("/", "/dashboard", "/try")
"""Pages for people; they show no data without a key."""
PAIRING = {
    ("POST", "/admin/v1/pairing/exchange"),
    ("PUT", "/admin/v1/pairing/exchange/{proof}"),
}
"""For a Mac that has no key yet; it proves that it knows the code of an admin."""
PUBLIC = PROBES | PAGE | PAIRING | {OPENAPI_ROUTE}


def route_paths(app: PortApp) -> set[tuple[str, str]]:
    """Return the routes that an app of the gateway serves; fail on a route of an unknown kind."""
    found = set()
    for route in app._fastapi.routes:
        assert isinstance(route, Route), f"{route} is no route of one path"
        found |= {(method, route.path) for method in route.methods or ()}
    return found
