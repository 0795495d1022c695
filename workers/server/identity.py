"""Who a worker is on the network: its name, and the address others reach it at."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

DEFAULT_HOST = "127.0.0.1"
_WILDCARDS = frozenset(("0.0.0.0", "::", ""))  # noqa: S104 - recognised, not listened on


def default_worker_id(hostname: str, port: int) -> str:
    """Name a worker after its machine and port: stable over restarts, two on one host differ."""
    short = re.sub(r"[^A-Za-z0-9-]+", "-", hostname.partition(".")[0]).strip("-") or "worker"
    return f"{short[:50]}-{port}"


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches the host; a name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def source_address_towards(url: str) -> str:
    """Return this machine's address as the host of `url` sees it; raise OSError without a way."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, protocol, _, address = socket.getaddrinfo(
        parts.hostname, port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket only picks a route here, nothing is sent
        return str(probe.getsockname()[0])


def advertised_url(host: str, port: int, gateway_url: str | None) -> str:
    """Return the URL a gateway reaches this worker at, when it listens on `host`."""
    if host in _WILDCARDS:
        host = source_address_towards(gateway_url) if gateway_url else socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
