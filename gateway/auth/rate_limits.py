"""What a key may use at once, in a minute and in a day: pure; whoever asks brings the time.

Tokens are reserved before they are known and settled when they are. Two promises, for any order of
requests, ends and refusals:

- Whatever window of w seconds one looks at, what was let in during it and not given back is at
  most the limit and w / 60 times the limit: one whole minute may be used at once, as the burst.
- Only what a request took beyond its reservation comes on top, and the key waits until that is
  made up for.

What refills with time: a budget for each minute, and one for each day. Pure.

Limits in the headers of answers, as OpenAI writes them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.auth.records import Limits
from gateway.errors import LimitReached, TokensOverLimit
from gateway.types import Headers

HeaderNames = tuple[bytes, bytes, bytes]
"""Of the limit, of what is left, and of the time until it is whole again."""
OF_REQUESTS: HeaderNames = (
    b"x-ratelimit-limit-requests",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-reset-requests",
)
OF_TOKENS: HeaderNames = (
    b"x-ratelimit-limit-tokens",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-tokens",
)


def limit_headers(names: HeaderNames, limit: int, left: int, full_in_s: float) -> Headers:
    """Tell a limit, what is left of it, and when it is whole again."""
    of_limit, of_left, of_reset = names
    return [
        (of_limit, b"%d" % limit),
        (of_left, b"%d" % left),
        (of_reset, _duration(full_in_s)),
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


_MINUTE_S = 60.0
DAY_S = 86_400
"""Days are those of UTC: the same for all gateways, and none has 23 hours."""


def day_of(unix_s: float) -> int:
    """Tell the number of a moment's day."""
    return int(unix_s // DAY_S)


class TokenBucket:
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
        self.set_limit(limit, now_s)

    def set_limit(self, limit: int, now_s: float) -> None:
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
    def remaining(self) -> int:
        """How much is there."""
        return max(0, math.floor(self._level))

    def headers(self, names: HeaderNames) -> Headers:
        """Tell the limit, what is left, and when it is full."""
        return limit_headers(
            names, self.limit, self.remaining, (self.limit - self._level) / self._rate
        )


class DailyBudget:
    """A budget for each day; what runs over midnight belongs to the day in which it ends."""

    __slots__ = (
        "_day",
        "_gateways",
        "_share",
        "limit",
        "reserved",
        "reserved_remotely",
        "used",
        "used_locally",
    )

    def __init__(self, limit: int, used: int, day: int) -> None:
        self._day = day
        self.limit = limit
        self.used = used
        self.used_locally = 0
        """Of what is used, what was used at this gateway in this life."""
        self.reserved = 0
        self.reserved_remotely = 0
        """Reserved at other gateways."""
        self._share: int | None = None
        """All that may be used while nobody knows what is used elsewhere."""
        self._gateways = 1

    @property
    def day(self) -> int:
        """The number of the day that is counted."""
        return self._day

    @property
    def remaining(self) -> int:
        """How much may still be reserved."""
        taken = self.used + self.reserved
        left = self.limit - taken - self.reserved_remotely
        return left if self._share is None else min(left, self._share - taken)

    def divide(self, gateways: int) -> None:
        """Divide what is left between gateways that cannot hear of each other; 1: they can."""
        if gateways == 1:
            self._share = None
        elif self._share is None:
            self._gateways = gateways
            self._share = self.used + self.reserved + max(0, self.remaining) // gateways
            self.reserved_remotely = 0

    def roll_over(self, unix_s: float) -> None:
        """Come to the day of this moment; a clock that is set back gives no second budget."""
        if (day := day_of(unix_s)) > self._day:
            self._day, self.used, self.used_locally = day, 0, 0
            if self._share is not None:
                self._share = self.reserved + self.limit // self._gateways


# Nobody knows when a running request ends.
_RETRY_RUNNING_S = 1.0


class Reservation(NamedTuple):
    """What one request that was let in has taken, and where."""

    tokens: int
    of_requests: TokenBucket | None
    requests_ticket: float
    of_tokens: TokenBucket | None
    tokens_ticket: float
    of_day: DailyBudget | None


class AdmittedTotals(NamedTuple):
    """What one gateway has let in for a key in this life, as others hear of it."""

    requests: int
    tokens: int
    day: int
    day_tokens: int
    """Used on that day."""
    reserved: int
    """Of that day's budget, for requests that run."""
    running: int


class RateLimiter:
    """All limits of one key. Whoever reserves settles, exactly once and however it ends."""

    def __init__(self, limits: Limits, now_s: float, unix_s: float, used_today: int = 0) -> None:
        self.running = 0
        self._elsewhere = 0
        """Requests that run at other gateways."""
        self._gateways = 1
        """Those between which the limits are divided."""
        self._let_in = 0
        self._taken = 0
        """Tokens; both less what was given back."""
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._day: DailyBudget | None = None
        self.update(limits, now_s, unix_s, used_today)

    def update(self, limits: Limits, now_s: float, unix_s: float, used_today: int) -> None:
        """Go on under other limits; `used_today` counts where there was none for a day."""
        self._limits = limits
        self._divide(now_s)
        if limits.tokens_a_day is None:
            self._day = None
        elif self._day is None:
            self._day = DailyBudget(limits.tokens_a_day, used_today, day_of(unix_s))
            self._day.divide(self._gateways)
        else:
            self._day.limit = limits.tokens_a_day

    def divide(self, gateways: int, now_s: float) -> None:
        """Divide all limits between so many gateways, for as long as they hear nothing of others.

        1: they hear of each other, and each one subtracts what the others use.
        """
        if gateways == self._gateways:
            return
        self._gateways = gateways
        self._divide(now_s)
        if self._day is not None:
            self._day.divide(gateways)
        if gateways > 1:
            self._elsewhere = 0

    def _divide(self, now_s: float) -> None:
        limits, gateways = self._limits, self._gateways
        self._at_once = _part(limits.concurrent_requests, gateways)
        self._requests = _changed(self._requests, _part(limits.requests_a_minute, gateways), now_s)
        self._tokens = _changed(self._tokens, _part(limits.tokens_a_minute, gateways), now_s)

    def admitted(self) -> AdmittedTotals:
        """Tell others what this gateway has let in."""
        day = self._day
        counted = (0, 0, 0) if day is None else (day.day, day.used_locally, day.reserved)
        return AdmittedTotals(self._let_in, self._taken, *counted, self.running)

    def charge_remote(
        self, requests: int, tokens: int, day: int, day_tokens: int, now_s: float
    ) -> None:
        """Take what other gateways have let in since the last time, of the day on that day."""
        if self._requests is not None:
            self._requests.refill(now_s)
            self._requests.charge(requests)
        if self._tokens is not None:
            self._tokens.refill(now_s)
            self._tokens.charge(tokens)
        if self._day is not None and day == self._day.day:
            self._day.used += day_tokens

    def set_remote_load(self, running: int, reserved: int) -> None:
        """Hear what runs at other gateways now, and what is reserved there of the day's budget."""
        self._elsewhere = running
        if self._day is not None:
            self._day.reserved_remotely = reserved

    def reserve(self, tokens: int, now_s: float, unix_s: float) -> Reservation:
        """Let in a request of so many tokens; raise, and take nothing, at a limit."""
        requests, minute, day = self._requests, self._tokens, self._day
        if minute is not None:
            minute.refill(now_s)
            whole = self._limits.tokens_a_minute or minute.limit
            if tokens > whole:
                raise TokensOverLimit("tokens_a_minute", whole, tokens)
        if day is not None:
            day.roll_over(unix_s)
            if tokens > day.limit:
                raise TokensOverLimit("tokens_a_day", day.limit, tokens)
        if self._at_once is not None and self.running + self._elsewhere >= self._at_once:
            raise LimitReached("concurrent_requests", self._at_once, _RETRY_RUNNING_S)
        if requests is not None:
            requests.refill(now_s)
            if wait_s := requests.wait_s(1):
                raise LimitReached("requests_a_minute", requests.limit, wait_s)
        if minute is not None and (wait_s := minute.wait_s(tokens)):
            raise LimitReached("tokens_a_minute", minute.limit, wait_s)
        if day is not None and tokens > day.remaining:
            raise LimitReached("tokens_a_day", day.limit, DAY_S - unix_s % DAY_S)
        self.running += 1
        self._let_in += 1
        self._taken += tokens
        if day is not None:
            day.reserved += tokens
        return Reservation(
            tokens,
            requests,
            requests.take(1) if requests is not None else 0.0,
            minute,
            minute.take(tokens) if minute is not None else 0.0,
            day,
        )

    def settle(
        self, taken: Reservation, requests: int, tokens: int, now_s: float, unix_s: float
    ) -> None:
        """Enter what a request that was let in has cost; 0 and 0 gives all of it back."""
        reserved, of_requests, requests_ticket, of_tokens, tokens_ticket, of_day = taken
        self.running -= 1
        self._let_in += requests - 1
        self._taken += tokens - reserved
        if of_requests is not None:
            of_requests.refill(now_s)
            of_requests.settle(requests_ticket, 1, requests)
        if of_tokens is not None:
            of_tokens.refill(now_s)
            of_tokens.settle(tokens_ticket, reserved, tokens)
        if of_day is not None:
            of_day.roll_over(unix_s)
            of_day.reserved -= reserved
            of_day.used += tokens
            of_day.used_locally += tokens

    def headers(self, now_s: float, unix_s: float) -> Headers:
        """Tell limits, what is left and when it is whole again, in OpenAI's headers.

        Of tokens, the limit of which the least is left.
        """
        requests, minute, day = self._requests, self._tokens, self._day
        told: Headers = []
        if requests is not None:
            requests.refill(now_s)
            told = requests.headers(OF_REQUESTS)
        if minute is not None:
            minute.refill(now_s)
        if day is not None:
            day.roll_over(unix_s)
        if minute is not None and (day is None or minute.remaining <= day.remaining):
            told += minute.headers(OF_TOKENS)
        elif day is not None:
            told += limit_headers(
                OF_TOKENS, day.limit, max(0, day.remaining), DAY_S - unix_s % DAY_S
            )
        return told


def _part(limit: int | None, gateways: int) -> int | None:
    """Divide a limit; everybody may have one at least."""
    return None if limit is None else max(1, limit // gateways)


def _changed(bucket: TokenBucket | None, limit: int | None, now_s: float) -> TokenBucket | None:
    if limit is None:
        return None
    if bucket is None:
        return TokenBucket(limit, now_s)
    bucket.set_limit(limit, now_s)
    return bucket
