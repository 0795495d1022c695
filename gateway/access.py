"""Who may call what: keys, the join token, and the rule for listening beyond this machine."""

from __future__ import annotations

import hmac
import ipaddress
import itertools
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import SecretStr

from gateway.domain import Header, fits_header
from gateway.errors import StartRefused
from gateway.keys.keyring import bearer
from gateway.refusals import HostRefused
from gateway.settings import Settings

_HOSTS_KEPT = 64
_TOLD_BY_BROWSERS = frozenset((b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"))
_OTHER_SITES = frozenset((b"cross-site", b"same-site"))
_FOLLOWED = (b"navigate", b"document")


def check_binding(settings: Settings, *, keyed: bool) -> None:
    """Refuse to listen beyond loopback unless clients need a key, and admins theirs."""
    if not is_loopback(settings.host) and not keyed:
        raise StartRefused(
            f"Listening on {settings.host} would let anyone on the network use the models: "
            "set PACELINE_API_KEY first, or stay on 127.0.0.1 and make keys there with "
            "`paceline keys create`."
        )
    apart = settings.admin_port is not None
    if apart and not is_loopback(settings.admin_host) and settings.admin_key is None:
        raise StartRefused(
            f"Listening on {settings.admin_host} for admins would let anyone on the network be "
            "one: set PACELINE_ADMIN_KEY first, or leave PACELINE_ADMIN_HOST at 127.0.0.1."
        )


def check_secrets(settings: Settings) -> None:
    """Refuse what nobody can send, and one secret for two: who holds the one holds the other."""
    named = {
        "PACELINE_API_KEY": settings.api_key,
        "PACELINE_ADMIN_KEY": settings.admin_key,
        "PACELINE_JOIN_TOKEN": settings.join_token,
    }
    given = {name: secret for name, secret in named.items() if secret is not None}
    for name, secret in given.items():
        if not fits_header(secret.get_secret_value()):
            raise StartRefused(f"{name} holds what no HTTP header can.")
    for (name, secret), (other, same) in itertools.combinations(given.items(), 2):
        if hmac.compare_digest(
            secret.get_secret_value().encode(), same.get_secret_value().encode()
        ):
            raise StartRefused(f"{name} and {other} are the same; each must be one of its own.")


def ensure_join_token(settings: Settings) -> Settings:
    """Return settings that hold a join token: the one set, the one kept, or a new one."""
    if settings.join_token is not None:
        return settings
    return settings.with_join_token(_kept_token(settings.state_dir.expanduser()))


def _kept_token(folder: Path) -> str:
    path = folder / "join-token"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            # Written beside and linked into place: two gateways that start at once agree on one
            # token, and nobody ever reads half of it.
            draft = folder / f".join-token-{secrets.token_hex(4)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32))
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        token = path.read_text().strip()
    except OSError as error:
        raise StartRefused(
            f"The join token in {path} cannot be read or made ({error.strerror}); "
            "set PACELINE_JOIN_TOKEN or PACELINE_STATE_DIR."
        ) from None
    if not token:
        raise StartRefused(f"The join token in {path} is empty; delete the file to make a new one.")
    return token


def base_url(host: str, port: int) -> str:
    """Spell where something is served, as http://127.0.0.1:8000."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_address(host: str) -> bool:
    """Say whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Say whether an address or name is this machine's own."""
    if host == "localhost":
        return True
    if not is_address(host):
        return False
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


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


def bears(authorization: bytes | None, *secrets_held: SecretStr | None) -> bool:
    """Say whether an `Authorization` value carries one of these secrets; unset ones never match."""
    offered = bearer(authorization)
    if offered is None:
        return False
    # Bytes, because compare_digest refuses non-ASCII text; all of them, so that time tells nothing.
    matches = [
        hmac.compare_digest(offered, held.get_secret_value().encode())
        for held in secrets_held
        if held is not None and held.get_secret_value()
    ]
    return any(matches)


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
