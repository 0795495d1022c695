"""Wire one gateway together as an ASGI application: the relay in front, FastAPI under it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable
from importlib.metadata import version
from random import Random
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from gateway.api import explain, keys, models, openapi, policy, usage
from gateway.api import pages as page
from gateway.api import status as state
from gateway.api import workers as admin
from gateway.assembly import Gateway, build_gateway
from gateway.auth.origins import Hosts
from gateway.config.settings import Settings
from gateway.errors import (
    BodyNotJson,
    EditUnconditional,
    FieldInvalid,
    GatewayError,
    HostRefused,
    MethodRefused,
    NoteMissing,
    PathUnknown,
    RequestRefused,
    to_body,
    to_headers,
)
from gateway.http.downstream import (
    Receive,
    Scope,
    Send,
    check_connections,
    response_writer,
)
from gateway.http.upstream import ConnectionPool
from gateway.protocols import WIRE_FORMATS
from gateway.proxy.handler import ProxyHandler
from gateway.proxy.load_shedding import LoopMonitor
from gateway.status.events import StatusFeed
from gateway.status.render import DEFAULT_WINDOW, window_s
from policies.error_messages import message_of


class GatewayApp:
    """The whole gateway as one ASGI application, with a way to end it well."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.proxy = ProxyHandler(gateway)
        self.connections: list[Collection[Any]] = []
        """The live connections of each server."""
        self._loop_monitor = LoopMonitor(self.proxy.load.lag, gateway.fleet.compensate_stall)
        self._hosts = Hosts(gateway.settings)
        take = state.snapshots(gateway, self.proxy)
        self._feed = StatusFeed(functools.partial(take, window_s(DEFAULT_WINDOW)))
        self._panel = _panel(gateway, self.proxy, take, self._feed)
        apart = gateway.settings.admin_port is not None
        self.admin_app = AdminApp(gateway, self._hosts) if apart else None
        """What is served on the port for admins, where they have one of their own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand generating requests to the relay and all else to FastAPI."""
        wire_format = None
        if scope["type"] == "http":
            try:
                self._hosts.check(scope["headers"])
            except HostRefused as refused:
                await response_writer(scope).fail(refused)
                return
            # The raw path: what is routed by anything else can be fooled (CVE-2026-48710).
            wire_format = WIRE_FORMATS.get(scope["path"])
        if wire_format is not None:
            await self.proxy(scope, receive, wire_format)
        else:
            await self._panel(scope, receive, send)

    @property
    def upstream(self) -> ConnectionPool:
        """Return the context that holds the connections to workers."""
        return self.proxy.forwarder.connections

    async def measure_load(self) -> None:
        """Measure the delay of the event loop."""
        await self._loop_monitor.measure()

    async def check_connections(self) -> None:
        """Check the time limits of all client connections."""
        check_connections(itertools.chain(*self.connections))

    async def drained(self) -> None:
        """Wait until no generating request runs."""
        await self.proxy.drained()

    def cut(self) -> None:
        """End what still runs: streams with an error event."""
        self.proxy.cut()
        self._feed.close()


class AdminApp:
    """The admin plane as an ASGI application of its own."""

    def __init__(self, gateway: Gateway, hosts: Hosts) -> None:
        self._hosts = hosts
        self._panel = _bare_panel(gateway)
        _add_admin_routes(self._panel)
        self._panel.include_router(openapi.published(self._panel, relayed=False))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve admins under the names that the gateway has."""
        try:
            self._hosts.check(scope["headers"])
        except HostRefused as refused:
            await response_writer(scope).fail(refused)
            return
        await self._panel(scope, receive, send)


async def create_app(settings: Settings, rng: Random | None = None) -> GatewayApp:
    """Build the gateway; its parts are not started. May raise `StartupError`."""
    return GatewayApp(await build_gateway(settings, rng))


def _panel(gateway: Gateway, proxy: ProxyHandler, take: state.Take, feed: StatusFeed) -> FastAPI:
    """Build what FastAPI holds."""
    panel = _bare_panel(gateway)
    panel.include_router(state.probes(gateway, proxy))
    panel.include_router(state.status(gateway, take, feed))
    panel.include_router(page.dashboard())
    panel.include_router(models.router)
    panel.include_router(explain.router)
    panel.include_router(admin.heartbeats)
    if gateway.settings.admin_port is None:
        _add_admin_routes(panel)
    panel.include_router(openapi.published(panel, relayed=True))
    return panel


def _add_admin_routes(panel: FastAPI) -> None:
    """Add what only admins may do; workers join where requests come in."""
    panel.include_router(page.admin_page())
    panel.include_router(admin.router)
    panel.include_router(policy.router)
    panel.include_router(keys.router)
    panel.include_router(usage.router)


def _bare_panel(gateway: Gateway) -> FastAPI:
    panel = FastAPI(
        title="Paceline",
        version=version("paceline"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # ours covers what goes past FastAPI too
        redirect_slashes=False,  # a path has one spelling, and no key is sent after a redirect
    )
    panel.state.gateway = gateway
    panel.add_exception_handler(GatewayError, _render)
    panel.add_exception_handler(RequestValidationError, _render)
    panel.add_exception_handler(HTTPException, _render)
    panel.add_exception_handler(Exception, _render)  # which is logged all the same
    return panel


async def _render(request: Request, error: Exception) -> Response:
    """Render whatever a route raised in OpenAI's shape."""
    shaped = _shaped(request, error)
    response = Response(to_body(shaped), status_code=shaped.status)
    response.raw_headers.extend(to_headers(shaped))
    return response


def _shaped(request: Request, error: Exception) -> GatewayError:
    match error:
        # FastAPI wraps an error of the body's reader in an HTTPException.
        case (GatewayError() as known) | HTTPException(__cause__=GatewayError() as known):
            return known
        case RequestValidationError():
            return _invalid(error.errors()[0])
        case HTTPException(status_code=404):
            return PathUnknown()
        case HTTPException(status_code=405):
            methods = _methods(request.app.routes, request.scope["path"])
            return MethodRefused(", ".join(sorted(methods)))
        case HTTPException():
            return RequestRefused("The request cannot be understood.")
        case _:
            return GatewayError()


def _invalid(problem: ErrorDetails) -> GatewayError:
    """Name the field of the body, or the parameter, that is invalid."""
    match problem["loc"]:
        case ("body",):
            return BodyNotJson()
        case ("header", "if-match"):
            return EditUnconditional()
        case ("header", "x-paceline-note"):
            return NoteMissing()
        case (_, *path):
            field = ".".join(str(part) for part in path)
            return FieldInvalid(f"{field}: {message_of(problem)}.", param=field)
    return RequestRefused()


def _methods(routes: Iterable[BaseRoute], path: str) -> set[str]:
    """Find all methods of a path; the framework tells those of the first route that has it."""
    found: set[str] = set()
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:
            found |= _methods(router.routes, path)
        elif isinstance(route, APIRoute) and route.path_regex.match(path):
            found |= route.methods or set()
    return found
