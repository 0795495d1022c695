"""The cost of a request to its key: estimated in advance, and settled once, however it ends."""

import asyncio
import contextlib

import pytest

from gateway.auth.rate_limits import RateLimiter
from gateway.errors import (
    FieldInvalid,
    FieldUnheld,
    GatewayError,
    KeyEnded,
    NoWorker,
    Overloaded,
    Quarantined,
    QueueFull,
    RecordsUnwritable,
    RefusedByWorker,
    RefusedInAnswer,
    RequestTooLong,
    ResponseTooLarge,
    ShuttingDown,
    WorkerBusy,
    WorkerFailed,
    WorkerLost,
    WorkerSilent,
    WorkerUnreachable,
)
from gateway.http.downstream import ClientDisconnected
from gateway.proxy.billing import (
    ANSWER_TOKENS,
    TokenReservation,
    cost_of,
    estimate,
)
from gateway.types import UNUSED, Spent, Usage
from paceline.request.profile import Endpoint, RequestProfile
from tests.support.rate_limit_model import ALL_LIMITS, NOON

PROFILE = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=10, max_tokens=6)


def test_an_estimate_is_an_upper_bound_of_the_tokens() -> None:
    assert estimate(PROFILE) == 4 + 6
    assert estimate(PROFILE._replace(choices=3)) == 4 + 18
    assert estimate(PROFILE._replace(media=(("image", 2),))) == 4 + 6 + 2 * 512
    assert estimate(PROFILE._replace(messages=2)) == 2 * 16 + 4 + 6
    assert estimate(PROFILE._replace(max_tokens=None)) == 4 + ANSWER_TOKENS


@pytest.mark.parametrize(
    ("failure", "unreported", "reported"),
    [
        # Complete or cancelled: the key owes what the worker did, reported or not.
        (None, Spent(1, 10, 10), Spent(1, 7)),
        (ClientDisconnected(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (asyncio.CancelledError(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (RequestTooLong(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (ResponseTooLarge(1), Spent(1, 10, 10), Spent(1, 10, 3)),
        (KeyEnded(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (ShuttingDown(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (RefusedInAnswer(400, "costly", param=None, code=None), Spent(1, 10, 10), Spent(1, 10, 3)),
        # Also if the gateway ends it, or the worker took too long for what the request asks.
        (Overloaded(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (RecordsUnwritable(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (WorkerSilent(), Spent(1, 10, 10), Spent(1, 10, 3)),
        (FieldUnheld("stop"), Spent(1, 10, 10), Spent(1, 10, 3)),
        (RuntimeError(), Spent(1, 10, 10), Spent(1, 10, 3)),
        # The worker failed: no key pays for an estimate.
        (WorkerLost(), Spent(1, 0), Spent(1, 7)),
        (WorkerFailed(), Spent(1, 0), Spent(1, 7)),
        # No worker began.
        (WorkerUnreachable(), Spent(), Spent()),
        (WorkerBusy(retry_after_s=1.0), Spent(), Spent()),
        (NoWorker(), Spent(), Spent()),
        (QueueFull(retry_after_s=1.0), Spent(), Spent()),
        (Quarantined(), Spent(), Spent()),
        (RefusedByWorker(400, "too long", param=None, code=None), Spent(), Spent()),
    ],
)
def test_the_outcome_decides_the_cost(failure, unreported, reported) -> None:
    assert cost_of(PROFILE, UNUSED, failure) == unreported
    assert cost_of(PROFILE, Usage(5, 2, 1), failure) == reported


def test_c6_what_a_slow_client_leaves_unread_costs_the_reservation() -> None:
    left, usage = ClientDisconnected(), Usage(5, 2, 1)
    assert cost_of(PROFILE, usage, left, 100) == Spent(1, 7 + 64, 64)
    two = PROFILE._replace(choices=2)
    assert cost_of(two, usage, left, 110) == Spent(1, 7 + 96, 96)
    assert cost_of(two, usage, left, 80) == Spent(1, 80, 73), "at most the reservation"
    assert cost_of(PROFILE, usage, left, 100, read_slowly=True) == Spent(1, 100, 93)
    assert cost_of(PROFILE, usage, None, 100, read_slowly=True) == Spent(1, 7)
    assert cost_of(PROFILE, UNUSED, left, 100) == Spent(1, 100, 100)


@pytest.mark.parametrize("failure", [None, WorkerLost(), NoWorker(), asyncio.CancelledError()])
def test_a_reservation_settles_once_however_it_ends(failure: BaseException | None) -> None:
    limiter = RateLimiter(ALL_LIMITS, 0.0, NOON)
    ended_with: list[BaseException | None] = []

    def cost(ended: BaseException | None) -> Spent:
        ended_with.append(ended)
        return cost_of(PROFILE, Usage(5, 2, 1), ended)

    expected = contextlib.nullcontext() if failure is None else pytest.raises(type(failure))
    reserved = TokenReservation(limiter, 10, lambda: 0.0, lambda: NOON, cost)
    with expected, reserved:
        assert limiter.running == 1
        if failure is not None:
            raise failure
    assert ended_with == [failure]
    spent = cost_of(PROFILE, Usage(5, 2, 1), failure)
    remaining = {state.unit: state.remaining for state in limiter.states(0.0, NOON)}
    assert limiter.running == 0
    assert remaining == {"requests": 6 - spent.requests, "tokens": 600 - spent.tokens}


@pytest.mark.parametrize(
    ("failure", "requests"),
    [(None, 0), (Overloaded(), 0), (RecordsUnwritable(), 0), (FieldInvalid("wrong"), 1)],
)
def test_c16_a_request_whose_inspection_fails_costs_itself_unless_the_gateway_is_at_fault(
    failure: Exception | None, requests: int
) -> None:
    limiter = RateLimiter(ALL_LIMITS, 0.0, NOON)
    reserved = TokenReservation(limiter, 0, lambda: 0.0, lambda: NOON)
    with contextlib.suppress(GatewayError), reserved:
        if failure is not None:
            raise failure
    assert limiter.admitted().requests == requests
    assert limiter.admitted().running == 0
