"""`/admin`: the page for admins.

It is open to all, since it holds no secret: what it shows it asks for with the key that is typed
into it. Each file has a route of its own, so that no path that somebody sends leads to a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "pages" / "admin"
_KINDS = {
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


def page() -> APIRouter:
    """Hold a route for each file of the page, read once."""
    router = APIRouter()
    for file in sorted(_FOLDER.iterdir()):
        path = "/admin" if file.name == "index.html" else f"/admin/page/{file.name}"
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
