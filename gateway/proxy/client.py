"""The client of a request: its place in the queue, and its attributes for policy rules."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv6Address, IPv6Network

from starlette.types import Scope

from gateway.auth.api_keys import ApiKey
from gateway.config.startup_checks import is_address
from gateway.errors import FieldInvalid
from gateway.http.downstream import header
from gateway.types import Caller
from paceline.request.profile import Priority
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument

PRIORITY_HEADER = "x-paceline-priority"
# No policy can match a longer one, and the attributes of recent requests are stored.
_VALUE_LIMIT_BYTES = 128


def read_caller(scope: Scope, policy: PolicyDocument, api_key: ApiKey) -> Caller:
    """Read caller and priority; raise `FieldInvalid` for a priority that policy or key forbid.

    All requests of a key share one place in the queue, and so do all requests without a key.
    """
    requested = header(scope, PRIORITY_HEADER.encode())
    if requested is None:
        return api_key.caller
    priority = requested.decode("latin-1")
    permitted = [name for name in policy.priorities if name in api_key.priorities]
    if priority in permitted:
        return api_key.caller._replace(priority=Priority(priority))
    allowed = ", ".join(permitted) or "nothing"
    raise FieldInvalid(f"'{PRIORITY_HEADER}' must be one of: {allowed}.", param=PRIORITY_HEADER)


def peer_address(scope: Scope) -> str:
    """Return the address of the connection; empty if it is unknown."""
    address: str = (scope.get("client") or ("", 0))[0]
    return address.removeprefix("::ffff:")


def peer_network(scope: Scope) -> str:
    """Return the address that limits count: with IPv6 the first 64 bits, which one machine may own.

    On a local link all machines share these bits, so there it is the whole address.
    """
    peer = peer_address(scope)
    try:
        address = IPv6Address(peer)
    except ValueError:
        return peer
    return peer if address.is_link_local else str(IPv6Network((address, 64), strict=False))


def client_address(scope: Scope) -> str:
    """Return where a request comes from, for people: a client may claim to be a proxy."""
    forwarded = (header(scope, b"x-forwarded-for") or b"").decode("latin-1")
    origin, peer = forwarded.rpartition(",")[2].strip(), peer_address(scope)
    # Behind a '%' an address may have any text.
    return f"{origin} through {peer}" if is_address(origin) and "%" not in origin else peer


def read_attributes(
    scope: Scope, caller: Caller, headers: Iterable[str], minute_of_week: int
) -> CallerAttributes:
    """Return the properties that policy rules match: key, team, headers, minute of the week."""
    values = {}
    for name in headers:
        value = header(scope, name.encode())
        if value is not None and len(value) <= _VALUE_LIMIT_BYTES:
            try:
                values[name] = value.decode()  # as the policy is written
            except UnicodeDecodeError:
                values[name] = value.decode("latin-1")
    return CallerAttributes(caller.key, caller.team, values or ANONYMOUS.headers, minute_of_week)
