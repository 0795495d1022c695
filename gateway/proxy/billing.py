"""What a request costs its key: guessed before, known after, settled exactly once."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from gateway.auth.rate_limits import RateLimiter
from gateway.errors import (
    GatewayError,
    KeyEnded,
    NoWorker,
    RequestRefused,
    RequestTooLong,
    ShuttingDown,
)
from gateway.http.downstream import ClientLeft
from gateway.proxy.context import RequestContext
from gateway.types import Headers, Spent
from policies.request.profile import RequestProfile

ANSWER_TOKENS = 1024
"""Reserved for an answer whose length the request does not limit."""
# Low for prose, so that a reservation is rarely too small.
_CHARS_A_TOKEN = 3
# They end a request, but not because a worker failed: what it did until then is owed.
_ENDED_FROM_OUTSIDE = (ClientLeft, KeyEnded, RequestTooLong, ShuttingDown)


NOTHING = Spent()


def estimate(profile: RequestProfile) -> int:
    """Guess the tokens of a request, rather too many than too few."""
    prompt = -(-profile.text_chars // _CHARS_A_TOKEN)
    answer = ANSWER_TOKENS if profile.max_tokens is None else profile.max_tokens
    return prompt + profile.choices * answer


def cost_of(trip: RequestContext | None, failure: BaseException | None) -> Spent:
    """Say what a request has cost that ended so.

    Nothing where no worker began; what the worker told of, where it did; and where it did not, the
    whole estimate, because only a worker counts tokens, and it tells at the end: leaving early is
    not for free. For an answer that a worker broke nobody pays by guess.
    """
    if trip is None or not trip.begun:
        return NOTHING
    failed = isinstance(failure, Exception) and not isinstance(failure, _ENDED_FROM_OUTSIDE)
    if failed and _never_began(failure):
        return NOTHING
    told = trip.usage.prompt_tokens + trip.usage.completion_tokens
    if told or failed:
        return Spent(1, told)
    guessed = estimate(trip.inspected.profile)
    return Spent(1, guessed, guessed)


def _never_began(failure: BaseException | None) -> bool:
    """Say whether it was refused, or found nobody, rather than broken."""
    nobody = isinstance(failure, GatewayError) and failure.status == NoWorker.status
    return nobody or isinstance(failure, RequestRefused)


class HeldTokens:
    """The context of a request with a limited key: let in at its beginning, settled at its end."""

    def __init__(
        self,
        allowance: RateLimiter,
        trip: RequestContext,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._allowance = allowance
        self._trip = trip
        self._clock = clock
        self._wall = wall

    def __enter__(self) -> Headers:
        """Raise at a limit; tell in headers what is left behind this request."""
        now_s, unix_s = self._clock(), self._wall()
        tokens = estimate(self._trip.inspected.profile)
        self._taken = self._allowance.reserve(tokens, now_s, unix_s)
        return self._allowance.headers(now_s, unix_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cost = cost_of(self._trip, error)
        self._allowance.settle(self._taken, cost.requests, cost.tokens, self._clock(), self._wall())
