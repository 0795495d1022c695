"""Run the gateway in this process and end it well: running answers first, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Literal, TypeVar

import uvicorn

from gateway.app import AdminApp, GatewayApp, create_app
from gateway.config import policy_file
from gateway.config.settings import Settings
from gateway.config.startup_checks import base_url, check_secrets, ensure_join_token, is_loopback
from gateway.errors import StartupError
from gateway.http.downstream import DownstreamProtocol, sweep
from gateway.periodic import PeriodicTasks
from gateway.proxy.load_shedding import keep_measuring
from gateway.telemetry.stats import SNAPSHOT_INTERVAL_S

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# Longer than common clients keep a connection (5 s), so that they close it, not we under them.
_KEEP_ALIVE_S = 75
# What is left after the streams were ended: clients that do not read.
_LINGER_S = 2


class Ending:
    """The way to the end in two steps: asked (running answers first), then hurried (now)."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.lame_duck = False
        """New requests are served for a while yet, until load balancers have noticed."""

    def ask(self, *, lame_duck: bool = False) -> None:
        """Ask for the end; asking again hurries it."""
        if self.asked.is_set():
            self.hurried.set()
        else:
            self.lame_duck = lame_duck
        self.asked.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM ask, for as long as the context lasts.

        SIGTERM comes from what also runs the load balancers; a person's Ctrl-C waits for none.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.ask)
        loop.add_signal_handler(signal.SIGTERM, functools.partial(self.ask, lame_duck=True))
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)


def settle_collector() -> None:
    """Let the garbage collector run seldom: for the entry points of a gateway's own process.

    What is loaded by now lives as long as the process, and requests leave next to no cycles behind:
    looking for those every few requests would cost a tenth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine on uvloop where there is one."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415  # absent on some platforms
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def serve(
    settings: Settings,
    *,
    ending: Ending,
    started: Callable[[str], None] | None = None,
    admin_started: Callable[[str], None] | None = None,
    unkeyed: Callable[[], None] | None = None,
) -> None:
    """Serve until `ending` is asked, then let running answers finish; raise `StartupError` early.

    `started` is called once, with the base address (http://127.0.0.1:8000), when requests are
    answered; before that `admin_started`, where admins have a port of their own, and `unkeyed`,
    where clients need no key. The caller decides what asks for the end: `Ending.on_signals`, or its
    own reason.
    """
    settings = ensure_join_token(settings)
    check_secrets(settings)
    # First, because the rest may put another policy in force for gateways that share the state.
    with (
        _listener(settings.host, settings.port, "--port or PACELINE_PORT") as listener,
        _admin_listener(settings) as admin_listener,
    ):
        async with contextlib.aclosing(await create_app(settings)) as app:
            if not is_loopback(settings.host):
                app.gateway.api_keys.require_always()
            if unkeyed is not None and not app.gateway.api_keys.required:
                unkeyed()
            async with _serving_admins(app, settings, admin_listener, admin_started):
                address = _address(settings.host, listener)
                server = _Server(
                    _config(app, settings, lifespan="on"),
                    on_started=lambda: started(address) if started else None,
                )
                serving = asyncio.create_task(server.serve(sockets=[listener]), name="gateway")
                async with _watching(app, server):
                    await _until_the_end(app, settings, ending, server, serving)


async def _until_the_end(
    app: GatewayApp,
    settings: Settings,
    ending: Ending,
    server: _Server,
    serving: asyncio.Task[None],
) -> None:
    """Wait until the end is asked for, and come to it step by step."""
    try:
        await _first_of(serving, ending.asked.wait())
        app.leave()
        if ending.lame_duck:
            await _first_of(serving, ending.hurried.wait(), timeout_s=settings.lame_duck_s)
        app.stop_taking()
        await _first_of(app.drained(), ending.hurried.wait(), timeout_s=settings.drain_timeout_s)
    finally:
        app.cut()
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def _watching(app: GatewayApp, server: _Server) -> AsyncIterator[None]:
    """Watch connections, the event loop and the policy for as long as the context lasts."""
    gateway = app.gateway
    watching = (
        asyncio.create_task(sweep(server.server_state.connections)),
        asyncio.create_task(keep_measuring(app.proxy.load.lag, gateway.fleet.compensate_stall)),
    )
    try:
        async with PeriodicTasks(
            [
                (gateway.policy_file.look, policy_file.LOOK_S),
                (gateway.stats_history.record, SNAPSHOT_INTERVAL_S),
            ]
        ):
            yield
    finally:
        for watch in watching:
            watch.cancel()


@contextlib.asynccontextmanager
async def _serving_admins(
    app: GatewayApp,
    settings: Settings,
    listener: socket.socket | None,
    started: Callable[[str], None] | None,
) -> AsyncIterator[None]:
    """Serve admins on their own port, where they have one, for as long as the context lasts."""
    if app.admin_app is None or listener is None:
        yield
        return
    opened = asyncio.Event()
    server = _Server(_config(app.admin_app, settings, lifespan="off"), on_started=opened.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="admin")
    sweeping = asyncio.create_task(sweep(server.server_state.connections))
    try:
        await _first_of(serving, opened.wait())
        if started:
            started(_address(settings.admin_host, listener))
        yield
    finally:
        sweeping.cancel()
        server.should_exit = True
        await serving


async def _first_of(
    *awaited: asyncio.Task[None] | Coroutine[object, object, object],
    timeout_s: float | None = None,
) -> None:
    """Wait for the first of these, or for so long; tasks given live on, coroutines do not."""
    waits = [
        wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in awaited
    ]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, given in zip(waits, awaited, strict=True):
            if wait is not given:
                wait.cancel()


def _config(
    app: GatewayApp | AdminApp, settings: Settings, *, lifespan: Literal["on", "off"]
) -> uvicorn.Config:
    connection = functools.partial(
        DownstreamProtocol,
        head_timeout_s=settings.head_timeout_s,
        write_timeout_s=settings.write_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type]  # whatever makes a protocol will do
        lifespan=lifespan,
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",  # below, it writes down whole paths and queries
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LINGER_S,
    )


def _listener(host: str, port: int, setting: str) -> socket.socket:
    """Open the listening socket ourselves, so that a port in use is one clear sentence."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StartupError(
            f"Cannot listen on {host} port {port} ({os.strerror(error.errno or 0)}); "
            f"choose another with {setting}."
        ) from None


def _admin_listener(
    settings: Settings,
) -> contextlib.AbstractContextManager[socket.socket | None]:
    if settings.admin_port is None:
        return contextlib.nullcontext()
    return _listener(settings.admin_host, settings.admin_port, "PACELINE_ADMIN_PORT")


def _address(host: str, listener: socket.socket) -> str:
    return base_url(host, listener.getsockname()[1])


class _Server(uvicorn.Server):
    """A uvicorn that leaves signals to its caller and says when it answers requests."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
