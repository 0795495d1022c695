"""Checks before a gateway listens: addresses, secrets and the join token. Address helpers."""

from __future__ import annotations

import ipaddress
import itertools
import secrets

from pydantic import SecretStr

from gateway.config.settings import Settings
from gateway.errors import StartupError
from gateway.storage.records import exclusive_writer, replace_file
from gateway.types import fits_header
from workers.protocol import is_loopback


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
    has_admin_port = settings.admin_port is not None
    if has_admin_port and not is_loopback(settings.admin_host) and settings.admin_key is None:
        raise StartupError(
            f"Serving the admin API on {settings.admin_host} would let anyone on the network "
            "administer the gateway. Set PACELINE_ADMIN_KEY first, or leave PACELINE_ADMIN_HOST at "
            "127.0.0.1."
        )


def check_secrets(settings: Settings) -> None:
    """Raise `StartupError` for a secret that no client can send, or that is used twice."""
    by_name = {
        "PACELINE_API_KEY": settings.api_key,
        "PACELINE_ADMIN_KEY": settings.admin_key,
        "PACELINE_JOIN_TOKEN": settings.join_token,
    }
    given = {name: one.get_secret_value() for name, one in by_name.items() if one is not None}
    for name, secret in given.items():
        if not fits_header(secret):
            raise StartupError(f"{name} contains characters that an HTTP header cannot carry.")
    for (name, secret), (other, same) in itertools.combinations(given.items(), 2):
        if secret == same:
            raise StartupError(
                f"{name} and {other} have the same value. Choose a different secret for each."
            )


def ensure_join_token(settings: Settings) -> Settings:
    """Return settings with a join token: the given one, else the stored one, else a new one."""
    if settings.join_token is not None:
        return settings
    path = settings.state_dir.expanduser() / "join-token"
    try:
        if not path.exists():
            with exclusive_writer(path):
                if not path.exists():  # another gateway started at the same moment
                    replace_file(path, secrets.token_urlsafe(32))
        token = path.read_text().strip()
    except OSError as error:
        raise StartupError(
            f"The join token in {path} cannot be read or created ({error.strerror}). "
            "Set PACELINE_JOIN_TOKEN or PACELINE_STATE_DIR."
        ) from None
    if not token:
        raise StartupError(
            f"The join token in {path} is empty. Delete the file to create a new one."
        )
    return settings.model_copy(update={"join_token": SecretStr(token)})


def base_url(host: str, port: int) -> str:
    """Return a URL such as http://127.0.0.1:8000 or http://[::1]:8000."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_address(host: str) -> bool:
    """Return whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
