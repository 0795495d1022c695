"""Checks before a gateway listens: addresses, secrets and the join token."""

from __future__ import annotations

import hmac
import ipaddress
import itertools
import os
import secrets
from pathlib import Path

from gateway.config.settings import Settings
from gateway.errors import StartupError
from gateway.types import fits_header
from workers.protocol import is_loopback


def check_binding(settings: Settings, *, keyed: bool) -> None:
    """Refuse to listen beyond loopback unless clients need a key, and admins theirs."""
    if not is_loopback(settings.host) and not keyed:
        raise StartupError(
            f"Listening on {settings.host} would let anyone on the network use the models: "
            "set PACELINE_API_KEY first, or stay on 127.0.0.1 and make keys there with "
            "`paceline keys create`."
        )
    apart = settings.admin_port is not None
    if apart and not is_loopback(settings.admin_host) and settings.admin_key is None:
        raise StartupError(
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
            raise StartupError(f"{name} holds what no HTTP header can.")
    for (name, secret), (other, same) in itertools.combinations(given.items(), 2):
        if hmac.compare_digest(
            secret.get_secret_value().encode(), same.get_secret_value().encode()
        ):
            raise StartupError(f"{name} and {other} are the same; each must be one of its own.")


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
        raise StartupError(
            f"The join token in {path} cannot be read or made ({error.strerror}); "
            "set PACELINE_JOIN_TOKEN or PACELINE_STATE_DIR."
        ) from None
    if not token:
        raise StartupError(f"The join token in {path} is empty; delete the file to make a new one.")
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
