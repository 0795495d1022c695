"""Checks before a gateway listens: addresses and secrets. Address helpers."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import secrets
import socket
import struct
import sys
from pathlib import Path
from typing import Literal, get_args

from pydantic import SecretStr

from gateway.config.settings import Settings
from gateway.errors import StartupError
from gateway.state.records import exclusive_writer
from gateway.types import header_problem
from paceline.addresses import WILDCARDS, base_url, is_loopback
from paceline.private_files import NotPrivate, check_private, make_private, replace_file

StoredSecret = Literal["join_token", "admin_key"]
"""A setting that is created and stored in the state folder if it is not given."""
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - recognised, not bound

_LEAST_CHARS = 20


def check_binding(settings: Settings, *, keyed: bool) -> None:
    """Raise `StartupError` for an address beyond loopback that no key protects.

    `keyed`: clients need a key.
    """
    if not is_loopback(settings.host) and not keyed:
        raise StartupError(
            f"Listening on {settings.host} would let anyone on the network use the models. "
            "Set PACELINE_API_KEY first, or listen on 127.0.0.1 and create keys there with "
            "`paceline keys create`."
        )


def check_secrets(settings: Settings) -> None:
    """Raise `StartupError` for a secret that is short, used twice, or that no client can send."""
    by_name = {
        "PACELINE_API_KEY": settings.api_key,
        "PACELINE_ADMIN_KEY": settings.admin_key,
        "PACELINE_JOIN_TOKEN": settings.join_token,
    }
    given = {name: one.get_secret_value() for name, one in by_name.items() if one is not None}
    for name, secret in given.items():
        if problem := header_problem(secret):
            raise StartupError(f"{name} {problem}.")
        beyond = not (is_loopback(settings.host) and is_loopback(settings.admin_host))
        if beyond and len(secret) < _LEAST_CHARS:
            raise StartupError(
                f"{name} has fewer than {_LEAST_CHARS} characters, so others on the network could "
                "guess it. Choose a longer one, or listen on 127.0.0.1."
            )
    for (name, secret), (other, same) in itertools.combinations(given.items(), 2):
        if secret == same:
            raise StartupError(
                f"{name} and {other} have the same value. Choose a different secret for each."
            )


def check_state(settings: Settings) -> None:
    """Create the state folder; raise `StartupError` if others may write it or a file of it."""
    path = folder = settings.state_dir.expanduser()
    try:
        make_private(folder)
        stored = [secret_file(settings, name) for name in get_args(StoredSecret)]
        for path in filter(Path.exists, (*stored, *folder.glob("*.json"))):
            check_private(path)
    except NotPrivate as error:
        raise StartupError(
            f"The gateway reads no secrets from {path}: {error.strerror}. Delete what is not yours "
            f"there and run `chmod go-w {path}`, or set PACELINE_STATE_DIR to another folder."
        ) from None
    except OSError:
        return  # who reads or writes there tells what is wrong


def ensure_secrets(settings: Settings) -> Settings:
    """Return settings with a join token and an admin key: given, else stored, else new ones."""
    check_state(settings)
    if settings.redis_url is not None and settings.admin_key is None:
        raise StartupError(
            "Gateways that share PACELINE_REDIS_URL need the same admin key: set "
            "PACELINE_ADMIN_KEY to the same secret for all of them."
        )
    join_token = settings.join_token or _ensure_stored(settings, "join_token")
    admin_key = settings.admin_key or _ensure_stored(settings, "admin_key")
    return settings.model_copy(update={"join_token": join_token, "admin_key": admin_key})


def _ensure_stored(settings: Settings, name: StoredSecret) -> SecretStr:
    """Return the stored secret; create and store it first if necessary."""
    path = secret_file(settings, name)
    title = f"The {name.replace('_', ' ')} in {path}"
    try:
        if not path.exists():
            with exclusive_writer(path):
                if not path.exists():  # another gateway started at the same moment
                    replace_file(path, secrets.token_urlsafe(32))
        secret = path.read_text(errors="replace").strip()
    except OSError as error:
        raise StartupError(
            f"{title} cannot be read or created ({error.strerror}). "
            f"Set PACELINE_{name.upper()} or PACELINE_STATE_DIR."
        ) from None
    if not secret:
        raise StartupError(f"{title} is empty. Delete the file to create a new one.")
    return SecretStr(secret)


def secret_file(settings: Settings, name: StoredSecret) -> Path:
    """Return the path of a secret that is not given in the settings."""
    return settings.state_dir.expanduser() / name.replace("_", "-")


def secret_source(given: Settings, name: StoredSecret) -> str:
    """Return where an operator finds a secret: its variable or its file."""
    if getattr(given, name) is not None:
        return f"PACELINE_{name.upper()}"
    return str(secret_file(given, name))


def local_url(host: str, port: int) -> str:
    """Return the address that reaches the gateway from this machine: no wildcard."""
    return base_url(_LOOPBACK_OF.get(host, host), port)


def network_url(host: str, port: int) -> str:
    """Return the address of the gateway for other machines."""
    return base_url(_network_host() if host in WILDCARDS else host, port)


def _network_host() -> str:
    """Return the address of this machine on the way to others, or else any that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):  # without a default route
            # Sends nothing: connecting a datagram socket only picks the interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        request = 0xC0206921 if sys.platform == "darwin" else 0x8915  # SIOCGIFADDR
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                told = fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))
                if not is_loopback(address := socket.inet_ntoa(told[20:24])):
                    return address
    return socket.gethostname()


def is_address(host: str) -> bool:
    """Return whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
