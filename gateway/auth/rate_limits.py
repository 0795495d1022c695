"""Rate limits of one key: requests at once, per minute, tokens per minute and per day. Pure.

Tokens are reserved before a request and settled after it. For any order of requests, results and
rejections:

- In any window of w seconds, what was admitted and not refunded is at most the limit and w / 60
  times the limit: one whole minute may be used at once, as the burst.
- Only what a request used beyond its reservation comes on top, and the key waits until the level
  has made up for that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.auth.records import Limits
from gateway.errors import LimitReached, TokensOverLimit
from gateway.types import LimitState

_MINUTE_S = 60.0
DAY_S = 86_400
"""Days are in UTC: the same for all gateways, and none has 23 hours."""


def day_of(unix_s: float) -> int:
    """Return the number of the day since 1970."""
    return int(unix_s // DAY_S)


class TokenBucket:
    """A budget per minute that refills evenly, up to the budget of one minute.

    Refundable reservations fill the bucket too, and the overflow is no longer refundable.
    Otherwise requests that wait a minute and are then rejected would refund room that has been
    refilled in the meantime, and double the next minute.
    """

    __slots__ = ("_at_s", "_level", "_open", "_rate", "_refundable", "_spilled", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self._at_s = now_s
        self._open = 0
        self._refundable = 0.0
        """The most that all open reservations may refund."""
        self._spilled = 0.0
        """The total overflow; each open reservation loses the overflow since it was made."""
        self._level = float(limit)
        self._rate = 0.0
        self.set_limit(limit, now_s)

    def set_limit(self, limit: int, now_s: float) -> None:
        """Continue with another limit, and keep the usage."""
        self.refill(now_s)
        self.limit = limit
        self._rate = limit / _MINUTE_S
        self._spill()

    def refill(self, now_s: float) -> None:
        """Refill up to this moment; all other methods use the level of the last refill."""
        elapsed_s = now_s - self._at_s
        if elapsed_s > 0:
            self._at_s = now_s
            self._level += elapsed_s * self._rate
            self._spill()

    def _spill(self) -> None:
        """Drop everything above the limit, refunds first."""
        over = self._level + self._refundable - self.limit
        if over > 0:
            spilled = min(over, self._refundable)
            self._refundable -= spilled
            self._spilled += spilled
            if self._level > self.limit:
                self._level = float(self.limit)

    def charge(self, amount: int) -> None:
        """Charge tokens that other gateways admitted; a negative amount was refunded there."""
        self._level -= amount
        self._spill()

    def wait_s(self, amount: int) -> float:
        """Return the time until the amount, or the whole limit if that is less, is available."""
        lacking = min(amount, self.limit) - self._level
        return lacking / self._rate if lacking > 0 else 0.0

    def take(self, amount: int) -> float:
        """Reserve an amount; return the ticket for `settle`."""
        self._level -= amount
        self._refundable += amount
        self._open += 1
        return self._spilled

    def settle(self, ticket: float, taken: int, cost: int) -> None:
        """Refund the unused part of a reservation, or charge the usage beyond it."""
        refundable = max(0.0, taken - (self._spilled - ticket))
        self._level += min(taken - cost, refundable)
        self._open -= 1
        self._refundable = self._refundable - refundable if self._open else 0.0

    @property
    def remaining(self) -> int:
        """Return the available amount."""
        return max(0, math.floor(self._level))

    def state(self, unit: str) -> LimitState:
        """Return how much remains of this limit."""
        full_in_s = (self.limit - self._level) / self._rate
        return LimitState(unit, self.limit, self.remaining, full_in_s)


_KNOWN_DAYS = 8


class DailyBudget:
    """A budget per day; a request counts on the day of its end."""

    def __init__(self, limit: int, used: int, day: int) -> None:
        self.day = day
        """The number of the current day."""
        self.limit = limit
        self.used = used
        self.used_locally = 0
        """The part of `used` by this process."""
        self.reserved = 0
        self.reserved_remotely = 0
        """By running requests of other gateways."""
        self._used_on: dict[int, int] = {}
        """The usage on the last few other days that the clock has shown."""
        self._share: int | None = None
        """The bound of `used` and `reserved` while this gateway is cut off; None: not cut off."""
        self._gateways = 1

    @property
    def remaining(self) -> int:
        """Return how much may still be reserved."""
        taken = self.used + self.reserved
        left = self.limit - taken - self.reserved_remotely
        return left if self._share is None else min(left, self._share - taken)

    def divide(self, gateways: int) -> None:
        """Divide the remainder between gateways without exchange; 1: the exchange works."""
        if gateways == 1:
            self._share = None
        elif self._share is None:
            self._gateways = gateways
            self._share = self.used + self.reserved + max(0, self.remaining) // gateways
            self.reserved_remotely = 0

    def roll_over(self, unix_s: float) -> None:
        """Continue on the day of this moment; each date that the clock shows has one budget.

        Setting the clock back adds nothing: an earlier day continues with its usage.
        """
        if (day := day_of(unix_s)) == self.day:
            return
        used = self._used_on.pop(day, 0)
        self._used_on[self.day] = self.used
        if len(self._used_on) > _KNOWN_DAYS:
            del self._used_on[min(self._used_on)]
        if day < self.day:
            used = max(used, self.used)
        elif self._share is not None:
            self._share = used + self.reserved + max(0, self.limit - used) // self._gateways
        self.day, self.used, self.used_locally = day, used, 0


# The end of a running request cannot be predicted.
_RETRY_RUNNING_S = 1.0


class Reservation(NamedTuple):
    """The reservations of one admitted request."""

    tokens: int
    of_requests: tuple[TokenBucket, float] | None
    """With the ticket for `settle`."""
    of_tokens: tuple[TokenBucket, float] | None
    of_day: DailyBudget | None


class AdmittedTotals(NamedTuple):
    """The requests and tokens that one gateway process has admitted for a key, less refunds."""

    requests: int
    tokens: int
    day: int
    day_tokens: int
    """Used on that day."""
    reserved: int
    """Of the budget of that day, by running requests."""
    running: int


class RateLimiter:
    """All limits of one key. Each reservation is settled exactly once."""

    def __init__(self, limits: Limits, now_s: float, unix_s: float, used_today: int = 0) -> None:
        self.running = 0
        self._remote_running = 0
        """Running requests of other gateways."""
        self._gateways = 1
        """The gateways between which the limits are divided."""
        self._admitted_requests = 0
        self._admitted_tokens = 0
        """Tokens; both less refunds."""
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._day: DailyBudget | None = None
        self.update(limits, now_s, unix_s, used_today)

    def update(self, limits: Limits, now_s: float, unix_s: float, used_today: int) -> None:
        """Continue under other limits; `used_today` counts if there was no daily limit."""
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
        """Divide all limits between gateways for as long as their exchange fails.

        1: the exchange works, and each gateway charges the admissions of the others.
        """
        if gateways == self._gateways:
            return
        self._gateways = gateways
        self._divide(now_s)
        if self._day is not None:
            self._day.divide(gateways)
        if gateways > 1:
            self._remote_running = 0

    def _divide(self, now_s: float) -> None:
        limits, gateways = self._limits, self._gateways
        self._max_running = _share(limits.concurrent_requests, gateways)
        self._requests = _with_limit(
            self._requests, _share(limits.requests_a_minute, gateways), now_s
        )
        self._tokens = _with_limit(self._tokens, _share(limits.tokens_a_minute, gateways), now_s)

    @property
    def token_limit(self) -> int | None:
        """Return the lower of the limits on tokens; None without any."""
        limits = (self._limits.tokens_a_minute, self._limits.tokens_a_day)
        return min((limit for limit in limits if limit is not None), default=None)

    def admitted(self) -> AdmittedTotals:
        """Return the admissions of this gateway."""
        day = self._day
        counted = (0, 0, 0) if day is None else (day.day, day.used_locally, day.reserved)
        return AdmittedTotals(
            self._admitted_requests, self._admitted_tokens, *counted, self.running
        )

    def charge_remote(
        self, requests: int, tokens: int, day: int, day_tokens: int, now_s: float
    ) -> None:
        """Charge the admissions of other gateways since the last exchange."""
        for bucket, amount in ((self._requests, requests), (self._tokens, tokens)):
            if bucket is not None:
                bucket.refill(now_s)
                bucket.charge(amount)
        if self._day is not None and day == self._day.day:
            self._day.used += day_tokens

    def set_remote_load(self, running: int, reserved: int) -> None:
        """Set the running requests of other gateways, and their reservations for the day."""
        self._remote_running = running
        if self._day is not None:
            self._day.reserved_remotely = reserved

    def reserve(self, tokens: int, now_s: float, unix_s: float) -> Reservation:
        """Admit a request of so many tokens; raise, and reserve nothing, at a limit."""
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
        if (
            self._max_running is not None
            and self.running + self._remote_running >= self._max_running
        ):
            raise LimitReached("concurrent_requests", self._max_running, _RETRY_RUNNING_S)
        if requests is not None:
            requests.refill(now_s)
            if wait_s := requests.wait_s(1):
                raise LimitReached("requests_a_minute", requests.limit, wait_s)
        if minute is not None and (wait_s := minute.wait_s(tokens)):
            raise LimitReached("tokens_a_minute", minute.limit, wait_s)
        if day is not None and tokens > day.remaining:
            raise LimitReached("tokens_a_day", day.limit, DAY_S - unix_s % DAY_S)
        self.running += 1
        self._admitted_requests += 1
        self._admitted_tokens += tokens
        if day is not None:
            day.reserved += tokens
        return Reservation(
            tokens,
            (requests, requests.take(1)) if requests is not None else None,
            (minute, minute.take(tokens)) if minute is not None else None,
            day,
        )

    def settle(
        self, taken: Reservation, requests: int, tokens: int, now_s: float, unix_s: float
    ) -> None:
        """Charge the cost of an admitted request; 0 and 0 refunds all of it."""
        reserved, of_requests, of_tokens, of_day = taken
        self.running -= 1
        self._admitted_requests += requests - 1
        self._admitted_tokens += tokens - reserved
        for of_minute, amount, cost in ((of_requests, 1, requests), (of_tokens, reserved, tokens)):
            if of_minute is not None:
                bucket, ticket = of_minute
                bucket.refill(now_s)
                bucket.settle(ticket, amount, cost)
        if of_day is not None:
            of_day.roll_over(unix_s)
            of_day.reserved -= reserved
            of_day.used += tokens
            of_day.used_locally += tokens

    def states(self, now_s: float, unix_s: float) -> list[LimitState]:
        """Return how much remains of requests and tokens; of both token limits the nearer one."""
        requests, minute, day = self._requests, self._tokens, self._day
        states = []
        if requests is not None:
            requests.refill(now_s)
            states.append(requests.state("requests"))
        if minute is not None:
            minute.refill(now_s)
        if day is not None:
            day.roll_over(unix_s)
        if minute is not None and (day is None or minute.remaining <= day.remaining):
            states.append(minute.state("tokens"))
        elif day is not None:
            full_in_s = DAY_S - unix_s % DAY_S
            states.append(LimitState("tokens", day.limit, max(0, day.remaining), full_in_s))
        return states


def _share(limit: int | None, gateways: int) -> int | None:
    """Return the share of a limit, at least one."""
    return None if limit is None else max(1, limit // gateways)


def _with_limit(bucket: TokenBucket | None, limit: int | None, now_s: float) -> TokenBucket | None:
    if limit is None:
        return None
    if bucket is None:
        return TokenBucket(limit, now_s)
    bucket.set_limit(limit, now_s)
    return bucket
