"""What each request costs its key: guessed before it, and settled once, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from gateway.auth.rate_limits import RateLimiter
from gateway.errors import (
    KeyEnded,
    NoWorker,
    Quarantined,
    QueueFull,
    RefusedByWorker,
    RequestTooLong,
    ShuttingDown,
    WorkerBusy,
    WorkerLost,
    WorkerUnreachable,
)
from gateway.http.downstream import ClientLeft
from gateway.proxy.billing import ANSWER_TOKENS, HeldTokens, cost_of, estimate
from gateway.proxy.context import RequestContext
from gateway.routing.select import RoutingRequest
from gateway.types import UNUSED, Inspected, Spent, Usage
from policies.document import default_policy
from policies.request.profile import Endpoint, RequestProfile
from tests.support.rate_limit_model import ALL_LIMITS, NOON


def trip(*, begun: bool = True, usage: Usage = UNUSED, **fields: Any) -> RequestContext:
    profile = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=10, **fields)
    case = RoutingRequest(default_policy(), profile)
    made = RequestContext(
        identity="r", inspected=Inspected("demo", profile, {}), case=case, began_s=0.0
    )
    made.begun = begun
    made.usage = usage
    return made


def test_a_request_is_guessed_rather_too_large() -> None:
    assert estimate(trip(max_tokens=6).inspected.profile) == 4 + 6
    assert estimate(trip(max_tokens=6, choices=3).inspected.profile) == 4 + 18
    assert estimate(trip().inspected.profile) == 4 + ANSWER_TOKENS


@pytest.mark.parametrize(
    ("failure", "untold", "told"),
    [
        # Whole, or ended from outside: what the worker did is owed, told or not.
        (None, Spent(1, 10, 10), Spent(1, 7)),
        (ClientLeft(), Spent(1, 10, 10), Spent(1, 7)),
        (asyncio.CancelledError(), Spent(1, 10, 10), Spent(1, 7)),
        (RequestTooLong(), Spent(1, 10, 10), Spent(1, 7)),
        (KeyEnded(), Spent(1, 10, 10), Spent(1, 7)),
        (ShuttingDown(), Spent(1, 10, 10), Spent(1, 7)),
        # A worker broke it: nobody pays by guess.
        (WorkerLost(), Spent(1, 0), Spent(1, 7)),
        (RuntimeError(), Spent(1, 0), Spent(1, 7)),
        # Nothing began.
        (WorkerUnreachable(), Spent(), Spent()),
        (WorkerBusy(1.0), Spent(), Spent()),
        (NoWorker(), Spent(), Spent()),
        (QueueFull(1.0), Spent(), Spent()),
        (Quarantined(), Spent(), Spent()),
        (RefusedByWorker(400, "too long", param=None, code=None), Spent(), Spent()),
    ],
)
def test_each_end_has_its_cost(failure: BaseException | None, untold: Spent, told: Spent) -> None:
    assert cost_of(trip(max_tokens=6), failure) == untold
    assert cost_of(trip(max_tokens=6, usage=Usage(5, 2, 1)), failure) == told
    assert cost_of(trip(max_tokens=6, begun=False), failure) == Spent()
    assert cost_of(None, failure) == Spent()


@pytest.mark.parametrize("failure", [None, WorkerLost(), NoWorker(), asyncio.CancelledError()])
def test_a_hold_settles_once_however_it_ends(failure: BaseException | None) -> None:
    allowance = RateLimiter(ALL_LIMITS, 0.0, NOON)
    going = trip(max_tokens=6, usage=Usage(5, 2, 1))
    expected = contextlib.nullcontext() if failure is None else pytest.raises(type(failure))
    with expected, HeldTokens(allowance, going, clock=lambda: 0.0, wall=lambda: NOON):
        assert allowance.running == 1
        if failure is not None:
            raise failure
    cost = cost_of(going, failure)
    left = dict(allowance.headers(0.0, NOON))
    assert allowance.running == 0
    assert left[b"x-ratelimit-remaining-requests"] == b"%d" % (6 - cost.requests)
    assert left[b"x-ratelimit-remaining-tokens"] == b"%d" % (600 - cost.tokens)
