"""Run the gateway in this process: its listeners, its HTTP servers, its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import httpx

from gateway.app import PortApp, create_app
from gateway.assembly import TIMING, Timing
from gateway.config.settings import Settings
from gateway.config.startup_checks import check_secrets, ensure_secrets, local_url
from gateway.errors import StartupError
from gateway.http.downstream import DownstreamProtocol
from paceline.addresses import base_url, is_loopback
from paceline.http import Server, raise_open_file_limit
from paceline.lifecycle import Shutdown
from paceline.protocol import build_records
from paceline.wakefulness import awake_while

Result = TypeVar("Result")
_INHERITED = "GATEWAY_LISTENER"
"""The variable with the process that begins again, and its listener."""
_BACKLOG = 2048
_PROBE_TIMEOUT_S = 1.0
_SWITCH_INTERVAL_S = 0.001


def settle_interpreter() -> None:
    """Let the garbage collector run seldom, and threads switch often, in a gateway's process.

    Modules and settings live as long as the process, and requests create next to no cycles:
    collecting every few requests costs a tenth of the CPU time. While a thread inspects a large
    body, the event loop waits for the interpreter whenever it has work.
    """
    build_records()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


class Listening(NamedTuple):
    """The addresses of a gateway that answers requests."""

    url: str
    """The base address, such as http://127.0.0.1:8000."""
    admin_url: str
    """That of the port for admins; empty without such a port."""
    keyed: bool
    """Whether clients need an API key."""
    settings: Settings
    """The settings with the stored secrets."""
    running_requests: Callable[[], int]
    """Returns the number of requests that a shutdown would wait for."""


async def serve(
    settings: Settings,
    *,
    shutdown: Shutdown,
    started: Callable[[Listening], None] = lambda _listening: None,
    timing: Timing = TIMING,
) -> None:
    """Serve until `shutdown` is requested and running requests have ended; raise `StartupError`.

    `started` is called once, when requests are answered.
    """
    settings = ensure_secrets(settings)
    check_secrets(settings)
    raise_open_file_limit()
    async with contextlib.AsyncExitStack() as stack:
        # First, because the rest may activate another policy for gateways that share the state.
        listener = await _listen(stack, settings.host, settings.port, "--host", "--port")
        admin_listener = None
        if settings.admin_port is not None:
            names = "PACELINE_ADMIN_HOST", "PACELINE_ADMIN_PORT"
            admin_listener = await _listen(stack, settings.admin_host, settings.admin_port, *names)
        app = await create_app(settings, timing)
        gateway = app.gateway
        upstream = app.proxy.forwarder.connections
        await stack.enter_async_context(gateway.started(upstream, app.jobs(timing.check_s)))
        if not is_loopback(settings.host):
            gateway.api_keys.require_always()
        admin_url = ""
        if app.admin_app is not None and admin_listener is not None:
            admin_server = _server(app.admin_app, timing)
            await stack.enter_async_context(admin_server.on(admin_listener))
            admin_url = _address(settings.admin_host, admin_listener)
        server = _server(app, timing)
        await stack.enter_async_context(server.on(listener))
        url = _address(settings.host, listener)
        load, keyed = app.proxy.load, gateway.api_keys.required
        await stack.enter_async_context(awake_while(lambda: load.requests))
        if settings.announce and not is_loopback(settings.host):
            from gateway.pairing.announcement import announced  # noqa: PLC0415  # zeroconf is slow

            port, fleet = listener.getsockname()[1], await gateway.paired_workers.fingerprint()
            await stack.enter_async_context(announced(settings.host, port, fleet))
        started(Listening(url, admin_url, keyed, settings, lambda: load.requests))

        async def drained() -> None:
            if shutdown.restart:
                kept = os.dup(listener.fileno())
                os.environ[_INHERITED] = f"{os.getpid()} {kept}"
                server.stop_accepting()
            await load.idle.wait()

        await gateway.run_until_drained(shutdown, server.serving, drained, app.cut)
        if not shutdown.restart:
            os.environ.pop(_INHERITED, None)


def restart_if_requested() -> None:
    """Become a new process of the same command, whose listener has kept its queue.

    Clients that have connected meanwhile wait, and are not refused.
    """
    if inherited := os.environ.get(_INHERITED):
        os.set_inheritable(int(inherited.split()[1]), True)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _inherited(host: str, port: int) -> socket.socket | None:
    """Return the listener of the process that has begun again, if its address is the same."""
    process, _, descriptor = os.environ.pop(_INHERITED, "").partition(" ")
    if process != str(os.getpid()):
        return None
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    bound = listener.getsockname()
    if port in (0, bound[1]) and bound[0] in {info[4][0] for info in socket.getaddrinfo(host, 0)}:
        return listener
    listener.close()
    return None


def _server(app: PortApp, timing: Timing) -> Server:
    return Server(
        app,
        connection=DownstreamProtocol,
        head_timeout_s=timing.head_timeout_s,
        write_timeout_s=timing.write_timeout_s,
        check_s=timing.check_s,
    )


async def _listen(
    stack: contextlib.AsyncExitStack, host: str, port: int, host_name: str, port_name: str
) -> socket.socket:
    """Open a listening socket; raise `StartupError` with the remedy if that fails."""

    def create() -> socket.socket:
        if (kept := _inherited(host, port)) is not None:
            return kept
        socket.getaddrinfo(host, port)  # `create_server` hides that a name is unknown
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::"  # as 0.0.0.0, and as in workers: all addresses of both families
        return socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )

    try:
        return stack.enter_context(await asyncio.to_thread(create))
    except (socket.gaierror, UnicodeError):
        problem = f"this machine has no host '{host}'; choose another with {host_name}"
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:  # of names, for '*'
            problem = f"this machine has no address {host}; choose another with {host_name}"
        elif error.errno != errno.EADDRINUSE:
            problem = f"{os.strerror(error.errno or 0)}; choose another with {port_name}"
        elif await _is_paceline(url := local_url(host, port)):
            problem = (
                f"a gateway already runs at {url}; `paceline status --url {url}` shows its state"
            )
        else:
            problem = f"another program uses the port; choose another port with {port_name}"
    raise StartupError(f"Cannot listen on {host} port {port}: {problem}.")


async def _is_paceline(url: str) -> bool:
    """Return whether a gateway answers at this address."""
    try:
        async with httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S, trust_env=False) as client:
            response = await client.get(url, headers={"accept": "application/json"})
            return bool(response.json()["name"] == "Paceline")
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False


def _address(host: str, listener: socket.socket) -> str:
    return base_url(host, listener.getsockname()[1])
