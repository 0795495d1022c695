"""Who asks, and how a request of theirs stands in a waiting line."""

from __future__ import annotations

from gateway.client import Scope, header
from gateway.domain import Caller
from gateway.keys.keyring import Holder
from gateway.refusals import FieldInvalid
from policies.document import PolicyDocument, Priority

PRIORITY_HEADER = "x-paceline-priority"


def read_caller(scope: Scope, policy: PolicyDocument, holder: Holder) -> Caller:
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
