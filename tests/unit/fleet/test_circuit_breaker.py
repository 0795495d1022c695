"""Circuit breaker of one worker: ejection, probation and recovery, under a clock and jitter of the
test.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.circuit_breaker import (
    HEALTHY,
    MAX_CONNECT_FAILURES,
    MAX_EJECTION_S,
    MAX_FAILURES,
    AttemptResult,
    CircuitBreaker,
)


def after_failures(
    breaker: CircuitBreaker,
    times: int,
    result: AttemptResult = AttemptResult.FAILED,
    *,
    now_s: float = 0.0,
    jitter: float = 0.0,
) -> CircuitBreaker:
    for _ in range(times):
        breaker = breaker.record_failure(now_s, result, last=False, jitter=jitter)
    return breaker


@pytest.mark.parametrize(
    ("result", "times", "reason"),
    [
        (AttemptResult.UNREACHABLE, MAX_CONNECT_FAILURES, "3 connections failed in a row"),
        (AttemptResult.FAILED, MAX_FAILURES, "5 requests failed in a row"),
    ],
)
def test_f20_three_connection_failures_or_five_errors_in_a_row_eject_the_worker(
    result: AttemptResult, times: int, reason: str
) -> None:
    assert not after_failures(HEALTHY, times - 1, result).is_ejected(0.0)
    ejected = after_failures(HEALTHY, times, result)
    assert (ejected.is_ejected(0.0), ejected.reason) == (True, reason)


def test_a_success_resets_the_failure_counts() -> None:
    breaker = HEALTHY
    for _ in range(20):
        breaker = after_failures(breaker, MAX_FAILURES - 1).record_success(0.0, slots=4)
    assert breaker == HEALTHY


def test_an_error_resets_the_count_of_connection_failures_but_not_that_of_failures() -> None:
    breaker = after_failures(after_failures(HEALTHY, 2, AttemptResult.UNREACHABLE), 1)
    assert not after_failures(breaker, 1, AttemptResult.UNREACHABLE).is_ejected(0.0)
    fifth = after_failures(breaker, 2, AttemptResult.UNREACHABLE)
    assert fifth.is_ejected(0.0), "the fifth failure in a row"


def test_f23_each_ejection_lasts_longer_up_to_five_minutes() -> None:
    breaker, now_s, lengths = HEALTHY, 0.0, []
    for _ in range(40):
        failures = 1 if breaker.probation_limit else MAX_FAILURES
        breaker = after_failures(breaker, failures, now_s=now_s)
        lengths.append(breaker.ejected_until_s - now_s)
        now_s = breaker.ejected_until_s
    assert lengths[:3] == [10.0, 20.0, 30.0]
    assert lengths[-1] == MAX_EJECTION_S
    jittered = [after_failures(HEALTHY, MAX_FAILURES, jitter=by) for by in (0.5, 0.999)]
    assert jittered[0].ejected_until_s == 11.0
    assert jittered[1].ejected_until_s < 12.0


def test_a_healthy_minute_cancels_one_ejection() -> None:
    breaker = after_failures(HEALTHY, MAX_FAILURES)
    breaker = after_failures(breaker, 1, now_s=10.0)
    for _ in range(2):
        breaker = breaker.record_success(30.0, slots=4)
    assert breaker.probation_limit is None
    assert after_failures(breaker, MAX_FAILURES, now_s=89.0).ejections == 3
    assert after_failures(breaker, MAX_FAILURES, now_s=91.0).ejections == 2
    assert after_failures(breaker, MAX_FAILURES, now_s=9999.0).ejections == 1


def test_f23_on_probation_a_success_doubles_the_limit_and_a_failure_ejects_again() -> None:
    breaker = after_failures(HEALTHY, MAX_FAILURES)
    assert breaker.probation_limit == 1
    breaker = breaker.record_success(10.0, slots=8)
    assert breaker.probation_limit == 2
    again = after_failures(breaker, 1, now_s=11.0)
    assert (again.is_ejected(30.9), again.is_ejected(31.0)) == (True, False)
    assert again.reason == "it failed on probation"
    for _ in range(2):
        breaker = breaker.record_success(10.0, slots=8)
    assert breaker.probation_limit is None


def test_f22_the_last_worker_is_ejected_only_once_another_worker_is_available() -> None:
    breaker = HEALTHY
    for _ in range(50):
        breaker = breaker.record_failure(0.0, AttemptResult.FAILED, last=True, jitter=0.0)
    assert not breaker.is_ejected(0.0)
    assert after_failures(breaker, 1).is_ejected(0.0)


def test_a_busy_response_counts_as_no_failure() -> None:
    breaker = after_failures(HEALTHY, MAX_FAILURES - 1).record_busy(0.0, 5.0)
    assert (breaker.is_busy(4.9), breaker.is_busy(5.0)) == (True, False)
    assert breaker.record_busy(1.0, 1.0).available_at_s == 5.0, "the later time applies"
    assert not breaker.is_ejected(0.0)


@given(st.lists(st.tuples(st.sampled_from("auf"), st.floats(0, 100), st.floats(0, 0.99))))
def test_every_ejection_is_bounded_and_has_a_reason(steps: list[tuple[str, float, float]]) -> None:
    breaker, now_s = HEALTHY, 0.0
    for event, elapsed_s, jitter in steps:
        now_s += elapsed_s
        if event == "a":
            breaker = breaker.record_success(now_s, slots=4)
        else:
            result = AttemptResult.UNREACHABLE if event == "u" else AttemptResult.FAILED
            breaker = breaker.record_failure(now_s, result, last=False, jitter=jitter)
        assert breaker.ejected_until_s <= now_s + MAX_EJECTION_S
        assert breaker.is_ejected(now_s) <= bool(breaker.reason)
        assert breaker.probation_limit is None or breaker.probation_limit in (1, 2)
