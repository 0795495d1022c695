"""Rate limits of a key: never exceeded, in any order of events."""

import contextlib
import itertools
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.auth.rate_limits import DAY_S, RateLimiter, Reservation, TokenBucket, day_of
from gateway.auth.records import Limits
from gateway.errors import LimitReached, TokensOverLimit
from gateway.protocols.messages import MessagesFormat
from gateway.protocols.openai import CHAT
from gateway.protocols.sealing import Sealer
from gateway.types import LimitState
from tests.support.rate_limit_model import ALL_LIMITS, MINUTE_S, NOON, START_S, RateLimitModel


def limiter_of(*, used_today: int = 0, **limits: int) -> RateLimiter:
    return RateLimiter(Limits(**limits), START_S, NOON, used_today)


def reserve(limiter: RateLimiter, tokens: int) -> Reservation:
    return limiter.reserve(tokens, START_S, NOON)


def use(limiter: RateLimiter, tokens: int, now_s: float = START_S, unix_s: float = NOON) -> None:
    """Send a request that takes what it has reserved."""
    limiter.settle(limiter.reserve(tokens, now_s, unix_s), 1, tokens, now_s, unix_s)


def headers_of(*states: LimitState) -> dict[str, str]:
    """Return the headers that end with these words, behind `x-ratelimit-`."""
    headers = {name.decode(): value.decode() for name, value in CHAT.limit_headers(states, NOON)}
    return {name.removeprefix("x-ratelimit-"): value for name, value in headers.items()}


def remaining(limiter: RateLimiter, unit: str, now_s: float = START_S, unix_s: float = NOON) -> int:
    return {state.unit: state.remaining for state in limiter.states(now_s, unix_s)}[unit]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(1, 300)),
        st.tuples(st.just("wait"), st.floats(0, 90)),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 1), st.integers(0, 400)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def take(model: RateLimitModel, step: str, *values: Any) -> None:
    if step == "reserve":
        model.reserve(*values)
    elif step == "wait":
        model.now_s += values[0]
    else:
        model.settle(*values)


@given(STEPS, st.sampled_from((3, None)))
def test_no_window_admits_more_than_the_limit_and_one_burst(steps, concurrent) -> None:
    limits = ALL_LIMITS.model_copy(update={"concurrent_requests": concurrent})
    model = RateLimitModel(RateLimiter(limits, START_S, NOON))
    for step in steps:
        take(model, *step)
        assert sum(not request.ended for request in model.admitted) == model.limiter.running
        assert concurrent is None or model.limiter.running <= concurrent
    for begun, finished in itertools.combinations_with_replacement(model.admitted, 2):
        within = [one for one in model.admitted if begun.at_s <= one.at_s <= finished.at_s]
        share = 1 + (finished.at_s - begun.at_s) / MINUTE_S
        assert sum(request.charged_requests for request in within) <= 6 * share + 1e-6
        assert sum(request.charged_tokens for request in within) <= 600 * share + 1e-6
    if model.unix_s // DAY_S == NOON // DAY_S:
        assert sum(request.charged_tokens for request in model.admitted) <= 2000


@given(STEPS)
def test_after_the_last_settlement_no_reservation_remains(steps: list[tuple[Any, ...]]) -> None:
    model = RateLimitModel(RateLimiter(ALL_LIMITS, START_S, NOON))
    for step in steps:
        take(model, *step)
    while model.limiter.running:
        model.settle(0, 0, 0)
    used = sum(request.charged_tokens for request in model.admitted) + model.over_tokens
    requests, tokens, daily = (model.limiter._requests, model.limiter._tokens, model.limiter._day)
    assert requests is not None
    assert tokens is not None
    assert daily is not None
    assert (requests._open, requests._refundable) == (tokens._open, tokens._refundable) == (0, 0)
    assert daily.reserved == 0
    assert daily.used == used
    model.now_s += MINUTE_S * (1 + used / 600)
    requests.refill(model.now_s)
    tokens.refill(model.now_s)
    assert (requests.remaining, tokens.remaining) == (6, 600)


