"""Access to routes: the key check and the body limit in front of each router, and who edits.

API keys, the admin key and the join token are three kinds. The admin key opens the routes of API
keys too; no other one opens the routes of another kind. The token of a paired worker opens the
routes of its id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Depends, Header, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.assembly import Gateway
from gateway.auth.api_keys import ANONYMOUS, ApiKey, matches_secret
from gateway.auth.origins import comes_from_foreign_page
from gateway.errors import (
    AdminKeyRefused,
    EndedKeyRefused,
    FieldInvalid,
    KeyRefused,
    NoteMissing,
    PageRefused,
    WorkerIdTaken,
)
from gateway.http.downstream import header, read_small_body, response_writer
from gateway.memory_budget import MemoryHold
from gateway.protocols.messages import MESSAGES_PATH, MessagesFormat
from gateway.protocols.openai import CHAT, WireFormat
from gateway.protocols.sealing import Sealer
from gateway.proxy.billing import count_request
from gateway.proxy.client import client_address
from gateway.proxy.handler import ProxyHandler
from gateway.state.recent_errors import ErrorRecord
from gateway.strict_json import footprint_bytes, parse
from gateway.types import RawBody
from paceline.protocol import MAX_REPORT_BYTES

DATA_KEY, ADMIN_KEY, JOIN_TOKEN, _NO_KEY = "dataKey", "adminKey", "joinToken", ""
"""The security schemes in the published OpenAPI."""
_SCHEMES = {
    DATA_KEY: "An API key, or the admin key.",
    ADMIN_KEY: "The admin key: `PACELINE_ADMIN_KEY`, or else a key in the state folder.",
    JOIN_TOKEN: "The token that workers need to join, or that of one paired worker.",
}
_ANTHROPIC = b"anthropic-"
_BODY_LIMIT_BYTES = 256 * 1024
_OPEN_BODY_LIMIT_BYTES = 4096
AUTHOR_HEADER = "x-paceline-author"
NOTE_HEADER = "x-paceline-note"
_AUTHOR_CHARS = 100
_NOTE_CHARS = 500
_DEFAULT_AUTHOR = "admin"


def part(name: str) -> Any:
    """Return the dependency of a route on a part of the application, by its name there."""

    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


CurrentGateway = Annotated[Gateway, part("gateway")]


def data_router(prefix: str = "") -> APIRouter:
    """Return a router whose routes need an API key, once there is one."""
    return _router(prefix, DATA_KEY, None)


def worker_router(prefix: str) -> APIRouter:
    """Return a router whose routes need the join token; without one no worker joins."""
    return _router(prefix, JOIN_TOKEN, MAX_REPORT_BYTES)


def admin_router(prefix: str = "", body_limit_bytes: int = _BODY_LIMIT_BYTES) -> APIRouter:
    """Return a router whose routes need the admin key."""
    return _router(prefix, ADMIN_KEY, body_limit_bytes)


def open_router(prefix: str) -> APIRouter:
    """Return a router whose routes need no key, and take small bodies of no foreign page."""
    return _router(prefix, _NO_KEY, _OPEN_BODY_LIMIT_BYTES)


def _router(prefix: str, scheme: str, body_limit_bytes: int | None) -> APIRouter:
    class GuardedRoute(APIRoute):
        """Checks within the route and not in a middleware, so that 404 and 405 come before 401."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                # Before FastAPI reads the body: a client without a key sends none.
                gateway: Gateway = request.app.state.gateway
                try:
                    if scheme == DATA_KEY:
                        check_data_key(request, gateway)
                    elif scheme == _NO_KEY:
                        _check_page(request, gateway)
                    else:
                        _check_secret(request, gateway, scheme)
                except KeyRefused as refused:
                    if isinstance(refused, EndedKeyRefused):
                        gateway.recent_errors.add(_use_of(refused, request.scope, gateway.wall()))
                    await request.app.state.proxy.slow_guesses(request.scope)
                    raise
                limit_bytes = body_limit_bytes or gateway.settings.body_limit_bytes
                return await handler(_LimitedRequest(request, limit_bytes))

            return guarded

    if scheme == _NO_KEY:
        return APIRouter(prefix=prefix, route_class=GuardedRoute)
    security = HTTPBearer(scheme_name=scheme, description=_SCHEMES[scheme], auto_error=False)
    return APIRouter(prefix=prefix, route_class=GuardedRoute, dependencies=[Security(security)])


class _LimitedRequest(Request):
    """A request with a bounded body, which is strict JSON for FastAPI whatever its media type."""

    def __init__(self, request: Request, limit_bytes: int) -> None:
        super().__init__(request.scope, request.receive)
        self._limit_bytes = limit_bytes
        others = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        self._headers = Headers(raw=[*others, (b"content-type", b"application/json")])

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            settings = self.app.state.gateway.settings
            body = await read_small_body(
                self.scope,
                self.receive,
                limit_bytes=self._limit_bytes,
                timeout_s=settings.body_timeout_s,
            )
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        footprint_bytes(body, bounded=True)
        return parse(body)


