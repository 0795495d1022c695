"""Addresses: base URLs of servers, and addresses that only this machine reaches."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

WILDCARDS = frozenset(("0.0.0.0", "::", ""))  # noqa: S104 - compared, not bound
"""Hosts that make a server listen on all addresses."""

_URL = re.compile(r"https?://[!-~]{1,2000}")


def _check_url(url: str) -> str:
    """Reject a URL that no request can be sent to."""
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0  # an invalid port raises
    except ValueError:
        usable = False
    usable = usable and _URL.fullmatch(url) is not None
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("must be like http://192.168.1.20:9200")
    return url


BaseUrl = Annotated[str, AfterValidator(_check_url)]


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address; of names, only localhost does."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def base_url(host: str, port: int) -> str:
    """Return a URL such as http://127.0.0.1:8000 or http://[::1]:8000."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
