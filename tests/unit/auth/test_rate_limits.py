"""What a key may use: never more than its limits, whatever happens in whatever order."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.rate_limits import DAY_S, RateLimiter, TokenBucket
from gateway.auth.records import Limits
from gateway.errors import LimitReached, TokensOverLimit
from tests.support.rate_limit_model import ALL_LIMITS, MINUTE_S, NOON, RateLimitModel

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 300)),
        st.tuples(st.just("wait"), st.floats(0, 90)),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 1), st.integers(0, 400)),
        st.tuples(st.just("refund"), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from((3, None)))
def test_no_window_ever_holds_more_than_the_limit_and_one_burst(
    steps: list[tuple[str, float, int, int]], at_once: int | None
) -> None:
    limits = ALL_LIMITS.model_copy(update={"concurrent_requests": at_once})
    day = RateLimitModel(RateLimiter(limits, 0.0, NOON))
    for step, *values in steps:
        match step:
            case "ask":
                day.reserve(int(values[0]))
            case "wait":
                day.now_s += values[0]
            case "end":
                day.settle(int(values[0]), int(values[1]), int(values[2]))
            case "refund":
                day.settle(int(values[0]), 0, 0)
        assert sum(not one.ended for one in day.asked) == day.allowance.running
        assert at_once is None or day.allowance.running <= at_once
    for begun, finished in itertools.combinations_with_replacement(day.asked, 2):
        within = [one for one in day.asked if begun.at_s <= one.at_s <= finished.at_s]
        share = 1 + (finished.at_s - begun.at_s) / MINUTE_S
        assert sum(one.charged_requests for one in within) <= 6 * share + 1e-6
        assert sum(one.charged_tokens for one in within) <= 600 * share + 1e-6
    if day.unix_s // DAY_S == NOON // DAY_S:
        assert sum(one.charged_tokens for one in day.asked) <= 2000


@given(STEPS)
def test_in_the_end_nothing_stays_reserved(steps: list[tuple[str, float, int, int]]) -> None:
    day = RateLimitModel(RateLimiter(ALL_LIMITS, 0.0, NOON))
    for step, *values in steps:
        if step == "ask":
            day.reserve(int(values[0]))
        elif step == "wait":
            day.now_s += values[0]
        elif step == "end":
            day.settle(int(values[0]), int(values[1]), int(values[2]))
    while day.allowance.running:
        day.settle(0, 0, 0)
    used = sum(one.charged_tokens for one in day.asked) + day.over_tokens
    requests, tokens, of_day = (
        day.allowance._requests,
        day.allowance._tokens,
        day.allowance._day,
    )
    assert requests is not None
    assert tokens is not None
    assert of_day is not None
    assert (requests._open, requests._returnable) == (tokens._open, tokens._returnable) == (0, 0)
    assert of_day.reserved == 0
    assert of_day.used == used
    day.now_s += MINUTE_S * (1 + used / 600)
    requests.refill(day.now_s)
    tokens.refill(day.now_s)
    assert (requests.remaining, tokens.remaining) == (6, 600)


@given(st.integers(1, 600), st.floats(0, 60))
def test_what_is_given_back_at_once_leaves_no_trace(tokens: int, waited_s: float) -> None:
    day = RateLimitModel(RateLimiter(ALL_LIMITS, 0.0, NOON))
    day.reserve(100)
    day.now_s += waited_s
    before = day.remaining()
    day.reserve(tokens)
    if len(day.asked) == 2:
        day.settle(1, 0, 0)
    assert day.remaining() == before


def test_a_refund_after_a_refill_is_no_second_burst() -> None:
    """Requests that stood in line for a minute and got nobody do not double the next minute."""
    bucket, tickets = TokenBucket(10, 0.0), []
    for _ in range(10):
        assert bucket.wait_s(1) == 0
        tickets.append(bucket.take(1))
    bucket.refill(60.0)
    let_in = 0
    for ticket in tickets:
        bucket.settle(ticket, 1, 0)
        while not bucket.wait_s(1):
            bucket.take(1)
            let_in += 1
    assert let_in == 10


def test_who_comes_back_when_told_gets_in() -> None:
    allowance = RateLimiter(Limits(requests_a_minute=7), 0.0, NOON)
    now_s = 0.0
    for _ in range(50):
        for _ in range(8):
            with contextlib.suppress(LimitReached):
                allowance.settle(allowance.reserve(1, now_s, NOON), 1, 1, now_s, NOON)
        with pytest.raises(LimitReached) as reached:
            allowance.reserve(1, now_s, NOON)
        assert reached.value.code == "requests_a_minute_exceeded"
        assert reached.value.retry_after_s is not None
        now_s += reached.value.retry_after_s
        allowance.settle(allowance.reserve(1, now_s, NOON), 1, 1, now_s, NOON)


def test_what_was_used_beyond_a_reservation_is_waited_for() -> None:
    allowance = RateLimiter(Limits(tokens_a_minute=600), 0.0, NOON)
    taken = allowance.reserve(100, 0.0, NOON)
    allowance.settle(taken, 1, 900, 0.0, NOON)
    with pytest.raises(LimitReached) as reached:
        allowance.reserve(1, 0.0, NOON)
    assert reached.value.retry_after_s == 31
    allowance.reserve(1, 30.2, NOON)


def test_a_request_that_no_wait_would_let_in_is_told_so() -> None:
    for limits in (Limits(tokens_a_minute=600), Limits(tokens_a_day=600)):
        with pytest.raises(TokensOverLimit, match="601 tokens"):
            RateLimiter(limits, 0.0, NOON).reserve(601, 0.0, NOON)


def test_a_day_ends_at_midnight_in_utc_and_a_clock_that_is_set_back_gives_nothing() -> None:
    allowance = RateLimiter(Limits(tokens_a_day=100), 0.0, NOON, used_today=40)

    def left(unix_s: float) -> bytes:
        return dict(allowance.headers(0.0, unix_s))[b"x-ratelimit-remaining-tokens"]

    assert left(NOON) == b"60"
    taken = allowance.reserve(50, 0.0, NOON)
    assert left(NOON) == b"10"
    tomorrow = NOON + DAY_S
    assert left(tomorrow) == b"50", "what is reserved belongs to the day in which it ends"
    allowance.settle(taken, 1, 30, 0.0, tomorrow)
    assert left(tomorrow) == b"70"
    assert left(NOON) == b"70"


def test_a_day_that_is_used_up_says_when_the_next_one_begins() -> None:
    allowance = RateLimiter(Limits(tokens_a_day=100), 0.0, NOON, used_today=90)
    with pytest.raises(LimitReached) as reached:
        allowance.reserve(11, 0.0, NOON)
    assert reached.value.retry_after_s == DAY_S / 2
    assert reached.value.code == "tokens_a_day_exceeded"
    allowance.reserve(11, 0.0, NOON + DAY_S / 2)


def test_headers_are_openais_and_tell_of_the_limit_that_is_nearest() -> None:
    allowance = RateLimiter(ALL_LIMITS, 0.0, NOON, used_today=1450)
    allowance.reserve(500, 0.0, NOON)
    told = {name.decode(): value.decode() for name, value in allowance.headers(0.5, NOON)}
    assert told == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "2000",
        "x-ratelimit-remaining-tokens": "50",
        "x-ratelimit-reset-tokens": "12h0m0s",
    }
    allowance = RateLimiter(Limits(tokens_a_minute=600), 0.0, NOON)
    allowance.reserve(600, 0.0, NOON)
    told = {name.decode(): value.decode() for name, value in allowance.headers(59.95, NOON)}
    assert told == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "599",
        "x-ratelimit-reset-tokens": "50ms",
    }
    assert RateLimiter(Limits(concurrent_requests=1), 0.0, NOON).headers(0.0, NOON) == []


def test_other_limits_are_no_new_budget_and_what_runs_is_settled_where_it_was_taken() -> None:
    allowance = RateLimiter(Limits(requests_a_minute=2, tokens_a_minute=100), 0.0, NOON)
    running = allowance.reserve(90, 0.0, NOON)
    allowance.update(Limits(requests_a_minute=1, tokens_a_day=50), 0.0, NOON, used_today=0)
    allowance.settle(running, 1, 90, 0.0, NOON)  # taken when nothing limited a day
    headers = dict(allowance.headers(0.0, NOON))
    assert headers[b"x-ratelimit-remaining-requests"] == b"1"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"50"
    assert allowance.running == 0
