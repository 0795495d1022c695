"""The announcement of a gateway on the local network, and the search for gateways (DNS-SD).

An announcement names address, version and fleet, and never a secret. The library runs in a thread
of its own, so no datagram of the network wakes the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import version
from typing import NamedTuple
from urllib.parse import urlsplit

from zeroconf import Error, InterfaceChoice, ServiceBrowser, ServiceInfo, Zeroconf

from gateway.config.startup_checks import network_url
from paceline.addresses import WILDCARDS, base_url
from paceline.names import name_of_host
from paceline.terminal import printable

log = logging.getLogger(__name__)
logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # one line of ours tells what failed

SERVICE = "_paceline._tcp.local."
SEARCH_S = 3.0
_MAX_FOUND = 16
_ANSWER_MS = 1000
_TEXT_CHARS = 64
Interfaces = Sequence[str] | InterfaceChoice


class FoundGateway(NamedTuple):
    """A gateway that announces itself; anybody on the network may have written all of it."""

    name: str
    url: str
    version: str
    fleet: str


@contextlib.asynccontextmanager
async def announced(host: str, port: int, fingerprint: str) -> AsyncIterator[None]:
    """Announce a gateway within the context; a network that permits none is logged."""
    registering = asyncio.create_task(asyncio.to_thread(register, host, port, fingerprint))
    try:
        yield
    finally:
        if (zeroconf := await registering) is not None:
            await asyncio.to_thread(zeroconf.close)


def register(host: str, port: int, fingerprint: str) -> Zeroconf | None:
    """Announce a gateway that listens on a host and a port until the result is closed."""
    with contextlib.ExitStack() as failed:
        try:
            info = announcement(host, port, fingerprint)
            everywhere = host in WILDCARDS
            zeroconf = Zeroconf(InterfaceChoice.All if everywhere else info.parsed_addresses())
            failed.callback(zeroconf.close)
            zeroconf.register_service(info, allow_name_change=True)
        except (OSError, Error, RuntimeError, ValueError) as error:
            log.warning("gateway.unannounced reason=%r", str(error) or type(error).__name__)
            return None
        failed.pop_all()
    log.info("gateway.announced name=%s", info.name)
    return zeroconf


def announcement(host: str, port: int, fingerprint: str) -> ServiceInfo:
    """Return the announcement of a gateway; raise `OSError` for a host without an address."""
    reached = urlsplit(network_url(host, port)).hostname or host
    found = socket.getaddrinfo(reached, port, type=socket.SOCK_STREAM)
    fleet = {"fleet": fingerprint[:16], "fingerprint": fingerprint}
    name = f"{name_of_host(socket.gethostname()) or 'gateway'}-{port}"
    return ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=port,
        parsed_addresses=list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found)),
        properties={"version": version("paceline"), **fleet},
        server=f"paceline-{secrets.token_hex(4)}.local.",
    )


def find_gateways(
    interfaces: Interfaces = InterfaceChoice.All,
    is_last: Callable[[FoundGateway], bool] = lambda _found: False,
) -> list[FoundGateway]:
    """Return the gateways that answer within seconds; raise `OSError` or `Error`.

    The search ends early with `_MAX_FOUND` of them, or with the last one.
    """
    found: dict[str, FoundGateway] = {}
    done = threading.Event()

    def answer(zeroconf: Zeroconf, service_type: str, name: str, **_: object) -> None:
        with contextlib.suppress(Error, ValueError):  # an invalid name must not end the search
            info = zeroconf.get_service_info(service_type, name, _ANSWER_MS)
            if info is not None and (one := read_announcement(info)) is not None:
                found[name] = one
                if len(found) == _MAX_FOUND or is_last(one):
                    done.set()

    with contextlib.closing(Zeroconf(interfaces)) as zeroconf:
        ServiceBrowser(zeroconf, SERVICE, [answer])
        done.wait(SEARCH_S)
        return sorted(found.values())[:_MAX_FOUND]


def read_announcement(info: ServiceInfo) -> FoundGateway | None:
    """Return the content of an announcement, for a terminal; None without an address."""
    addresses = sorted(info.parsed_addresses(), key=lambda address: ":" in address)
    if not addresses or not info.port:
        return None
    told, fleet = (info.properties.get(key) or b"" for key in (b"version", b"fleet"))
    texts = info.name.removesuffix(f".{SERVICE}"), told.decode("latin-1"), fleet.decode("latin-1")
    name, version_, fleet_id = (printable(text[:_TEXT_CHARS]) for text in texts)
    return FoundGateway(name, base_url(addresses[0], info.port), version_, fleet_id)
