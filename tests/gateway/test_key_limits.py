"""What a key may use: never more than its limits, whatever happens in whatever order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client import ClientLeft
from gateway.domain import Case, Inspected
from gateway.errors import (
    NoWorker,
    QueueFull,
    RequestTooLong,
    Stopping,
    WorkerBusy,
    WorkerLost,
    WorkerUnreachable,
)
from gateway.keys.budgets import DAY_S, Bucket
from gateway.keys.cost import ANSWER_TOKENS, Hold, estimate, spent
from gateway.keys.limits import Allowance, Reservation
from gateway.keys.record import Limits
from gateway.refusals import (
    KeyEnded,
    LimitReached,
    Quarantined,
    RefusedByWorker,
    TokensOverLimit,
)
from gateway.served import Spent, Usage
from gateway.trip import UNUSED, Trip
from policies.document import shipped_policy
from policies.profile import Endpoint, RequestProfile

MINUTE_S = 60.0
NOON = 1000.5 * DAY_S
ALL = Limits(requests_a_minute=6, tokens_a_minute=600, concurrent_requests=3, tokens_a_day=2000)


@dataclass
class Asked:
    """One request that was let in, and what became of it."""

    at_s: float
    taken: Reservation
    kept_requests: int = 1
    kept_tokens: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.kept_tokens = self.taken.tokens


@dataclass
class Day:
    """A key on a day of our own making."""

    allowance: Allowance
    now_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    over_tokens: int = 0
    """Used beyond reservations."""

    @property
    def unix_s(self) -> float:
        return NOON + self.now_s

    def ask(self, tokens: int) -> None:
        before = self.left()
        try:
            taken = self.allowance.reserve(tokens, self.now_s, self.unix_s)
        except (LimitReached, TokensOverLimit):
            assert self.left() == before, "a refused request costs nothing"
        else:
            self.asked.append(Asked(self.now_s, taken))

    def end(self, which: int, requests: int, tokens: int) -> None:
        running = [one for one in self.asked if not one.ended]
        if not running:
            return
        one = running[which % len(running)]
        one.ended = True
        one.kept_requests = requests
        one.kept_tokens = min(tokens, one.taken.tokens)
        self.over_tokens += max(0, tokens - one.taken.tokens)
        self.allowance.settle(one.taken, requests, tokens, self.now_s, self.unix_s)

    def left(self) -> object:
        headers = self.allowance.headers(self.now_s, self.unix_s)
        return headers, self.allowance.running


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
    limits = ALL.model_copy(update={"concurrent_requests": at_once})
    day = Day(Allowance(limits, 0.0, NOON))
    for step, *values in steps:
        match step:
            case "ask":
                day.ask(int(values[0]))
            case "wait":
                day.now_s += values[0]
            case "end":
                day.end(int(values[0]), int(values[1]), int(values[2]))
            case "refund":
                day.end(int(values[0]), 0, 0)
        assert sum(not one.ended for one in day.asked) == day.allowance.running
        assert at_once is None or day.allowance.running <= at_once
    for begun, finished in itertools.combinations_with_replacement(day.asked, 2):
        within = [one for one in day.asked if begun.at_s <= one.at_s <= finished.at_s]
        share = 1 + (finished.at_s - begun.at_s) / MINUTE_S
        assert sum(one.kept_requests for one in within) <= 6 * share + 1e-6
        assert sum(one.kept_tokens for one in within) <= 600 * share + 1e-6
    if day.unix_s // DAY_S == NOON // DAY_S:
        assert sum(one.kept_tokens for one in day.asked) <= 2000


@given(STEPS)
def test_in_the_end_nothing_stays_reserved(steps: list[tuple[str, float, int, int]]) -> None:
    day = Day(Allowance(ALL, 0.0, NOON))
    for step, *values in steps:
        if step == "ask":
            day.ask(int(values[0]))
        elif step == "wait":
            day.now_s += values[0]
        elif step == "end":
            day.end(int(values[0]), int(values[1]), int(values[2]))
    while day.allowance.running:
        day.end(0, 0, 0)
    used = sum(one.kept_tokens for one in day.asked) + day.over_tokens
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
    assert (requests.left, tokens.left) == (6, 600)


@given(st.integers(1, 600), st.floats(0, 60))
def test_what_is_given_back_at_once_leaves_no_trace(tokens: int, waited_s: float) -> None:
    day = Day(Allowance(ALL, 0.0, NOON))
    day.ask(100)
    day.now_s += waited_s
    before = day.left()
    day.ask(tokens)
    if len(day.asked) == 2:
        day.end(1, 0, 0)
    assert day.left() == before


def test_a_refund_after_a_refill_is_no_second_burst() -> None:
    """Requests that stood in line for a minute and got nobody do not double the next minute."""
    bucket, tickets = Bucket(10, 0.0), []
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
    allowance = Allowance(Limits(requests_a_minute=7), 0.0, NOON)
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
    allowance = Allowance(Limits(tokens_a_minute=600), 0.0, NOON)
    taken = allowance.reserve(100, 0.0, NOON)
    allowance.settle(taken, 1, 900, 0.0, NOON)
    with pytest.raises(LimitReached) as reached:
        allowance.reserve(1, 0.0, NOON)
    assert reached.value.retry_after_s == 31
    allowance.reserve(1, 30.2, NOON)


def test_a_request_that_no_wait_would_let_in_is_told_so() -> None:
    for limits in (Limits(tokens_a_minute=600), Limits(tokens_a_day=600)):
        with pytest.raises(TokensOverLimit, match="601 tokens"):
            Allowance(limits, 0.0, NOON).reserve(601, 0.0, NOON)


def test_a_day_ends_at_midnight_in_utc_and_a_clock_that_is_set_back_gives_nothing() -> None:
    allowance = Allowance(Limits(tokens_a_day=100), 0.0, NOON, used_today=40)

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
    allowance = Allowance(Limits(tokens_a_day=100), 0.0, NOON, used_today=90)
    with pytest.raises(LimitReached) as reached:
        allowance.reserve(11, 0.0, NOON)
    assert reached.value.retry_after_s == DAY_S / 2
    assert reached.value.code == "tokens_a_day_exceeded"
    allowance.reserve(11, 0.0, NOON + DAY_S / 2)


def test_headers_are_openais_and_tell_of_the_limit_that_is_nearest() -> None:
    allowance = Allowance(ALL, 0.0, NOON, used_today=1450)
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
    allowance = Allowance(Limits(tokens_a_minute=600), 0.0, NOON)
    allowance.reserve(600, 0.0, NOON)
    told = {name.decode(): value.decode() for name, value in allowance.headers(59.95, NOON)}
    assert told == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "599",
        "x-ratelimit-reset-tokens": "50ms",
    }
    assert Allowance(Limits(concurrent_requests=1), 0.0, NOON).headers(0.0, NOON) == []


def test_other_limits_are_no_new_budget_and_what_runs_is_settled_where_it_was_taken() -> None:
    allowance = Allowance(Limits(requests_a_minute=2, tokens_a_minute=100), 0.0, NOON)
    running = allowance.reserve(90, 0.0, NOON)
    allowance.change(Limits(requests_a_minute=1, tokens_a_day=50), 0.0, NOON, used_today=0)
    allowance.settle(running, 1, 90, 0.0, NOON)  # taken when nothing limited a day
    headers = dict(allowance.headers(0.0, NOON))
    assert headers[b"x-ratelimit-remaining-requests"] == b"1"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"50"
    assert allowance.running == 0


def trip(*, dispatched: bool = True, usage: Usage = UNUSED, **fields: Any) -> Trip:
    profile = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=10, **fields)
    case = Case(shipped_policy(), profile)
    made = Trip(identity="r", inspected=Inspected("demo", profile, {}), case=case, began_s=0.0)
    made.dispatched_s = 1.0 if dispatched else None
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
        (Stopping(), Spent(1, 10, 10), Spent(1, 7)),
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
    assert spent(trip(max_tokens=6), failure) == untold
    assert spent(trip(max_tokens=6, usage=Usage(5, 2, 1)), failure) == told
    assert spent(trip(max_tokens=6, dispatched=False), failure) == Spent()
    assert spent(None, failure) == Spent()


@pytest.mark.parametrize("failure", [None, WorkerLost(), NoWorker(), asyncio.CancelledError()])
def test_a_hold_settles_once_however_it_ends(failure: BaseException | None) -> None:
    allowance = Allowance(ALL, 0.0, NOON)
    going = trip(max_tokens=6, usage=Usage(5, 2, 1))
    expected = contextlib.nullcontext() if failure is None else pytest.raises(type(failure))
    with expected, Hold(allowance, going, clock=lambda: 0.0, wall=lambda: NOON):
        assert allowance.running == 1
        if failure is not None:
            raise failure
    cost = spent(going, failure)
    left = dict(allowance.headers(0.0, NOON))
    assert allowance.running == 0
    assert left[b"x-ratelimit-remaining-requests"] == b"%d" % (6 - cost.requests)
    assert left[b"x-ratelimit-remaining-tokens"] == b"%d" % (600 - cost.tokens)
