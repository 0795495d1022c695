"""A shared hash in Redis: folds, step by step."""

import contextlib
from typing import NamedTuple

import pytest

from gateway.errors import RecordsUnwritable
from gateway.state.shared_hash import SharedHash
from tests.support.gateway_fixtures import OpenRedis
from tests.support.redis_server import RedisServer

_WRITES = """
local result = ''
if ARGV[4] then write(ARGV[4], ARGV[5]) end
"""


class Text(NamedTuple):
    """A value that is its text."""

    text: str


Pair = tuple[SharedHash[Text], SharedHash[Text]]


@pytest.fixture
async def two_gateways(redis: RedisServer, open_redis: OpenRedis) -> Pair:
    """Return two copies of one hash, which has the fields x and y."""
    first, second = (SharedHash(open_redis(redis), "test", "hash", _WRITES, Text) for _ in range(2))
    await first.exchange(["x", "1"])
    await second.exchange(["y", "2"])
    await first.exchange([])
    return first, second


async def fold(shared: SharedHash[Text], name: str, total: str) -> bool:
    return await shared.fold(name, "sum", total, tombstone="folded", keep_s=60)


async def test_a_fold_is_in_the_own_copy_at_once_and_in_others_after_an_exchange(
    two_gateways: Pair,
) -> None:
    first, second = two_gateways
    assert await fold(first, "x", "1")
    assert first.values == {"y": Text("2"), "sum": Text("1")}
    await second.exchange([])
    assert second.values == first.values


async def test_a_fold_onto_an_outdated_sum_changes_nothing(two_gateways: Pair) -> None:
    first, second = two_gateways
    assert await fold(second, "y", "2")
    assert not await fold(first, "x", "1")
    assert first.values == {"x": Text("1"), "y": Text("2")}
    await first.exchange([])
    assert first.values == {"x": Text("1"), "sum": Text("2")}


async def test_a_fold_of_an_outdated_field_changes_nothing(two_gateways: Pair) -> None:
    first, second = two_gateways
    await second.exchange(["x", "10"])
    assert not await fold(first, "x", "1")
    await first.exchange([])
    assert first.values == {"x": Text("10"), "y": Text("2")}


async def test_a_gateway_reads_all_fields_after_a_reconnect(two_gateways, redis) -> None:
    first, _ = two_gateways
    # Another Redis behind the connection has a field that no gateway has announced.
    redis.client.hset("paceline:{test}:hash", "z", "3")
    await first.exchange([])
    assert "z" not in first.values
    redis.client.client_kill_filter(_type="normal", skipme=True)
    for _ in range(3):
        with contextlib.suppress(RecordsUnwritable):
            await first.exchange([])
    assert first.values["z"] == Text("3")
