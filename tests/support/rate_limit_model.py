"""A rate limiter with all its admitted requests."""

from dataclasses import dataclass, field

from gateway.auth.rate_limits import DAY_S, RateLimiter, Reservation
from gateway.auth.records import Limits
from gateway.errors import LimitReached, TokensOverLimit

MINUTE_S = 60.0
START_S = 1_000_000.0
"""The monotonic clock at the start of a test."""
NOON = 1000.5 * DAY_S
ALL_LIMITS = Limits(
    requests_a_minute=6, tokens_a_minute=600, concurrent_requests=3, tokens_a_day=2000
)
"""One limit of every kind."""


@dataclass
class AdmittedRequest:
    """An admitted request and its charge."""

    at_s: float
    reservation: Reservation
    charged_requests: int = 1
    charged_tokens: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.charged_tokens = self.reservation.tokens


@dataclass
class RateLimitModel:
    """A rate limiter, its clock, and the requests that it admitted."""

    limiter: RateLimiter
    now_s: float = START_S
    admitted: list[AdmittedRequest] = field(default_factory=list)
    over_tokens: int = 0
    """Tokens used beyond reservations."""

    @property
    def unix_s(self) -> float:
        """Return the wall-clock time; a test starts at noon."""
        return NOON + self.now_s - START_S

    def reserve(self, tokens: int) -> None:
        """Reserve tokens; a rejection must change nothing."""
        before = self.remaining()
        try:
            reservation = self.limiter.reserve(tokens, self.now_s, self.unix_s)
        except (LimitReached, TokensOverLimit):
            assert self.remaining() == before, "a rejected request costs nothing"
        else:
            self.admitted.append(AdmittedRequest(self.now_s, reservation))

    def settle(self, index: int, requests: int, tokens: int) -> None:
        """Settle one of the running requests with its cost."""
        running = [request for request in self.admitted if not request.ended]
        if not running:
            return
        request = running[index % len(running)]
        request.ended = True
        request.charged_requests = requests
        request.charged_tokens = min(tokens, request.reservation.tokens)
        self.over_tokens += max(0, tokens - request.reservation.tokens)
        self.limiter.settle(request.reservation, requests, tokens, self.now_s, self.unix_s)

    def remaining(self) -> object:
        """Return what remains of the limits, and the count of running requests."""
        return self.limiter.states(self.now_s, self.unix_s), self.limiter.running
