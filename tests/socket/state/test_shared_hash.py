"""A shared hash in Redis: writes that meet, and folds, step by step."""

import contextlib

import pytest

from gateway.errors import RecordsUnwritable
from gateway.state.shared_hash import SharedHash
from tests.support.gateway_fixtures import OpenRedis
from tests.support.redis_server import RedisServer

Pair = tuple[SharedHash[str], SharedHash[str]]


@pytest.fixture
async def two_gateways(redis: RedisServer, open_redis: OpenRedis) -> Pair:
    """Return two copies of one hash, which has the fields x and y."""
    first, second = (SharedHash(open_redis(redis), "test", "hash", str) for _ in range(2))
    await first.write({"x": "1"})
    await second.read()
    await second.write({"y": "2"})
    await first.read()
    return first, second


async def fold(shared: SharedHash[str], name: str, total: str) -> bool:
    return await shared.fold(name, "sum", total, tombstone="folded", keep_s=60)


async def test_a_write_replaces_no_text_that_the_gateway_has_not_read(two_gateways: Pair) -> None:
    first, second = two_gateways
    assert await first.write({"x": "10", "y": "20"}) == {}
    assert await second.write({"x": "11", "z": "3"}) == {"x": ""}
    assert (await second.read()).updated == {"x": "10", "y": "20", "z": "3"}
    assert await second.write({"x": "11"}) == {}
    await first.read()
    assert first.values == second.values == {"x": "11", "y": "20", "z": "3"}


async def test_a_fold_is_in_the_own_copy_at_once_and_in_others_after_a_read(two_gateways) -> None:
    first, second = two_gateways
    assert await fold(first, "x", "1")
    assert first.values == {"y": "2", "sum": "1"}
    assert await second.write({"x": "10"}) == {"x": "folded"}
    assert (await second.read()).folded == {"x"}
    assert second.values == first.values


async def test_a_fold_onto_an_outdated_sum_changes_nothing(two_gateways: Pair) -> None:
    first, second = two_gateways
    assert await fold(second, "y", "2")
    assert not await fold(first, "x", "1")
    assert first.values == {"x": "1", "y": "2"}
    await first.read()
    assert first.values == {"x": "1", "sum": "2"}


async def test_a_fold_of_an_outdated_field_changes_nothing(two_gateways: Pair) -> None:
    first, second = two_gateways
    await second.write({"x": "10"})
    assert not await fold(first, "x", "1")
    await first.read()
    assert first.values == {"x": "10", "y": "2"}


async def test_a_gateway_reads_all_fields_after_a_reconnect(two_gateways, redis) -> None:
    first, _ = two_gateways
    # Another Redis behind the connection has a field that no gateway has announced.
    redis.client.hset("paceline:{test}:hash", "z", "3")
    await first.read()
    assert "z" not in first.values
    redis.client.client_kill_filter(_type="normal", skipme=True)
    for _ in range(3):
        with contextlib.suppress(RecordsUnwritable):
            await first.read()
    assert first.values["z"] == "3"
