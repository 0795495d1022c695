"""Who asks: how their requests stand in a waiting line, and what a policy may know of them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.auth.api_keys import ApiKey
from gateway.errors import FieldInvalid
from gateway.http.downstream import Scope, header
from gateway.types import Caller
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument, Priority

PRIORITY_HEADER = "x-paceline-priority"
# No policy can ask for a longer one, and what is known of the last requests is kept.
_VALUE_LIMIT_BYTES = 128


def read_caller(scope: Scope, policy: PolicyDocument, holder: ApiKey) -> Caller:
    """Read who asks; raise `FieldInvalid` for a priority that policy or key do not let them have.

    All requests of a key share one place in line, and so do all without one: nobody gets two by
    asking twice.
    """
    asked = header(scope, PRIORITY_HEADER.encode())
    if asked is None:
        return holder.caller
    may_ask = [priority for priority in policy.priorities if priority in holder.priorities]
    for priority in may_ask:
        if asked == priority.encode():
            return holder.caller._replace(priority=Priority(priority))
    allowed = ", ".join(may_ask) or "nothing"
    raise FieldInvalid(f"'{PRIORITY_HEADER}' must be one of: {allowed}.", param=PRIORITY_HEADER)


def read_asker(
    scope: Scope, caller: Caller, headers: Iterable[str], minute_of_week: int
) -> CallerAttributes:
    """Tell what a policy may know of who asks; of their headers only these."""
    found = {}
    for name in headers:
        value = header(scope, name.encode())
        if value is not None and len(value) <= _VALUE_LIMIT_BYTES:
            found[name] = value.decode("latin-1")
    return CallerAttributes(caller.key, caller.team, found or ANONYMOUS.headers, minute_of_week)
