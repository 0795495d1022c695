"""Checks of the Host header and of the origin of web pages."""

from __future__ import annotations

import socket
from collections.abc import Container, Iterable, Mapping, Sequence

from gateway.config.settings import Settings
from gateway.config.startup_checks import is_address
from gateway.errors import HostRefused
from gateway.types import Header, Headers

_MAX_CACHED_HOSTS = 64
# Containers reach their machine by the second name, and nobody can register it.
_LOCAL_NAMES = ("localhost", "host.docker.internal")
_BROWSER_HEADERS = frozenset((b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"))
_FOREIGN_SITES = frozenset((b"cross-site", b"same-site"))
_NAVIGATION = (b"navigate", b"document")


class Hosts:
    """The host names that requests may use for this gateway.

    A page of another site can reach a gateway in its reader's network by a name of its own that
    resolves to the gateway (DNS rebinding). Addresses and names of this machine are safe.
    """

    def __init__(self, settings: Settings) -> None:
        own = socket.gethostname().lower()
        bare = own.partition(".")[0]
        given = (settings.host, settings.admin_host, *settings.allowed_hosts)
        self._names = {own, bare, f"{bare}.local", *_LOCAL_NAMES, *(name.lower() for name in given)}
        self._allowed: set[bytes] = set()

    def check(self, headers: Iterable[Header]) -> None:
        """Raise `HostRefused` unless the one `Host` header names this gateway."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) == 1 and hosts[0] in self._allowed:
            return
        host = b", ".join(hosts).decode("latin-1")
        in_brackets = host.startswith("[")
        name = host[1:].partition("]")[0] if in_brackets else host.partition(":")[0]
        name = name.lower().removesuffix(".")
        if len(hosts) != 1 or not (name in self._names or is_address(name)):
            raise HostRefused(host)
        if len(self._allowed) < _MAX_CACHED_HOSTS:
            self._allowed.add(hosts[0])


def comes_from_foreign_page(headers: Sequence[Header], allowed: Container[str] = ()) -> bool:
    """Return whether a page of another site made its reader's browser send this.

    The page cannot read the response, but browsers send forms without a preflight. A followed
    link is allowed, because it only reads; a frame of the page is not. Pages of the `allowed`
    origins are not foreign.
    """
    sent = {name: value for name, value in headers if name in _BROWSER_HEADERS}
    if not sent or sent.get(b"origin", b"").decode("latin-1") in allowed:
        return False
    if b"origin" in sent:
        host = next((value for name, value in headers if name == b"host"), b"")
        return sent[b"origin"].partition(b"://")[2] != host
    navigates = (sent.get(b"sec-fetch-mode"), sent.get(b"sec-fetch-dest")) == _NAVIGATION
    return sent.get(b"sec-fetch-site") in _FOREIGN_SITES and not navigates


def cors_headers(request: Mapping[bytes, bytes], allowed: Container[str]) -> Headers:
    """Return the headers that let a page of an allowed origin read the response; maybe none."""
    origin = request.get(b"origin", b"")
    if origin.decode("latin-1") not in allowed:
        return []
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"origin"),
    ]


def preflight_headers(method: str, request: Mapping[bytes, bytes]) -> Headers:
    """Return the headers that let a page send its request, if its browser asks; else none.

    It may send any headers: no header that a page can set opens anything without a key.
    """
    if method != "OPTIONS" or b"access-control-request-method" not in request:
        return []
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-max-age", b"600"),
    ]
    if wanted := request.get(b"access-control-request-headers"):
        headers.append((b"access-control-allow-headers", wanted))
    if b"access-control-request-private-network" in request:
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers
