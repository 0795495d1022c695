"""The pages of the gateway: their layout and navigation, the guide, and the files that they load.

The pages need no key because they hold no secret: they fetch their data with the key that the user
enters. All files are read at the start, so no path of a client selects a file on the disk.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import html
from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from gateway.api import guide
from gateway.api.openapi import OpenApiDocument
from gateway.errors import PathUnknown

VERSION = version("paceline")
_Serve = Callable[[Request], Awaitable[Response]]
_FOLDER = Path(__file__).parents[1] / "pages"
_HTML = "text/html; charset=utf-8"
_KINDS = {
    "": "text/plain; charset=utf-8",  # a licence
    ".css": "text/css; charset=utf-8",
    ".ico": "image/vnd.microsoft.icon",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by suffix; other files are not served."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
)
_HEADERS = {
    # The browser never parses text from elsewhere as HTML.
    "content-security-policy": f"{_POLICY}connect-src 'self'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
# Swagger UI is a script of others, and the other pages store keys in the tab. A sandbox gives the
# page an origin of its own, from which no script reads them; its files then cross an origin.
_DOCS_HEADERS = {**_HEADERS, "content-security-policy": f"{_POLICY}sandbox allow-scripts"}
# Browsers refuse to show a sandboxed page that asks for an opener policy.
del _DOCS_HEADERS["cross-origin-opener-policy"]
_FILE_HEADERS = {**_HEADERS, "cross-origin-resource-policy": "cross-origin"}
_OPENAPI_MARK = b"<!-- openapi -->"
START, DASHBOARD, TRY, ADMIN, DOCS = "/", "/dashboard", "/try", "/admin", "/docs"
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


@functools.cache
def page_router(*paths: str) -> APIRouter:
    """Return the routes of the pages at these paths, which are all pages of one port."""
    router = APIRouter()

    def add(path: str, serve: _Serve) -> None:
        # Not a route of FastAPI, which takes 3 ms to build. It answers HEAD too: Claude Code asks
        # for the head of the start page before anything else.
        router.add_route(path, serve, methods=["GET"], include_in_schema=False)

    files = _files()

    async def serve_file(request: Request) -> Response:
        if (serve := files.get(request.path_params["name"])) is None:
            raise PathUnknown
        return await serve(request)

    for path in paths:
        text = _page(path, paths)
        if path == DOCS:
            add(path, _serving_docs(text))
            add(f"{path}/{{name:path}}", _serving_guide(paths))
        else:
            serve = _serving(text.encode(), _HTML, _HEADERS)
            add(path, _for_browsers(serve, paths) if path == START else serve)
    add("/pages/{name:path}", serve_file)
    add("/favicon.ico", files["favicon.ico"])
    return router


@functools.cache
def _files() -> Mapping[str, _Serve]:
    """Read the files that pages load, by their paths below the folder of all pages."""
    return {
        file.relative_to(_FOLDER).as_posix(): _serving(
            file.read_bytes(), _KINDS[file.suffix], _FILE_HEADERS
        )
        for file in _FOLDER.rglob("*")
        if file.is_file() and file.suffix in _KINDS
    }


def _page(path: str, paths: Collection[str], name: str = "index") -> str:
    """Return a page in the layout of all pages; its file begins with the end of its head."""
    text = (_FOLDER / (path.strip("/") or "start") / f"{name}.html").read_text()
    head, main, rest = text.partition("<main")
    page = (_FOLDER / "layout.html").read_text()
    marks = {"head": head.rstrip(), "navigation": _navigation(path, paths), "main": main + rest}
    return _fill(page, marks)


def _fill(page: str, contents: Mapping[str, str]) -> str:
    for mark, content in contents.items():
        page = page.replace(f"<!-- {mark} -->", content)
    return page


def _navigation(path: str, paths: Collection[str]) -> str:
    """Return the name of the gateway and the links to the pages of this port."""

    def current(target: str) -> str:
        return ' aria-current="page"' if target == path else ""

    home = START if START in paths else next(iter(paths))
    links = [
        f'<a href="{target}"{current(target)}>{name}</a>'
        for name, target in _LINKS
        if target.partition("#")[0] in paths
    ]
    return (
        f'<a class="brand" href="{home}"{current(home)}>'
        f'<img src="/pages/shared/icon.svg" alt="" width="26" height="26">Paceline '
        f'<span class="version">{html.escape(VERSION)}</span></a>\n'
        f'<nav aria-label="Pages" id="navigation">{"".join(links)}</nav>'
    )


def _for_browsers(serve: _Serve, paths: Collection[str]) -> _Serve:
    """Serve the start page to browsers, and to other clients JSON that names the pages."""

    async def negotiate(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            response = await serve(request)
        else:
            content = {
                "name": "Paceline",
                "version": VERSION,
                "base_path": "/v1",
                "key_required": request.app.state.gateway.api_keys.required,
                "openapi": "/openapi.json",
                "pages": paths,
            }
            headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
            response = Response(to_json(content), media_type="application/json", headers=headers)
        response.headers["vary"] = "accept"
        return response

    return negotiate


def _serving_guide(paths: Collection[str]) -> _Serve:
    """Serve a page of the guide, which is rendered when somebody reads it first."""
    frame = _page(DOCS, paths, "guide")

    @functools.cache
    def serving(name: str) -> _Serve:
        title, text = guide.render(name)
        links = guide.contents(DOCS, name)
        page = _fill(frame, {"title": html.escape(title), "contents": links, "text": text})
        return _serving(page.encode(), _HTML, _HEADERS)

    async def serve(request: Request) -> Response:
        if (name := request.path_params["name"]) not in guide.page_names():
            raise PathUnknown
        return await (await asyncio.to_thread(serving, name))(request)

    return serve


def _serving_docs(page: str) -> _Serve:
    """Serve the API reference with the document of its port in it: it may fetch nothing."""
    text = _fill(page, {"contents": guide.contents(DOCS, "")}).encode()

    async def serve(request: Request) -> Response:
        document: OpenApiDocument = request.app.state.openapi
        # Text of the document cannot end the element that holds it.
        data = (await document.read()).replace(b"<", b"\\u003c")
        filled = text.replace(_OPENAPI_MARK, data)
        return Response(filled, headers={**_DOCS_HEADERS, "content-type": _HTML})

    return serve


def _serving(content: bytes, kind: str, known_headers: Mapping[str, str]) -> _Serve:
    headers = {**known_headers, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": kind})

    return serve
