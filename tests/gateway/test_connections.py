"""What a worker's Retry-After means, whatever stands there."""

from __future__ import annotations

import pytest

from gateway.connections import retry_after_s

NOW_S = 1_445_412_480.0  # Wed, 21 Oct 2015 07:28:00 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 1),
        ("", 1),
        ("0", 1),
        ("9", 9),
        ("60", 60),
        ("1000000000", 60),
        ("9" * 5000, 60),
        ("-5", 1),
        ("1.5", 1),
        ("1e9", 1),
        ("nan", 1),
        ("soon", 1),
        ("\u0669", 9),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
        ("Wed, 21 Oct 2015 07:28:30 -0000", 30),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 1),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60),
        ("Wed, 99 Oct 2015 07:28:30 GMT", 1),
        ("Wed, 21 Oct 99999 07:28:30 GMT", 1),
    ],
)
def test_a_retry_after_is_read_within_reason(value: str | None, seconds: float) -> None:
    assert retry_after_s(value, NOW_S) == seconds
