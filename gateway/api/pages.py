"""`/admin` and `/dashboard`: the pages of the gateway.

They are open to all, since they hold no secret: what they show they ask for with the key that is
typed into them. Each file has a route of its own, so that no path that somebody sends leads to one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_PAGES = Path(__file__).parents[1] / "pages"
_KINDS = {
    "": "text/plain; charset=utf-8",  # a licence
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        # No text that comes from elsewhere is ever read as HTML.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def admin_page() -> APIRouter:
    """Hold the page for admins."""
    return _page("/admin", "admin")


def dashboard() -> APIRouter:
    """Hold the page for those who want to see what the fleet does."""
    return _page("/dashboard", "dashboard", "vendor/uplot")


def _page(at: str, *folders: str) -> APIRouter:
    """Hold a route for each file of a page, read once; what pages share lies beside each."""
    router = APIRouter()
    files = [file for folder in ("shared", *folders) for file in (_PAGES / folder).iterdir()]
    for file in sorted(files):
        path = at if file.name == "index.html" else f"{at}/page/{file.name}"
        serve = _serving(file.read_bytes(), _KINDS[file.suffix])
        router.add_api_route(path, serve, methods=["GET"], include_in_schema=False)
    return router


def _serving(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": etag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": kind})

    return serve
