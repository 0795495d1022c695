"""The pages of the gateway, and the navigation that they share.

The pages need no key because they hold no secret: they fetch their data with the key that the user
enters. Each file has a route of its own, so that no path of a client can select another file.
"""

from __future__ import annotations

import functools
import hashlib
import html
from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.openapi import OpenApiDocument

VERSION = version("paceline")
_Serve = Callable[[Request], Awaitable[Response]]
_PAGES = Path(__file__).parents[1] / "pages"
_KINDS = {
    "": "text/plain; charset=utf-8",  # a licence
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".ico": "image/vnd.microsoft.icon",
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
# Swagger UI is a script of others, and the other pages store keys in the tab. A sandbox gives the
# page an origin of its own, from which no script reads them; its files then cross an origin.
_DOCS_HEADERS = {
    **_HEADERS,
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; sandbox allow-scripts"
    ),
    "cross-origin-resource-policy": "cross-origin",
}
# Browsers refuse to show a sandboxed page that asks for an opener policy.
del _DOCS_HEADERS["cross-origin-opener-policy"]
_NAVIGATION_MARK = b"<!-- navigation -->"
_OPENAPI_MARK = b"<!-- openapi -->"
_LINKS = (
    ("Live", "/dashboard"),
    ("Try it", "/try"),
    ("Models", "/#models"),
    ("Workers", "/admin#workers"),
    ("Keys", "/admin#keys"),
    ("Policy", "/admin#policy"),
    ("Docs", "/docs"),
)
"""The navigation; a page shows the links to the pages that its port serves."""


class Page(NamedTuple):
    """A page: its path, and the folders of its files beside the shared ones."""

    path: str
    folders: tuple[str, ...]
    sandboxed: bool = False

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the page and its files."""
        return _DOCS_HEADERS if self.sandboxed else _HEADERS

    @property
    def files_path(self) -> str:
        """The path under which the files of the page are served."""
        return f"{self.path if self.path != '/' else '/start'}/page"


START = Page("/", ("start",))
DASHBOARD = Page("/dashboard", ("dashboard", "vendor/uplot"))
TRY = Page("/try", ("try",))
ADMIN = Page("/admin", ("admin",))
DOCS = Page("/docs", ("docs",), sandboxed=True)
_SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")


@functools.cache
def page_router(*pages: Page) -> APIRouter:
    """Return a route for each file of these pages, which are all pages of one port."""
    router = APIRouter()

    def add(path: str, serve: _Serve) -> None:
        # Not a route of FastAPI, which takes 3 ms to build. It answers HEAD too: Claude Code asks
        # for the head of the start page before anything else.
        router.add_route(path, serve, methods=["GET"], include_in_schema=False)

    paths = [page.path for page in pages]
    for page in pages:
        files = _files_of(page)
        text = files.pop("index.html").replace(_NAVIGATION_MARK, _navigation(page, paths))
        if page == DOCS:
            add(page.path, _serving_docs(text))
        else:
            serve = _serving(text, _KINDS[".html"], page.headers)
            add(page.path, _for_browsers(serve, paths) if page == START else serve)
        for name, content in files.items():
            kind = _KINDS[Path(name).suffix]
            add(f"{page.files_path}/{name}", _serving(content, kind, page.headers))
    icon = (_PAGES / "favicon.ico").read_bytes()
    add("/favicon.ico", _serving(icon, _KINDS[".ico"], _HEADERS))
    return router


def _files_of(page: Page) -> dict[str, bytes]:
    """Read the files of a page by their names."""
    folders = [_PAGES / folder for folder in ("shared", *page.folders)]
    files = [file for folder in folders for file in sorted(folder.iterdir())]
    contents = {file.name: file.read_bytes() for file in files}
    if page == DOCS:
        swagger = resources.files("fastapi_offline") / "static"
        contents |= {name: (swagger / name).read_bytes() for name in _SWAGGER_FILES}
    return contents


def _navigation(page: Page, paths: Collection[str]) -> bytes:
    """Return the name of the gateway and the links to the pages of this port."""
    home = "/" if "/" in paths else next(iter(paths))
    links = [
        f'<a href="{target}"{_current(target, page)}>{name}</a>'
        for name, target in _LINKS
        if target.partition("#")[0] in paths
    ]
    text = (
        f'<a class="brand" href="{home}"{_current(home, page)}>'
        f'<img src="{page.files_path}/icon.svg" alt="" width="26" height="26">Paceline '
        f'<span class="version">{html.escape(VERSION)}</span></a>\n'
        f'<nav aria-label="Pages" id="navigation">{"".join(links)}</nav>'
    )
    return text.encode()


def _current(target: str, page: Page) -> str:
    return ' aria-current="page"' if target == page.path else ""


def _for_browsers(serve: _Serve, paths: Collection[str]) -> _Serve:
    """Serve the start page to browsers, and to other clients JSON that names the pages."""

    async def negotiate(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            response = await serve(request)
        else:
            gateway = request.app.state.gateway
            content = {
                "name": "Paceline",
                "version": VERSION,
                "base_path": "/v1",
                "key_required": gateway.api_keys.required,
                "openapi": "/openapi.json",
                "pages": paths,
            }
            headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
            response = Response(to_json(content), media_type="application/json", headers=headers)
        response.headers["vary"] = "accept"
        return response

    return negotiate


def _serving_docs(text: bytes) -> _Serve:
    """Serve the API reference with the document of its port in it: it may fetch nothing."""

    async def serve(request: Request) -> Response:
        document: OpenApiDocument = request.app.state.openapi
        # Text of the document cannot end the element that holds it.
        data = (await document.read()).replace(b"<", b"\\u003c")
        filled = text.replace(_OPENAPI_MARK, data)
        return Response(filled, headers={**_DOCS_HEADERS, "content-type": _KINDS[".html"]})

    return serve


def _serving(content: bytes, kind: str, page_headers: Mapping[str, str]) -> _Serve:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**page_headers, "etag": etag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": kind})

    return serve
