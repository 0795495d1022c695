"""What a key may use at once, in a minute and in a day: pure; whoever asks brings the time.

Tokens are reserved before they are known and settled when they are. Two promises, for any order of
requests, ends and refusals:

- Whatever window of w seconds one looks at, what was let in during it and not given back is at
  most the limit and w / 60 times the limit: one whole minute may be used at once, as the burst.
- Only what a request took beyond its reservation comes on top, and the key waits until that is
  made up for.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.auth.records import Limits
from gateway.errors import LimitReached, TokensOverLimit
from gateway.keys.budgets import DAY_S, Bucket, DayBudget, day_of
from gateway.keys.limit_headers import OF_REQUESTS, OF_TOKENS, limit_headers
from gateway.types import Headers

# Nobody knows when a running request ends.
_RETRY_RUNNING_S = 1.0


class Reservation(NamedTuple):
    """What one request that was let in has taken, and where."""

    tokens: int
    of_requests: Bucket | None
    requests_ticket: float
    of_tokens: Bucket | None
    tokens_ticket: float
    of_day: DayBudget | None


class Used(NamedTuple):
    """What one gateway has let in for a key in this life, as others hear of it."""

    requests: int
    tokens: int
    day: int
    day_tokens: int
    """Used on that day."""
    reserved: int
    """Of that day's budget, for requests that run."""
    running: int


class Allowance:
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
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._day: DayBudget | None = None
        self.change(limits, now_s, unix_s, used_today)

    def change(self, limits: Limits, now_s: float, unix_s: float, used_today: int) -> None:
        """Go on under other limits; `used_today` counts where there was none for a day."""
        self._limits = limits
        self._divide(now_s)
        if limits.tokens_a_day is None:
            self._day = None
        elif self._day is None:
            self._day = DayBudget(limits.tokens_a_day, used_today, day_of(unix_s))
            self._day.share(self._gateways)
        else:
            self._day.limit = limits.tokens_a_day

    def share(self, gateways: int, now_s: float) -> None:
        """Divide all limits between so many gateways, for as long as they hear nothing of others.

        1: they hear of each other, and each one subtracts what the others use.
        """
        if gateways == self._gateways:
            return
        self._gateways = gateways
        self._divide(now_s)
        if self._day is not None:
            self._day.share(gateways)
        if gateways > 1:
            self._elsewhere = 0

    def _divide(self, now_s: float) -> None:
        limits, gateways = self._limits, self._gateways
        self._at_once = _part(limits.concurrent_requests, gateways)
        self._requests = _changed(self._requests, _part(limits.requests_a_minute, gateways), now_s)
        self._tokens = _changed(self._tokens, _part(limits.tokens_a_minute, gateways), now_s)

    def used(self) -> Used:
        """Tell others what this gateway has let in."""
        day = self._day
        counted = (0, 0, 0) if day is None else (day.day, day.mine, day.reserved)
        return Used(self._let_in, self._taken, *counted, self.running)

    def charge(self, requests: int, tokens: int, day: int, day_tokens: int, now_s: float) -> None:
        """Take what other gateways have let in since the last time, of the day on that day."""
        if self._requests is not None:
            self._requests.refill(now_s)
            self._requests.charge(requests)
        if self._tokens is not None:
            self._tokens.refill(now_s)
            self._tokens.charge(tokens)
        if self._day is not None and day == self._day.day:
            self._day.used += day_tokens

    def hold_elsewhere(self, running: int, reserved: int) -> None:
        """Hear what runs at other gateways now, and what is reserved there of the day's budget."""
        self._elsewhere = running
        if self._day is not None:
            self._day.elsewhere = reserved

    def reserve(self, tokens: int, now_s: float, unix_s: float) -> Reservation:
        """Let in a request of so many tokens; raise, and take nothing, at a limit."""
        requests, minute, day = self._requests, self._tokens, self._day
        if minute is not None:
            minute.refill(now_s)
            whole = self._limits.tokens_a_minute or minute.limit
            if tokens > whole:
                raise TokensOverLimit("tokens_a_minute", whole, tokens)
        if day is not None:
            day.turn(unix_s)
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
        if day is not None and tokens > day.left:
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
            of_day.turn(unix_s)
            of_day.reserved -= reserved
            of_day.used += tokens
            of_day.mine += tokens

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
            day.turn(unix_s)
        if minute is not None and (day is None or minute.left <= day.left):
            told += minute.headers(OF_TOKENS)
        elif day is not None:
            told += limit_headers(OF_TOKENS, day.limit, max(0, day.left), DAY_S - unix_s % DAY_S)
        return told


def _part(limit: int | None, gateways: int) -> int | None:
    """Divide a limit; everybody may have one at least."""
    return None if limit is None else max(1, limit // gateways)


def _changed(bucket: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, now_s)
    bucket.change(limit, now_s)
    return bucket
