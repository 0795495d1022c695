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

from zeroconf import Error, InterfaceChoice, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

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


class Announcement(NamedTuple):
    """The announcement of a gateway, and its interfaces."""

    info: ServiceInfo
    interfaces: Interfaces

    @classmethod
    def of(cls, host: str, port: int, fleet_id: str) -> Announcement:
        """Return that of a gateway which listens on a host and a port; raise `OSError`."""
        reached = urlsplit(network_url(host, port)).hostname or host
        found = socket.getaddrinfo(reached, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))
        name = f"{name_of_host(socket.gethostname()) or 'gateway'}-{port}"
        # `fingerprint`: of a certificate, once gateways have one.
        properties = {"version": version("paceline"), "fleet": fleet_id, "fingerprint": ""}
        info = ServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            port=port,
            parsed_addresses=addresses,
            properties=properties,
            server=f"paceline-{secrets.token_hex(4)}.local.",
        )
        return cls(info, InterfaceChoice.All if host in WILDCARDS else addresses)

    def register(self) -> Zeroconf:
        """Answer for the gateway until the result is closed; raise `OSError` or `Error`."""
        zeroconf = Zeroconf(self.interfaces)
        try:
            zeroconf.register_service(self.info, allow_name_change=True)
        except BaseException:
            zeroconf.close()
            raise
        return zeroconf


@contextlib.asynccontextmanager
async def announced(host: str, port: int, fleet_id: str) -> AsyncIterator[None]:
    """Announce a gateway within the context; a network that permits none is logged."""
    registering = asyncio.create_task(asyncio.to_thread(_register, host, port, fleet_id))
    try:
        yield
    finally:
        if (zeroconf := await registering) is not None:
            await asyncio.to_thread(zeroconf.close)


def _register(host: str, port: int, fleet_id: str) -> Zeroconf | None:
    try:
        announcement = Announcement.of(host, port, fleet_id)
        zeroconf = announcement.register()
    except (OSError, Error, RuntimeError, ValueError) as error:
        log.warning("gateway.unannounced reason=%r", str(error) or type(error).__name__)
        return None
    log.info("gateway.announced name=%s", announcement.info.name)
    return zeroconf


class _Listener(ServiceListener):
    """Collects the gateways that answer."""

    def __init__(self, is_last: Callable[[FoundGateway], bool]) -> None:
        self.found: dict[str, FoundGateway] = {}
        self.done = threading.Event()
        self._is_last = is_last

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Ask a gateway for its address; an invalid name must not end the search."""
        with contextlib.suppress(Error, ValueError):
            info = zc.get_service_info(type_, name, _ANSWER_MS)
            if info is not None and (found := read_announcement(info)) is not None:
                self.found[name] = found
                if len(self.found) == _MAX_FOUND or self._is_last(found):
                    self.done.set()

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Ask again."""
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:  # noqa: ARG002
        """Forget a gateway that ends."""
        self.found.pop(name, None)


def find_gateways(
    interfaces: Interfaces = InterfaceChoice.All,
    is_last: Callable[[FoundGateway], bool] = lambda _found: False,
) -> list[FoundGateway]:
    """Return the gateways that answer within seconds; raise `OSError` or `Error`.

    The search ends early with `_MAX_FOUND` of them, or with the last one.
    """
    listener = _Listener(is_last)
    with contextlib.closing(Zeroconf(interfaces)) as zeroconf:
        ServiceBrowser(zeroconf, SERVICE, listener)
        listener.done.wait(SEARCH_S)
        return sorted(listener.found.values())[:_MAX_FOUND]


def read_announcement(info: ServiceInfo) -> FoundGateway | None:
    """Return the content of an announcement, for a terminal; None without an address."""
    addresses = sorted(info.parsed_addresses(), key=lambda address: ":" in address)
    if not addresses or not info.port:
        return None
    texts = {
        key: printable((info.properties.get(key.encode()) or b"").decode(errors="replace"))
        for key in ("version", "fleet")
    }
    name = printable(info.name.removesuffix(f".{SERVICE}"))[:_TEXT_CHARS]
    version_, fleet = (text[:_TEXT_CHARS] for text in texts.values())
    return FoundGateway(name, base_url(addresses[0], info.port), version_, fleet)
