"""`/admin` and `/dashboard`: the pages of the gateway.

The pages need no key because they hold no secret: they fetch their data with the key that the user
enters. Each file has a route of its own, so that no path of a client can select another file.
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
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    # The browser never parses text from elsewhere as HTML.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_router(at: str, *folders: str) -> APIRouter:
    """Return a route for each file of a page and for each shared file; files are read once."""
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
