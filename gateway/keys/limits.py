"""What a key may use at once, in a minute and in a day: pure; whoever asks brings the time.

Tokens are reserved before they are known and settled when they are. Two promises, for any order of
requests, ends and refusals:

- Whatever window of w seconds one looks at, what was let in during it and not given back is at
  most the limit and w / 60 times the limit: one whole minute may be used at once, as the burst.
- Only what a request took beyond its reservation comes on top, and the key waits until that is
  made up for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.keys.record import Limits
from gateway.refusals import LimitReached, TokensOverLimit

_MINUTE_S = 60.0
DAY_S = 86_400
"""Days are those of UTC: the same for all gateways, and none has 23 hours."""
# Nobody knows when a running request ends.
_RETRY_RUNNING_S = 1.0

Headers = list[tuple[bytes, bytes]]


def day_of(unix_s: float) -> int:
    """Tell the number of a moment's day."""
    return int(unix_s // DAY_S)


class Bucket:
    """A budget for each minute: it refills evenly, up to one minute's worth.

    What may still come back of what was taken fills the bucket too: what would run over is no
    longer given back, of the oldest first. Else requests that wait a minute and are then refused
    would give back room that was filled again in the meantime, and double the next minute.
    """

    __slots__ = ("_at_s", "_level", "_open", "_open_sum", "_tickets", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = now_s
        self._open: dict[int, float] = {}
        """What may come back, by ticket, oldest first."""
        self._open_sum = 0.0
        self._tickets = 0

    def change(self, limit: int, now_s: float) -> None:
        """Go on with another limit; what was used up stays used up."""
        self._refill(now_s)
        self.limit = limit
        self._level = min(self._level, limit)
        self._squeeze()

    def wait_s(self, amount: int, now_s: float) -> float:
        """Tell how long it takes until so much is there; 0 where it is."""
        self._refill(now_s)
        lacking = amount - self._level
        return lacking * _MINUTE_S / self.limit if lacking > 0 else 0.0

    def take(self, amount: int) -> int:
        """Reserve what is there as of the last `wait_s`; return the ticket for `settle`."""
        self._level -= amount
        self._tickets += 1
        self._open[self._tickets] = amount
        self._open_sum += amount
        return self._tickets

    def settle(self, ticket: int, taken: int, cost: int, now_s: float) -> None:
        """Give back what was taken and not used; take what was used beyond it."""
        self._refill(now_s)
        returnable = self._open.pop(ticket, 0.0)
        self._level += min(taken - cost, returnable)
        self._open_sum = self._open_sum - returnable if self._open else 0.0

    def remaining(self, now_s: float) -> int:
        """Tell how much is there."""
        self._refill(now_s)
        return max(0, math.floor(self._level))

    def full_in_s(self) -> float:
        """Tell when it is full, as of the last look."""
        return (self.limit - self._level) * _MINUTE_S / self.limit

    def _refill(self, now_s: float) -> None:
        if now_s > self._at_s:
            refilled = self._level + (now_s - self._at_s) * self.limit / _MINUTE_S
            self._level = min(self.limit, refilled)
            self._at_s = now_s
            self._squeeze()

    def _squeeze(self) -> None:
        """Give up what would run over if it came back."""
        over = self._level + self._open_sum - self.limit
        while over > 0 and self._open:
            ticket, returnable = next(iter(self._open.items()))
            given_up = min(over, returnable)
            over -= given_up
            self._open_sum -= given_up
            if given_up < returnable:
                self._open[ticket] = returnable - given_up
            else:
                del self._open[ticket]


class DayBudget:
    """A budget for each day; what runs over midnight belongs to the day in which it ends."""

    __slots__ = ("_day", "_reserved", "_used", "limit")

    def __init__(self, limit: int, used: int, day: int) -> None:
        self.limit = limit
        self._used = used
        self._reserved = 0
        self._day = day

    def left(self, day: int) -> int:
        """Tell how much may still be reserved."""
        self._turn(day)
        return self.limit - self._used - self._reserved

    def take(self, amount: int) -> None:
        """Reserve of what is left."""
        self._reserved += amount

    def settle(self, taken: int, cost: int, day: int) -> None:
        """Enter what was used in place of what was reserved."""
        self._turn(day)
        self._reserved -= taken
        self._used += cost

    def _turn(self, day: int) -> None:
        if day > self._day:  # a clock that is set back gives no second budget
            self._day, self._used = day, 0


class Reservation(NamedTuple):
    """What one request that was let in has taken, and where."""

    tokens: int
    of_requests: tuple[Bucket, int] | None
    """The bucket and its ticket."""
    of_tokens: tuple[Bucket, int] | None
    of_day: DayBudget | None


class Allowance:
    """All limits of one key. Whoever reserves settles, exactly once and however it ends."""

    def __init__(self, limits: Limits, now_s: float, unix_s: float, used_today: int = 0) -> None:
        self.running = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._day: DayBudget | None = None
        self.change(limits, now_s, unix_s, used_today)

    def change(self, limits: Limits, now_s: float, unix_s: float, used_today: int) -> None:
        """Go on under other limits; `used_today` counts where there was none for a day."""
        self._running_limit = limits.concurrent_requests
        self._requests = _changed(self._requests, limits.requests_a_minute, now_s)
        self._tokens = _changed(self._tokens, limits.tokens_a_minute, now_s)
        if limits.tokens_a_day is None:
            self._day = None
        elif self._day is None:
            self._day = DayBudget(limits.tokens_a_day, used_today, day_of(unix_s))
        else:
            self._day.limit = limits.tokens_a_day

    def reserve(self, tokens: int, now_s: float, unix_s: float) -> Reservation:
        """Let in a request of so many tokens; raise, and take nothing, at a limit."""
        self._check(tokens, now_s, unix_s)
        self.running += 1
        requests, minute, day = self._requests, self._tokens, self._day
        if day is not None:
            day.take(tokens)
        return Reservation(
            tokens,
            None if requests is None else (requests, requests.take(1)),
            None if minute is None else (minute, minute.take(tokens)),
            day,
        )

    def settle(
        self, taken: Reservation, requests: int, tokens: int, now_s: float, unix_s: float
    ) -> None:
        """Enter what a request that was let in has cost; 0 and 0 gives all of it back."""
        self.running -= 1
        if taken.of_requests is not None:
            bucket, ticket = taken.of_requests
            bucket.settle(ticket, 1, requests, now_s)
        if taken.of_tokens is not None:
            bucket, ticket = taken.of_tokens
            bucket.settle(ticket, taken.tokens, tokens, now_s)
        if taken.of_day is not None:
            taken.of_day.settle(taken.tokens, tokens, day_of(unix_s))

    def headers(self, now_s: float, unix_s: float) -> Headers:
        """Tell limits, what is left and when it is whole again, in OpenAI's headers.

        Of tokens, the limit of which the least is left.
        """
        told: Headers = []
        if (requests := self._requests) is not None:
            left = requests.remaining(now_s)
            told += _told(b"requests", requests.limit, left, requests.full_in_s())
        tokens, day = self._tokens, self._day
        left = tokens.remaining(now_s) if tokens is not None else 0
        left_today = max(0, day.left(day_of(unix_s))) if day is not None else 0
        if tokens is not None and (day is None or left <= left_today):
            told += _told(b"tokens", tokens.limit, left, tokens.full_in_s())
        elif day is not None:
            told += _told(b"tokens", day.limit, left_today, DAY_S - unix_s % DAY_S)
        return told

    def _check(self, tokens: int, now_s: float, unix_s: float) -> None:
        minute, day = self._tokens, self._day
        for name, most in (("tokens_a_minute", minute), ("tokens_a_day", day)):
            if most is not None and tokens > most.limit:
                raise TokensOverLimit(name, most.limit, tokens)
        if self._running_limit is not None and self.running >= self._running_limit:
            raise LimitReached("concurrent_requests", self._running_limit, _RETRY_RUNNING_S)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now_s)):
            raise LimitReached("requests_a_minute", self._requests.limit, wait_s)
        if minute is not None and (wait_s := minute.wait_s(tokens, now_s)):
            raise LimitReached("tokens_a_minute", minute.limit, wait_s)
        if day is not None and tokens > day.left(day_of(unix_s)):
            raise LimitReached("tokens_a_day", day.limit, DAY_S - unix_s % DAY_S)


def _changed(bucket: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, now_s)
    bucket.change(limit, now_s)
    return bucket


def _told(what: bytes, limit: int, left: int, reset_s: float) -> Headers:
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % left),
        (b"x-ratelimit-reset-" + what, _duration(reset_s)),
    ]


def _duration(seconds: float) -> bytes:
    """Write a duration as OpenAI does: 120ms, 8s, 6m0s, 3h2m1s; never shorter than it is."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    if whole < 60:
        return b"%ds" % whole
    if whole < 3600:
        return b"%dm%ds" % divmod(whole, 60)
    return b"%dh%dm%ds" % (whole // 3600, whole % 3600 // 60, whole % 60)
