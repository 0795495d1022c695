"""The ASGI application: the data plane in front, FastAPI for all other routes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic.warnings import UnsupportedFieldAttributeWarning
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.api import (
    engines,
    explain,
    keys,
    messages,
    models,
    openapi,
    pages,
    pairing,
    policy,
    recent_errors,
    responses,
    status,
    usage,
    workers,
)
from gateway.api.auth import client_format, of_anthropic
from gateway.assembly import LOOP_CHECK_S, TIMING, Gateway, Timing, build_gateway
from gateway.auth.origins import Hosts, cors_headers, preflight_headers
from gateway.config.settings import Settings
from gateway.http.downstream import (
    ClientDisconnected,
    head_of,
    in_pieces,
    replaced_body,
    response_writer,
)
from gateway.periodic import Job
from gateway.protocols import PROXY_PATHS, WIRE_FORMATS
from gateway.protocols.messages import MESSAGES_PATH, MessagesFormat, error_body
from gateway.protocols.responses import RESPONSES_PATH
from gateway.proxy.handler import ProxyHandler
from gateway.proxy.token_count import TokenCounter
from gateway.responses.exchange import ResponsesService
from paceline.error_messages import message_of
from policies.document import PolicyInvalid

_VERSIONS = ("v1", "v2")
# FastAPI hides it, though not where pydantic completes a schema at its first use.
warnings.filterwarnings("ignore", "The 'alias' attribute", UnsupportedFieldAttributeWarning)
_DATA_PATHS = ("/v1/", "/v2/")


class PortApp:
    """The ASGI application of one port."""

    def __init__(self, hosts: Hosts, fastapi: FastAPI) -> None:
        self._hosts = hosts
        self._fastapi = fastapi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that names this gateway as its host."""
        try:
            self._hosts.check(scope["headers"])
        except errors.HostRefused as refused:
            await response_writer(scope).fail(refused)
            return
        send = in_pieces(send)
        if scope["method"] == "HEAD":  # as GET, of which the connection sends the head alone
            scope, send = {**scope, "method": "GET"}, head_of(send)
        await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._fastapi(scope, receive, send)


class GatewayApp(PortApp):
    """The application of the main port, which builds that of the admin port too."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.proxy = ProxyHandler(gateway)
        self.responses = ResponsesService(gateway)
        self.admin_app: PortApp | None = None
        self._status = status.StatusService(gateway, self.proxy)
        routers = [
            *(status.probes, status.router, models.router, recent_errors.own, usage.own),
            *(workers.heartbeats, pairing.exchanges),
            *(explain.router, messages.router, responses.router, responses.conversations),
        ]
        # Workers join on the main port.
        admin_routers = [workers.router, pairing.router, engines.router, policy.router]
        admin_routers += [keys.router, usage.router, recent_errors.router]
        main_pages = [pages.START, pages.DASHBOARD, pages.TRY, pages.DOCS]
        self._origins = gateway.settings.allowed_origins
        hosts = Hosts(gateway.settings)
        if gateway.settings.admin_port is None:
            routers += [*admin_routers, pages.page_router(*main_pages, pages.ADMIN)]
        else:
            routers.append(pages.page_router(*main_pages))
            admin_routers.append(pages.page_router(pages.ADMIN, pages.DOCS))
            admin = _build_fastapi(gateway, self.proxy, admin_routers, proxied=False)
            self.admin_app = PortApp(hosts, admin)
        fastapi = _build_fastapi(gateway, self.proxy, routers, proxied=True)
        fastapi.state.status, fastapi.state.responses = self._status, self.responses
        fastapi.state.counter = TokenCounter(gateway, self.proxy.forwarder.connections)
        super().__init__(hosts, fastapi)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass inference requests to the proxy and all others to FastAPI."""
        if self._origins and scope["path"].startswith(_DATA_PATHS):
            request = dict(scope["headers"])
            cors = cors_headers(request, self._origins)
            response_writer(scope).add_headers(cors)
            if cors and (preflight := preflight_headers(scope["method"], request)):
                await response_writer(scope).whole(204, preflight, b"")
                return
        # The raw path, which no header can change (CVE-2026-48710).
        path = scope["path"]
        if (wire_format := WIRE_FORMATS.get(path)) is not None:
            await self.proxy(scope, receive, wire_format)
        elif path == MESSAGES_PATH:
            await self.proxy(scope, receive, MessagesFormat(self.proxy.sealer))
        elif path == RESPONSES_PATH:
            await self.proxy(scope, receive, self.responses.exchange())
        else:
            if path.startswith(_DATA_PATHS):
                writer = response_writer(scope)
                wire_format = client_format(scope, self.proxy.sealer)
                writer.add_headers([(b"x-request-id", writer.request_id.encode())])
                writer.add_headers(wire_format.response_headers(writer.request_id))
            await self._fastapi(scope, receive, send)

    def jobs(self, check_s: float) -> list[Job]:
        """List the periodic jobs of the data plane."""
        return [
            Job(work=self._measure_load, period_s=LOOP_CHECK_S, at_start=True),
            Job(work=self.responses.check, period_s=check_s),
            Job(work=self.proxy.forwarder.check, period_s=check_s),
        ]

    def cut(self) -> None:
        """Cancel the requests that still run: streams end with an error event."""
        self.gateway.active_requests.cancel(errors.ShuttingDown())
        self._status.feed.close()

    async def _measure_load(self) -> None:
        # Heartbeats may have been processed late by as much.
        self.gateway.fleet.compensate_stall(self.proxy.load.lag.measure())