@given(st.integers(1, 600), st.floats(0, 60))
def test_a_reservation_refunded_at_once_changes_nothing(tokens: int, waited_s: float) -> None:
    model = RateLimitModel(RateLimiter(ALL_LIMITS, START_S, NOON))
    model.reserve(100)
    model.now_s += waited_s
    before = model.remaining()
    model.reserve(tokens)
    if len(model.admitted) == 2:
        model.settle(1, 0, 0)
    assert model.remaining() == before


def test_a_refund_after_a_refill_adds_no_second_burst() -> None:
    """Refunds of requests that waited for a minute do not double the next minute."""
    bucket, tickets = TokenBucket(10, START_S), []
    for _ in range(10):
        assert bucket.wait_s(1) == 0
        tickets.append(bucket.take(1))
    bucket.refill(START_S + 60)
    admitted = 0
    for ticket in tickets:
        bucket.settle(ticket, 1, 0)
        while not bucket.wait_s(1):
            bucket.take(1)
            admitted += 1
    assert admitted == 10


@pytest.mark.parametrize("name", Limits.model_fields)
def test_a_limit_is_at_least_one(name: str) -> None:
    assert Limits.model_validate({name: 1})
    with pytest.raises(ValidationError):
        Limits.model_validate({name: 0})


def test_a_refill_at_an_earlier_time_takes_nothing() -> None:
    bucket = TokenBucket(60, START_S)
    bucket.charge(30)
    bucket.refill(START_S - 10)
    assert bucket.remaining == 30


def test_a_retry_after_the_retry_after_time_is_admitted() -> None:
    limiter, now_s = limiter_of(requests_a_minute=7), START_S
    for _ in range(50):
        for _ in range(8):
            with contextlib.suppress(LimitReached):
                use(limiter, 1, now_s)
        with pytest.raises(LimitReached) as reached:
            limiter.reserve(1, now_s, NOON)
        assert reached.value.code == "requests_a_minute_exceeded"
        assert reached.value.retry_after_s is not None
        now_s += reached.value.retry_after_s
        use(limiter, 1, now_s)


def test_tokens_used_beyond_a_reservation_delay_the_next_request() -> None:
    limiter = limiter_of(tokens_a_minute=600)
    reservation = reserve(limiter, 100)
    limiter.settle(reservation, 1, 900, START_S, NOON)
    with pytest.raises(LimitReached) as reached:
        reserve(limiter, 1)
    assert reached.value.retry_after_s == 31
    limiter.reserve(1, START_S + 30.2, NOON)


def test_a_request_larger_than_a_limit_is_rejected_without_retry_after() -> None:
    for limits in (Limits(tokens_a_minute=600), Limits(tokens_a_day=600)):
        with pytest.raises(TokensOverLimit, match="601 tokens"):
            RateLimiter(limits, START_S, NOON).reserve(601, START_S, NOON)


def test_a_day_ends_at_midnight_utc_and_a_clock_set_back_adds_nothing() -> None:
    limiter = limiter_of(tokens_a_day=100, used_today=40)
    assert remaining(limiter, "tokens") == 60
    reservation = reserve(limiter, 50)
    assert remaining(limiter, "tokens") == 10
    tomorrow = NOON + DAY_S
    assert remaining(limiter, "tokens", unix_s=tomorrow) == 50, "it counts where it ends"
    limiter.settle(reservation, 1, 30, START_S, tomorrow)
    assert remaining(limiter, "tokens", unix_s=tomorrow) == 70
    assert remaining(limiter, "tokens") == 60


