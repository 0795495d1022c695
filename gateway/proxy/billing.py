"""The cost of a request to its API key: reserved before it, exact after it, settled once.

A worker of Paceline never reads or generates more than was reserved. Where the estimate is too low,
the worker tells the exact number before it reads the prompt, and the gateway reserves that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from gateway import errors
from gateway.auth.rate_limits import RateLimiter, Reservation
from gateway.types import NOTHING, Spent, Usage
from paceline.protocol import RUNNING_USAGE_TOKENS
from paceline.request.profile import RequestProfile

ANSWER_TOKENS = 1024
"""Reserved for a response whose length neither the request nor the model limits."""
# A key may use this part of its limit for one response without `max_tokens`.
_DEFAULT_SHARE = 8
# Low for prose, so that a reservation is rarely too small.
_CHARS_A_TOKEN = 3
_TOKENS_A_PICTURE = 512
# What chat templates write around a message.
_TOKENS_A_MESSAGE = 16
# With these no worker has begun the request, though an earlier attempt may have reached one.
_UNBEGUN = (
    *(errors.RequestRefused, errors.NoWorker, errors.QueueFull),
    *(errors.WorkerUnreachable, errors.WorkerBusy),
)
_WHILE_IT_RAN = (errors.RefusedInAnswer, errors.KeyEnded)
_BROKEN_OFF = (errors.WorkerLost, errors.WorkerFailed)


def estimate(profile: RequestProfile) -> int:
    """Estimate the tokens of a request, rather too many than too few."""
    prompt = -(-profile.text_chars // _CHARS_A_TOKEN) + profile.messages * _TOKENS_A_MESSAGE
    prompt += profile.media_count * _TOKENS_A_PICTURE
    answer = ANSWER_TOKENS if profile.max_tokens is None else profile.max_tokens
    return prompt + profile.prompts * profile.choices * answer


def default_max_tokens(rate_limiter: RateLimiter, defaults: Iterable[int]) -> int | None:
    """Return the longest answer of a key to a request without `max_tokens`; None: no limit.

    `defaults` are those of the workers, 0 where a worker tells none.
    """
    if rate_limiter.token_limit is None:
        return None
    share = max(ANSWER_TOKENS, rate_limiter.token_limit // _DEFAULT_SHARE)
    return min([share, *(default or ANSWER_TOKENS for default in defaults)])


def cost_of(
    profile: RequestProfile,
    usage: Usage,
    failure: BaseException | None,
    reserved: int | None = None,
    *,
    read_slowly: bool = False,
) -> Spent:
    """Return the cost of a request that a worker had begun, by how it ended.

    A key pays for the usage that the worker reported, at the end or, in a stream, so far. Without
    a report, or where reports lag (the client left them unread, an event was too large, several
    prompts are read at once), it pays what was reserved, unless the worker broke the response off.
    """
    if isinstance(failure, _UNBEGUN) and not isinstance(failure, _WHILE_IT_RAN):
        return NOTHING
    reported = usage.prompt_tokens + usage.completion_tokens
    if isinstance(failure, _BROKEN_OFF) or (reported and failure is None):
        return Spent(1, reported)
    if reserved is None:
        reserved = estimate(profile)
    if not reported:
        return Spent(1, reserved, reserved)
    # A worker reports late by fewer tokens than this for the stream, and for each of its choices.
    lag = RUNNING_USAGE_TOKENS * (1 + profile.choices)
    if read_slowly or profile.prompts > 1 or isinstance(failure, errors.AnswerTooLarge):
        lag = reserved
    tokens = max(reported, min(reported + lag, reserved))
    return Spent(1, tokens, tokens - reported)


def inspection_cost(failure: BaseException | None) -> Spent:
    """Return the cost of a request up to its inspection: itself, if it is at fault."""
    if failure is None or isinstance(failure, errors.Unavailable):
        return NOTHING
    return Spent(requests=1)


def count_request(
    rate_limiter: RateLimiter, clock: Callable[[], float], wall: Callable[[], float]
) -> None:
    """Charge a request without tokens; raise an error of the rate limiter at a limit."""
    TokenReservation(rate_limiter, 0, clock, wall).settle(Spent(requests=1))


class TokenReservation:
    """The tokens reserved for one request; its limiter settles them once.

    Raise an error of the rate limiter if a limit is reached. As a context, which settles by `cost`
    at its end.
    """

    def __init__(
        self,
        rate_limiter: RateLimiter,
        tokens: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        cost: Callable[[BaseException | None], Spent] = inspection_cost,
    ) -> None:
        self._rate_limiter = rate_limiter
        self._clock = clock
        self._wall = wall
        self._cost = cost
        self.tokens = tokens
        self._taken: Reservation | None = rate_limiter.reserve(tokens, clock(), wall())

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens that the request may use; None if its key has no such limit."""
        return None if self._rate_limiter.token_limit is None else self.tokens

    def resize(self, tokens: int) -> None:
        """Reserve another number of tokens; raise an error of the rate limiter at a limit."""
        self.settle(NOTHING)
        self._taken = self._rate_limiter.reserve(tokens, self._clock(), self._wall())
        self.tokens = tokens

    def settle(self, spent: Spent) -> None:
        """Charge the cost, and refund the rest."""
        if self._taken is not None:
            now_s, unix_s = self._clock(), self._wall()
            self._rate_limiter.settle(self._taken, spent.requests, spent.tokens, now_s, unix_s)
            self._taken = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, failure: BaseException | None, _trace: object) -> None:
        self.settle(self._cost(failure))
