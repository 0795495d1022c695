"""Who may call what: keys, the join token, and the rule for listening beyond this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from gateway.config.settings import Settings
from gateway.config.startup_checks import is_address
from gateway.errors import HostRefused
from gateway.types import Header
from workers.protocol import is_loopback

_HOSTS_KEPT = 64
_TOLD_BY_BROWSERS = frozenset((b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"))
_OTHER_SITES = frozenset((b"cross-site", b"same-site"))
_FOLLOWED = (b"navigate", b"document")


class Hosts:
    """The names under which this gateway may be asked.

    A page of a foreign site can reach a gateway in its reader's network by a name of its own that
    it points there (DNS rebinding). An address is no such name, and neither is one of this machine.
    """

    def __init__(self, settings: Settings) -> None:
        own = socket.gethostname().lower()
        bare = own.partition(".")[0]
        given = (settings.host, settings.admin_host, *settings.allowed_hosts)
        self._names = {own, bare, f"{bare}.local", "localhost", *(name.lower() for name in given)}
        self._known: set[bytes] = set()

    def check(self, headers: Iterable[Header]) -> None:
        """Raise `HostRefused` unless the one `Host` header names this gateway."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) == 1 and hosts[0] in self._known:
            return
        told = b", ".join(hosts).decode("latin-1")
        if len(hosts) != 1 or not self._allows(_without_port(told).lower().removesuffix(".")):
            raise HostRefused(told)
        if len(self._known) < _HOSTS_KEPT:
            self._known.add(hosts[0])

    def _allows(self, host: str) -> bool:
        return host in self._names or is_address(host)


def comes_from_this_machine(peer: str | None, headers: Sequence[Header]) -> bool:
    """Say whether a person on this machine sent it, not a proxy and not a page in a browser.

    A page of a foreign site can reach loopback by a name that it points there (DNS rebinding), and
    a proxy on this machine speaks for others; the headers give both away.
    """
    if peer is None or not is_loopback(peer) or comes_from_foreign_page(headers):
        return False
    if any(name in (b"x-forwarded-for", b"forwarded") for name, _ in headers):
        return False
    return is_loopback(_without_port(_host(headers).decode("latin-1")))


def comes_from_foreign_page(headers: Sequence[Header]) -> bool:
    """Say whether a page of another site made its reader's browser send this.

    The page never sees the answer, but a form of it, or what looks like one, is sent without asking
    anybody first. A link that a reader follows is neither: it only looks. What a page puts into a
    frame of its own is no such link.
    """
    told = {name: value for name, value in headers if name in _TOLD_BY_BROWSERS}
    if not told:
        return False
    if b"origin" in told:
        return told[b"origin"].partition(b"://")[2] != _host(headers)
    followed = (told.get(b"sec-fetch-mode"), told.get(b"sec-fetch-dest")) == _FOLLOWED
    return told.get(b"sec-fetch-site") in _OTHER_SITES and not followed


def _host(headers: Iterable[Header]) -> bytes:
    return next((value for name, value in headers if name == b"host"), b"")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