def test_l10_a_clock_that_jumps_forward_and_back_freezes_no_budget() -> None:
    limiter, next_year = limiter_of(tokens_a_day=100, used_today=40), NOON + 365 * DAY_S
    use(limiter, 90, unix_s=next_year)
    assert remaining(limiter, "tokens") == 10, "a clock that is set back gives nothing"
    for unix_s, left in ((next_year, 10), (NOON + DAY_S, 10), (NOON + 2 * DAY_S, 100)):
        assert remaining(limiter, "tokens", unix_s=unix_s) == left, "each date has one budget"


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 100)), max_size=30))
def test_l10_each_date_of_a_clock_grants_its_budget_once(steps: list[tuple[int, int]]) -> None:
    limiter, used = limiter_of(tokens_a_day=100), Counter[int]()
    for day, tokens in steps:
        with contextlib.suppress(LimitReached):
            use(limiter, tokens, unix_s=NOON + day * DAY_S)
            used[day] += tokens
    assert all(tokens <= 100 for tokens in used.values())


def test_an_exhausted_day_returns_the_time_until_the_next_one() -> None:
    limiter = limiter_of(tokens_a_day=100, used_today=90)
    with pytest.raises(LimitReached) as reached:
        reserve(limiter, 11)
    assert reached.value.retry_after_s == DAY_S / 2
    assert reached.value.code == "tokens_a_day_exceeded"
    limiter.reserve(11, START_S, NOON + DAY_S / 2)


def test_headers_are_openais_and_report_the_nearest_limit() -> None:
    limiter = RateLimiter(ALL_LIMITS, START_S, NOON, used_today=1450)
    reserve(limiter, 500)
    assert headers_of(*limiter.states(START_S + 0.5, NOON)) == {
        "limit-requests": "6",
        "remaining-requests": "5",
        "reset-requests": "10s",
        "limit-tokens": "2000",
        "remaining-tokens": "50",
        "reset-tokens": "12h0m0s",
    }
    limiter = limiter_of(tokens_a_minute=600)
    reserve(limiter, 600)
    assert headers_of(*limiter.states(START_S + 59.9375, NOON)) == {
        "limit-tokens": "600",
        "remaining-tokens": "599",
        "reset-tokens": "63ms",
    }
    limiter = limiter_of(concurrent_requests=1)
    assert headers_of(*limiter.states(START_S, NOON)) == {}
    reserve(limiter, 1)
    with pytest.raises(LimitReached):
        reserve(limiter, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.1195, "120ms"),
        (1.0, "1s"),
        (7.2, "8s"),
        (59.5, "1m0s"),
        (360.0, "6m0s"),
        (3599.0, "59m59s"),
        (3599.5, "1h0m0s"),
        (10_799.0, "2h59m59s"),
        (10_921.0, "3h2m1s"),
    ],
)
def test_the_reset_time_is_rounded_up(seconds: float, text: str) -> None:
    assert headers_of(LimitState("tokens", 600, 0, seconds))["reset-tokens"] == text