async def create_app(settings: Settings, timing: Timing = TIMING) -> GatewayApp:
    """Build the gateway; its parts are not started. May raise `StartupError`."""
    return GatewayApp(await build_gateway(settings, timing))


def _build_fastapi(
    gateway: Gateway, proxy: ProxyHandler, routers: Iterable[APIRouter], *, proxied: bool
) -> FastAPI:
    app = FastAPI(
        title="Paceline",
        version=pages.VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # `openapi.published` adds the routes of the proxy
        redirect_slashes=False,  # a path has one spelling, and no key is sent after a redirect
    )
    app.state.gateway, app.state.proxy = gateway, proxy
    app.state.proxied = proxied
    app.state.openapi = openapi.OpenApiDocument(app, proxied=proxied)
    for error in (errors.GatewayError, PolicyInvalid, RequestValidationError, HTTPException):
        app.add_exception_handler(error, _render)
    app.add_exception_handler(Exception, _render)  # uvicorn logs it as well
    app.add_exception_handler(ClientDisconnected, _end)
    for router in (*routers, openapi.router):
        # `include_router` would build each route a second time, half of the start of a gateway.
        app.router.routes.extend(router.routes)
    return app


async def _end(_request: Request, _error: Exception) -> Response:
    """Return the response to a client that has disconnected, which nobody reads."""
    return Response(status_code=499)


async def _render(request: Request, error: Exception) -> Response:
    """Render any exception of a route as an error, in the shape that its client reads."""
    answer = _as_gateway_error(request, error)
    meant = answer.meant if isinstance(answer, errors.PathUnknown) else ""
    anthropic = of_anthropic(request.scope) or meant.startswith(MESSAGES_PATH)
    to_body = error_body if anthropic else errors.to_body
    body = to_body(answer)
    response = Response(body, status_code=answer.status)
    response.raw_headers.extend(errors.to_headers(answer))
    response.raw_headers.extend(replaced_body(request.scope, answer.status, body))
    return response


def _as_gateway_error(request: Request, error: Exception) -> errors.GatewayError:
    path, known = request.scope["path"], errors.GatewayError()
    match error:
        # FastAPI wraps an error of the body's reader in an HTTPException.
        case HTTPException(__cause__=errors.GatewayError() as cause):
            known = cause
        case errors.GatewayError():
            known = error
        case PolicyInvalid():
            known = errors.PolicyRefused(error.reasons, param=error.problems[0].field or None)
        case RequestValidationError():
            known = _invalid(error.errors()[0])
        case HTTPException(status_code=404):
            known = _as_unserved(request, path)
        case HTTPException(status_code=405):
            # Of all routes of the path; Starlette reports those of the first one.
            routes = [route for route in request.app.routes if isinstance(route, Route)]
            methods = [one.methods or () for one in routes if one.path_regex.match(path)]
            allowed = set().union(*methods)
            allowed |= {"HEAD"} if "GET" in allowed else set()
            known = errors.MethodRefused(", ".join(sorted(allowed)))
        case HTTPException():
            known = errors.RequestRefused("The request is invalid.")
    return known


def _as_unserved(request: Request, path: str) -> errors.GatewayError:
    """Return the error for a path without a route; it names the path behind a wrong base URL."""
    versioned = request.app.state.proxied and path.startswith(_DATA_PATHS)
    parts = [part for part in path.split("/") if part and request.app.state.proxied]
    for place, part in enumerate(parts[:4]):
        bare = part not in _VERSIONS
        # The makers have more routes below a version with each release.
        if versioned and (bare or not place):
            continue
        meant = "/".join(("/v1" if bare else "", *parts[place:]))
        routes = [one for one in request.app.routes if isinstance(one, Route)]
        found = [one.path_format for one in routes if one.path_regex.match(meant)]
        if meant in PROXY_PATHS or found:
            advice = "add '/v1' to the base URL" if bare else "shorten the base URL"
            return errors.PathUnknown((*found, meant)[0], advice)
    return errors.EndpointUnserved() if versioned else errors.PathUnknown()


def _invalid(problem: ErrorDetails) -> errors.GatewayError:
    """Name the field of the body, or the parameter, that is invalid."""
    match problem["loc"]:
        case ("body",):
            return errors.BodyNotJson()
        case ("header", "if-match"):
            return errors.EditUnconditional()
        case ("header", "x-paceline-note"):
            return errors.NoteMissing()
        case (_, *path):
            field = ".".join(str(part) for part in path)
            return errors.FieldInvalid(f"{field}: {message_of(problem)}.", param=field)
    return errors.RequestRefused()
