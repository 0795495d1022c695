"""The cost of a request to its API key: estimated before it, exact after it, settled once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gateway import errors
from gateway.auth.rate_limits import RateLimiter
from gateway.http.downstream import ClientDisconnected
from gateway.types import NOTHING, Headers, Spent, Usage
from policies.request.profile import RequestProfile
from workers.protocol import RUNNING_USAGE_TOKENS

ANSWER_TOKENS = 1024
"""Reserved for a response whose length the request does not limit."""
# Low for prose, so that a reservation is rarely too small.
_CHARS_A_TOKEN = 3
_TOKENS_A_PICTURE = 512
# These end a request without a fault of the worker: the key owes what it did until then.
_CANCELLED = (ClientDisconnected, errors.KeyEnded, errors.RequestTooLong, errors.ShuttingDown)


def estimate(profile: RequestProfile) -> int:
    """Estimate the tokens of a request, rather too many than too few."""
    prompt = -(-profile.text_chars // _CHARS_A_TOKEN) + profile.media_count * _TOKENS_A_PICTURE
    answer = ANSWER_TOKENS if profile.max_tokens is None else profile.max_tokens
    return prompt + profile.choices * answer


def cost_of(profile: RequestProfile, usage: Usage, failure: BaseException | None) -> Spent:
    """Return the cost of a request that a worker had begun, by how it ended.

    A key pays for the usage that the worker reported, at the end or, in a stream, so far. Without
    a report it pays the whole estimate if the response was complete or cancelled; if the worker
    failed, it pays no tokens.
    """
    failed = isinstance(failure, Exception) and not isinstance(failure, _CANCELLED)
    no_worker = isinstance(failure, errors.GatewayError) and failure.status == 503
    if failed and (no_worker or isinstance(failure, errors.RequestRefused)):
        return NOTHING
    reported = usage.prompt_tokens + usage.completion_tokens
    if reported and not failed and failure is not None:
        # At least the tokens since the last report.
        return Spent(1, reported + RUNNING_USAGE_TOKENS, RUNNING_USAGE_TOKENS)
    if reported or failed:
        return Spent(1, reported)
    estimated = estimate(profile)
    return Spent(1, estimated, estimated)


def count_request(
    rate_limiter: RateLimiter, clock: Callable[[], float], wall: Callable[[], float]
) -> None:
    """Charge a request without tokens; raise an error of the rate limiter at a limit."""
    reservation = rate_limiter.reserve(0, clock(), wall())
    rate_limiter.settle(reservation, 1, 0, clock(), wall())


@contextlib.contextmanager
def reserved_tokens(
    rate_limiter: RateLimiter,
    profile: RequestProfile,
    cost: Callable[[BaseException | None], Spent],
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Iterator[Headers]:
    """Reserve the estimate, yield headers with what remains, and settle the cost at the end.

    Raise an error of the rate limiter if a limit is reached.
    """
    now_s, unix_s = clock(), wall()
    reservation = rate_limiter.reserve(estimate(profile), now_s, unix_s)
    failure: BaseException | None = None
    try:
        yield rate_limiter.headers(now_s, unix_s)
    except BaseException as error:
        failure = error
        raise
    finally:
        spent = cost(failure)
        rate_limiter.settle(reservation, spent.requests, spent.tokens, clock(), wall())
