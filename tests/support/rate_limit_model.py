"""A key on a day of a test's own making, and what became of each request of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.auth.rate_limits import DAY_S, RateLimiter, Reservation
from gateway.auth.records import Limits
from gateway.errors import LimitReached, TokensOverLimit

MINUTE_S = 60.0
NOON = 1000.5 * DAY_S
ALL_LIMITS = Limits(
    requests_a_minute=6, tokens_a_minute=600, concurrent_requests=3, tokens_a_day=2000
)
"""Of every kind one."""


@dataclass
class AdmittedRequest:
    """One request that was let in, and what became of it."""

    at_s: float
    reservation: Reservation
    charged_requests: int = 1
    charged_tokens: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.charged_tokens = self.reservation.tokens


@dataclass
class RateLimitModel:
    """What a key was let use of its limits, and what of that was kept."""

    allowance: RateLimiter
    now_s: float = 0.0
    asked: list[AdmittedRequest] = field(default_factory=list)
    over_tokens: int = 0
    """Used beyond reservations."""

    @property
    def unix_s(self) -> float:
        """Tell the time by the wall clock, which began at noon."""
        return NOON + self.now_s

    def reserve(self, tokens: int) -> None:
        """Ask for so many tokens, which costs nothing where it is refused."""
        before = self.remaining()
        try:
            taken = self.allowance.reserve(tokens, self.now_s, self.unix_s)
        except (LimitReached, TokensOverLimit):
            assert self.remaining() == before, "a refused request costs nothing"
        else:
            self.asked.append(AdmittedRequest(self.now_s, taken))

    def settle(self, which: int, requests: int, tokens: int) -> None:
        """End one of the requests that run, with what it cost in the end."""
        running = [one for one in self.asked if not one.ended]
        if not running:
            return
        one = running[which % len(running)]
        one.ended = True
        one.charged_requests = requests
        one.charged_tokens = min(tokens, one.reservation.tokens)
        self.over_tokens += max(0, tokens - one.reservation.tokens)
        self.allowance.settle(one.reservation, requests, tokens, self.now_s, self.unix_s)

    def remaining(self) -> object:
        """Tell all that a key is told of its limits, and how many requests it has."""
        headers = self.allowance.headers(self.now_s, self.unix_s)
        return headers, self.allowance.running
