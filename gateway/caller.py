"""Who asks: how their requests stand in a waiting line, and what a policy may know of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gateway.client import Scope, header
from gateway.domain import Caller
from gateway.refusals import FieldInvalid
from policies.asker import SOMEBODY, Asker
from policies.document import PolicyDocument, Priority

PRIORITY_HEADER = "x-paceline-priority"
_WITH_KEY = Caller(client="key")
_ANONYMOUS = Caller(client="anonymous")
# No policy can ask for a longer one, and what is known of the last requests is kept.
_VALUE_LIMIT_BYTES = 128


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


class WeekClock:
    """Tells the minute of the week in local time, from Monday 00:00; worked out once a minute.

    `now` gives seconds since 1970.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._minute = -1
        self._of_week = 0

    def minute(self) -> int:
        """Tell the minute of the week that it is now."""
        minute = int(self._now() // 60)
        if minute != self._minute:
            local = time.localtime(minute * 60)
            self._of_week = (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min
            self._minute = minute
        return self._of_week


def read_asker(scope: Scope, caller: Caller, headers: Iterable[str], minute_of_week: int) -> Asker:
    """Tell what a policy may know of who asks; of their headers only these."""
    found = {}
    for name in headers:
        value = header(scope, name.encode())
        if value is not None and len(value) <= _VALUE_LIMIT_BYTES:
            found[name] = value.decode("latin-1")
    return Asker(caller.key, caller.team, found or SOMEBODY.headers, minute_of_week)
