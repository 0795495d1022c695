"""Who asks, and how a request of theirs stands in a waiting line."""

from __future__ import annotations

from gateway.client import Scope, header
from gateway.domain import Caller
from gateway.refusals import FieldInvalid
from policies.document import PolicyDocument, Priority

PRIORITY_HEADER = "x-paceline-priority"
_WITH_KEY = Caller(client="key")
_ANONYMOUS = Caller(client="anonymous")


def read_caller(scope: Scope, policy: PolicyDocument, *, keyed: bool) -> Caller:
    """Read who asks; raise `FieldInvalid` for a priority that the policy does not let them ask for.

    Those without a key share one place in line, so that nobody gets two by asking twice.
    """
    caller = _WITH_KEY if keyed else _ANONYMOUS
    asked = header(scope, PRIORITY_HEADER.encode())
    if asked is None:
        return caller
    for priority in policy.priorities:
        if asked == priority.encode():
            return caller._replace(priority=Priority(priority))
    allowed = ", ".join(policy.priorities) or "nothing"
    raise FieldInvalid(f"'{PRIORITY_HEADER}' must be one of: {allowed}.", param=PRIORITY_HEADER)
