"""Attributes of the caller that policies and queues may use, and the address that limits count."""

import time
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from gateway.periodic import WeekClock
from gateway.proxy.client import peer_network, read_attributes
from gateway.types import Caller
from policies.compiler import ANONYMOUS


@pytest.fixture(autouse=True)
def berlin_timezone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_attributes_contain_only_named_headers_of_bounded_length() -> None:
    headers = [
        *((b"authorization", b"Bearer canary"), (b"x-other", b"canary")),
        *((b"x-app", b"b\xfccher"), (b"x-app", b"second"), (b"x-long", b"a" * 129)),
    ]
    scope, caller = {"headers": headers}, Caller(key="k1", team="blue")
    attributes = read_attributes(scope, caller, ("x-app", "x-long", "x-none"), 7)
    assert attributes == ("k1", "blue", {"x-app": "bücher"}, 7)
    assert read_attributes(scope, Caller(), (), 0) == ANONYMOUS


@pytest.mark.parametrize(
    ("moment", "minute"),
    [
        ("2026-11-23T00:00:00+01:00", 0),
        ("2026-11-23T00:00:59+01:00", 0),
        ("2026-11-23T00:01:00+01:00", 1),
        ("2026-11-22T23:59:59+01:00", 7 * 24 * 60 - 1),
        ("2026-11-22T23:30:00+00:00", 30),  # already Monday there
        ("2026-03-29T01:59:59+01:00", 6 * 24 * 60 + 119),
        ("2026-03-29T03:00:00+02:00", 6 * 24 * 60 + 180),  # a second later: summer time
    ],
)
def test_the_week_begins_on_monday_in_local_time(moment: str, minute: int) -> None:
    now_s = datetime.fromisoformat(moment).timestamp()
    assert WeekClock(lambda: now_s).minute() == minute


def test_the_week_clock_is_right_throughout_the_end_of_summer_time() -> None:
    midnight = datetime.fromisoformat("2026-10-24T22:00:00+00:00")
    switched = datetime.fromisoformat("2026-10-25T01:00:00+00:00")
    seconds = 0
    clock = WeekClock(lambda: midnight.timestamp() + seconds)
    for seconds in range(0, 25 * 3600, 31):
        now = midnight + timedelta(seconds=seconds)
        local = now + timedelta(hours=2 if now < switched else 1)
        assert clock.minute() == (local.weekday() * 24 + local.hour) * 60 + local.minute


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("2001:db8:1:2::7", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::7", "2001:db8:1:3::/64"),
        ("fe80::7%en0", "fe80::7%en0"),
        ("::1", "::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("10.0.0.7", "10.0.0.7"),
        ("", ""),
    ],
)
def test_limits_count_the_network_of_an_ipv6_address(peer: str, network: str) -> None:
    assert peer_network({"client": (peer, 1)} if peer else {}) == network
