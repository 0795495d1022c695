"""What refills with time: a budget for each minute, and one for each day. Pure."""

from __future__ import annotations

import math

from gateway.keys.limit_headers import Names, limit_headers
from gateway.types import Headers

_MINUTE_S = 60.0
DAY_S = 86_400
"""Days are those of UTC: the same for all gateways, and none has 23 hours."""


def day_of(unix_s: float) -> int:
    """Tell the number of a moment's day."""
    return int(unix_s // DAY_S)


class Bucket:
    """A budget for each minute: it refills evenly, up to one minute's worth.

    What may still come back of what was taken fills the bucket too: what would run over is no
    longer given back. Else requests that wait a minute and are then refused would give back room
    that was filled again in the meantime, and double the next minute.
    """

    __slots__ = ("_at_s", "_level", "_open", "_rate", "_returnable", "_spilled", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self._at_s = now_s
        self._open = 0
        self._returnable = 0.0
        """What may come back, at most, of all that is open."""
        self._spilled = 0.0
        """What was no longer given back, ever: each that is open loses what was spilled since."""
        self._level = float(limit)
        self._rate = 0.0
        self.change(limit, now_s)

    def change(self, limit: int, now_s: float) -> None:
        """Go on with another limit; what was used up stays used up."""
        self.refill(now_s)
        self.limit = limit
        self._rate = limit / _MINUTE_S
        self._spill()

    def refill(self, now_s: float) -> None:
        """Come to this moment; everything else is as of the last one."""
        elapsed_s = now_s - self._at_s
        if elapsed_s > 0:
            self._at_s = now_s
            self._level += elapsed_s * self._rate
            self._spill()

    def _spill(self) -> None:
        """Let go of what does not fit in."""
        over = self._level + self._returnable - self.limit
        if over > 0:
            spilled = min(over, self._returnable)
            self._returnable -= spilled
            self._spilled += spilled
            if self._level > self.limit:
                self._level = float(self.limit)

    def charge(self, amount: int) -> None:
        """Take what was used elsewhere; less than nothing was given back there."""
        self._level -= amount
        self._spill()

    def wait_s(self, amount: int) -> float:
        """Tell how long it takes until so much is there, or all there can be; 0 where it is."""
        lacking = min(amount, self.limit) - self._level
        return lacking / self._rate if lacking > 0 else 0.0

    def take(self, amount: int) -> float:
        """Reserve what is there; return the ticket for `settle`."""
        self._level -= amount
        self._returnable += amount
        self._open += 1
        return self._spilled

    def settle(self, ticket: float, taken: int, cost: int) -> None:
        """Give back what was taken and not used; take what was used beyond it."""
        returnable = max(0.0, taken - (self._spilled - ticket))
        self._level += min(taken - cost, returnable)
        self._open -= 1
        self._returnable = self._returnable - returnable if self._open else 0.0

    @property
    def left(self) -> int:
        """How much is there."""
        return max(0, math.floor(self._level))

    def headers(self, names: Names) -> Headers:
        """Tell the limit, what is left, and when it is full."""
        return limit_headers(names, self.limit, self.left, (self.limit - self._level) / self._rate)


class DayBudget:
    """A budget for each day; what runs over midnight belongs to the day in which it ends."""

    __slots__ = ("_day", "_gateways", "_share", "elsewhere", "limit", "mine", "reserved", "used")

    def __init__(self, limit: int, used: int, day: int) -> None:
        self._day = day
        self.limit = limit
        self.used = used
        self.mine = 0
        """Of what is used, what was used at this gateway in this life."""
        self.reserved = 0
        self.elsewhere = 0
        """Reserved at other gateways."""
        self._share: int | None = None
        """All that may be used while nobody knows what is used elsewhere."""
        self._gateways = 1

    @property
    def day(self) -> int:
        """The number of the day that is counted."""
        return self._day

    @property
    def left(self) -> int:
        """How much may still be reserved."""
        taken = self.used + self.reserved
        left = self.limit - taken - self.elsewhere
        return left if self._share is None else min(left, self._share - taken)

    def share(self, gateways: int) -> None:
        """Divide what is left between gateways that cannot hear of each other; 1: they can."""
        if gateways == 1:
            self._share = None
        elif self._share is None:
            self._gateways = gateways
            self._share = self.used + self.reserved + max(0, self.left) // gateways
            self.elsewhere = 0

    def turn(self, unix_s: float) -> None:
        """Come to the day of this moment; a clock that is set back gives no second budget."""
        if (day := day_of(unix_s)) > self._day:
            self._day, self.used, self.mine = day, 0, 0
            if self._share is not None:
                self._share = self.reserved + self.limit // self._gateways
