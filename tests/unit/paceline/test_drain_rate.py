"""The drain rate of a queue: places, expected waits, and when a rejected request may return."""

import pytest

from paceline.drain_rate import DrainRate, QueuePlace


def drained_each(interval_s: float, requests: int) -> DrainRate:
    """Return the rate of a queue that a request leaves at each interval from 100 s on."""
    rate = DrainRate()
    rate.begin(100.0)
    for number in range(1, requests + 1):
        rate.record(100.0 + number * interval_s)
    return rate


def test_the_wait_is_the_place_times_the_mean_interval() -> None:
    rate = drained_each(4.0, 3)
    assert rate.place(3, 112.0) == QueuePlace(3, 12.0)
    assert rate.place(1, 115.0).wait_s == 4.0
    assert rate.place(5, 132.0).wait_s == 5 * (3 * 4.0 + 20.0) / 4, "the last one has not ended"


def test_without_a_history_the_first_interval_is_the_time_in_which_all_that_run_end() -> None:
    rate = DrainRate()
    rate.begin(100.0)
    assert rate.place(3, 110.0).wait_s == 30.0
    assert rate.place(32, 140.0, running=16).wait_s == 80.0
    rate.record(140.0, running=16)
    assert rate.place(32, 140.0, running=16).wait_s == 80.0
    rate.record(145.0, running=16)
    assert rate.place(2, 145.0, running=16).wait_s == 7.5


def test_the_wait_is_not_shorter_than_the_time_since_the_last_request_left() -> None:
    """Of 16 streams that began together, none has ended yet: the next one is not due at once."""
    began = DrainRate()
    began.begin(100.0)
    assert began.place(1, 110.0, running=16) == QueuePlace(1, 10.0)
    assert began.retry_after_s(1, 110.0, running=16) == 10.0
    halted = drained_each(0.5, 30)
    assert halted.place(1, 115.0 + 30.0).wait_s == 30.0
    assert halted.place(0, 115.0 + 30.0).wait_s == 0.0


def test_old_intervals_and_the_time_in_which_the_queue_is_empty_do_not_count() -> None:
    rate = drained_each(4.0, 3)
    rate.begin(5000.0)
    rate.record(5004.0)
    assert rate.place(2, 5004.0).wait_s == 8.0
    rate = drained_each(60.0, 5)
    rate.begin(1000.0)
    for number in range(1, 40):
        rate.record(1000.0 + number)
    assert rate.place(7, 1039.0).wait_s == 7.0


@pytest.mark.parametrize(("waiting", "expected_s"), [(0, 1.0), (5, 20.0), (500, 60.0)])
def test_a_rejected_request_returns_when_the_queue_has_drained_within_bounds(
    waiting: int, expected_s: float
) -> None:
    assert drained_each(4.0, 3).retry_after_s(waiting, 112.0) == expected_s


def test_a_comment_tells_place_and_time() -> None:
    for wait_s, told in ((12.4, b"12"), (0.1, b"1")):
        assert QueuePlace(3, wait_s).comment() == b": queued 3, about %b s\n\n" % told