def test_anthropics_headers_tell_the_time_at_which_a_limit_is_full_again() -> None:
    state = LimitState("tokens", 600, 50, 89.5)
    headers = MessagesFormat(Sealer(b"secret")).limit_headers([state], NOON)
    full = datetime.fromtimestamp(NOON + 90, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert dict(headers) == {
        b"anthropic-ratelimit-tokens-limit": b"600",
        b"anthropic-ratelimit-tokens-remaining": b"50",
        b"anthropic-ratelimit-tokens-reset": full.encode(),
    }


def test_an_update_of_limits_keeps_the_usage_and_settles_old_reservations_correctly() -> None:
    limiter = limiter_of(requests_a_minute=2, tokens_a_minute=100)
    running = reserve(limiter, 90)
    limiter.update(Limits(requests_a_minute=1, tokens_a_day=50), START_S, NOON, used_today=0)
    limiter.settle(running, 1, 90, START_S, NOON)  # reserved before there was a daily limit
    assert (remaining(limiter, "requests"), remaining(limiter, "tokens")) == (1, 50)
    assert limiter.running == 0


TODAY = day_of(NOON)


def test_requests_of_other_gateways_are_charged() -> None:
    limiter = limiter_of(requests_a_minute=6, tokens_a_minute=600)

    def left(now_s: float) -> tuple[int, int]:
        return remaining(limiter, "requests", now_s), remaining(limiter, "tokens", now_s)

    limiter.charge_remote(4, 400, TODAY, 0, START_S)
    assert left(START_S) == (2, 200)
    later_s = START_S + 10
    assert left(later_s) == (3, 300)
    limiter.charge_remote(-1, -200, TODAY, 0, later_s)
    assert left(later_s) == (4, 500), "the other gateway refunded one"
    limiter.charge_remote(9, 900, TODAY, 0, later_s)
    with pytest.raises(LimitReached) as reached:
        limiter.reserve(1, later_s, NOON)
    assert reached.value.retry_after_s == 60, "five requests below zero, and one more"
    limiter = limiter_of(requests_a_minute=6, tokens_a_minute=600)
    limiter.charge_remote(6, 600, TODAY, 0, START_S + 120)
    assert left(START_S + 120) == (0, 0), "it counts at its time, and not at the last refill"


def test_tokens_of_other_gateways_count_only_on_their_day() -> None:
    limiter = limiter_of(tokens_a_day=100, used_today=10)
    limiter.charge_remote(1, 30, TODAY, 30, START_S)
    limiter.charge_remote(1, 50, TODAY - 1, 50, START_S)
    assert remaining(limiter, "tokens") == 60
    assert limiter.admitted() == (0, 0, TODAY, 0, 0, 0), "other gateways charge it themselves"
    assert remaining(limiter, "tokens", unix_s=NOON + DAY_S) == 100
    undaily = limiter_of(requests_a_minute=6)
    undaily.settle(reserve(undaily, 100), 1, 30, START_S, NOON)
    assert undaily.admitted() == (1, 30, 0, 0, 0, 0), "without a daily limit no daily tokens"


def test_running_requests_of_other_gateways_count_until_they_end() -> None:
    limiter = limiter_of(concurrent_requests=2, tokens_a_day=100)
    limiter.set_remote_load(300, 0)
    with pytest.raises(LimitReached):
        reserve(limiter, 1)
    limiter.set_remote_load(1, 0)
    running = reserve(limiter, 1)
    with pytest.raises(LimitReached):
        reserve(limiter, 1)
    limiter.settle(running, 0, 0, START_S, NOON)
    limiter.set_remote_load(2, 30)
    assert remaining(limiter, "tokens") == 70
    with pytest.raises(LimitReached) as reached:
        reserve(limiter, 1)
    assert reached.value.code == "concurrent_requests_exceeded"
    limiter.set_remote_load(1, 0)
    reserve(limiter, 1)
    assert limiter.admitted() == (1, 1, TODAY, 0, 1, 1)


def test_a_disconnected_gateway_enforces_its_share_of_every_limit() -> None:
    limits = Limits(requests_a_minute=7, tokens_a_minute=600, concurrent_requests=1)
    limiter = RateLimiter(limits, START_S, NOON)
    limiter.set_remote_load(1, 0)
    limiter.divide(2, START_S)
    assert remaining(limiter, "requests") == 3
    assert remaining(limiter, "tokens") == 300
    reserve(limiter, 300)
    limiter.divide(1, START_S)
    assert remaining(limiter, "requests") == 2
    assert remaining(limiter, "tokens", START_S + 60) == 600


def test_the_remaining_daily_budget_is_divided_and_again_at_midnight() -> None:
    limiter = limiter_of(tokens_a_day=100, used_today=20)
    running = reserve(limiter, 10)
    limiter.set_remote_load(1, 30)
    limiter.divide(2, START_S)
    assert remaining(limiter, "tokens") == 20, "half of 40"
    limiter.divide(3, START_S)
    assert remaining(limiter, "tokens") == 20, "divided once in an outage"
    tomorrow = NOON + DAY_S
    assert remaining(limiter, "tokens", unix_s=tomorrow) == 50
    limiter.settle(running, 1, 10, START_S, tomorrow)
    assert remaining(limiter, "tokens", unix_s=tomorrow) == 50
    limiter.divide(1, START_S)
    assert remaining(limiter, "tokens", unix_s=tomorrow) == 90