def _use_of(refused: EndedKeyRefused, scope: Scope, unix_s: float) -> ErrorRecord:
    """Return the use of a key that has ended, as accounting records those of the proxy."""
    place = {"request_id": response_writer(scope).request_id, "address": client_address(scope)}
    what = {"key": refused.key, "code": refused.counted_as, "reason": refused.reason}
    return ErrorRecord(unix_s=unix_s, status=refused.status, count=1, **place, **what)


def check_data_key(request: Request, gateway: Gateway) -> None:
    """Raise `KeyRefused`, or `PageRefused` for another site's page while no key is needed."""
    api_key = ANONYMOUS
    if gateway.api_keys.required:
        api_key = gateway.api_keys.authenticate(
            header(request.scope, b"authorization"), header(request.scope, b"x-api-key")
        )
    else:
        _check_page(request, gateway)
    request.state.api_key = api_key


def _check_page(request: Request, gateway: Gateway) -> None:
    if comes_from_foreign_page(request.scope["headers"], gateway.settings.allowed_origins):
        raise PageRefused


def _check_secret(request: Request, gateway: Gateway, scheme: str) -> None:
    """Check also on loopback: a proxy on this machine forwards the requests of others."""
    settings, admin = gateway.settings, scheme == ADMIN_KEY
    authorization = header(request.scope, b"authorization")
    worker_id, paired = request.path_params.get("worker_id", ""), gateway.paired_workers
    if matches_secret(authorization, settings.admin_key if admin else settings.join_token):
        if not admin and worker_id in paired.by_worker:
            raise WorkerIdTaken  # the gateways would call it by the token of the paired one
    elif admin or not paired.authenticates(worker_id, authorization):
        raise AdminKeyRefused if admin else KeyRefused


async def _api_key(request: Request) -> Any:
    return request.state.api_key


CurrentKey = Annotated[ApiKey, Depends(_api_key)]
"""The API key of a request to a route of `data_router`."""


def of_anthropic(scope: Scope) -> bool:
    """Return whether a client reads Anthropic's shapes, by the path or any header of theirs."""
    told = any(name.startswith(_ANTHROPIC) for name, _ in scope["headers"])
    return told or scope["path"].startswith(MESSAGES_PATH)


def client_format(scope: Scope, sealer: Sealer) -> WireFormat:
    """Return the format of the headers that a client of a route reads."""
    return MessagesFormat(sealer) if of_anthropic(scope) else CHAT


CurrentProxy = Annotated[ProxyHandler, part("proxy")]


async def _hold(
    proxy: CurrentProxy, gateway: CurrentGateway, api_key: CurrentKey
) -> AsyncIterator[MemoryHold]:
    with proxy.load.counted(), gateway.memory.hold(api_key.caller.client) as hold:
        yield hold


CurrentHold = Annotated[MemoryHold, Depends(_hold)]
"""Has the memory that a request holds until its client has the response; the request counts."""


async def _bounded_body(
    request: Request, gateway: CurrentGateway, api_key: CurrentKey, hold: CurrentHold
) -> RawBody:
    settings = gateway.settings
    if (rate_limiter := api_key.rate_limiter) is not None:
        try:
            count_request(rate_limiter, gateway.clock, gateway.wall)
        finally:
            unix_s = gateway.wall()
            states = rate_limiter.states(gateway.clock(), unix_s)
            wire_format = client_format(request.scope, gateway.sealer)
            limits = wire_format.limit_headers(states, unix_s)
            response_writer(request.scope).add_headers(limits)
    return await read_small_body(
        request.scope,
        request.receive,
        limit_bytes=settings.body_limit_bytes,
        timeout_s=settings.body_timeout_s,
        hold=hold.add,
    )


CountedBody = Annotated[RawBody, Depends(_bounded_body)]
"""The body of a request that no worker answers, bounded and charged as those of the data plane."""


async def _author(
    value: Annotated[
        str, Header(alias=AUTHOR_HEADER, description="The author of the edit; percent-encoded.")
    ] = "",
) -> str:
    return _decoded(value, AUTHOR_HEADER, _AUTHOR_CHARS) or _DEFAULT_AUTHOR


_NOTE = Header(alias=NOTE_HEADER, description="The reason for the edit; percent-encoded.")


async def _note(value: Annotated[str, _NOTE] = "") -> str:
    return _decoded(value, NOTE_HEADER, _NOTE_CHARS)


async def _required_note(value: Annotated[str, _NOTE]) -> str:
    if note := await _note(value):
        return note
    raise NoteMissing


Author = Annotated[str, Depends(_author)]
Note = Annotated[str, Depends(_note)]
RequiredNote = Annotated[str, Depends(_required_note)]


def _decoded(value: str, name: str, limit_chars: int) -> str:
    """Decode a header that a person wrote: UTF-8, percent-encoded or not."""
    try:
        text = unquote_to_bytes(value.encode("latin-1")).decode().strip()
    except UnicodeDecodeError:
        text = "\0"
    # Terminals show the text; unprintable characters could move the cursor.
    if not text.isprintable() or len(text) > limit_chars:
        raise FieldInvalid(
            f"'{name}' must be one line of at most {limit_chars} characters in UTF-8, with "
            "non-ASCII characters percent-encoded.",
            param=name,
        )
    return text
