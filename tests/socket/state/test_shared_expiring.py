"""Kept responses over Redis: every gateway goes on from those of all gateways."""

import pytest

from gateway.protocols.sealing import Sealer
from gateway.state.expiring import RECORD_LIMIT_BYTES, TTL_S, SharedExpiringRecords
from gateway.state.redis import RedisClient
from tests.support.gateway_fixtures import OpenRedis
from tests.support.redis_server import RedisServer

NAME = "resp_1"
LIMIT_BYTES = 30_000


@pytest.fixture
def client(redis: RedisServer, open_redis: OpenRedis) -> RedisClient:
    return open_redis(redis)


def records(client: RedisClient, secret: bytes = b"token") -> SharedExpiringRecords:
    return SharedExpiringRecords(client, Sealer(secret), limit_bytes=LIMIT_BYTES)


async def test_gateways_with_one_token_read_each_others_records_and_no_one_else_does(
    client: RedisClient, redis: RedisServer
) -> None:
    mine, yours = records(client), records(client)
    assert await mine.put("ann", NAME, b"a secret")
    assert await yours.get("ann", ["resp_0", NAME, "resp_2"]) == [None, b"a secret", None]
    assert await yours.get("bob", [NAME]) == [None]
    assert await records(client, b"other").get("ann", [NAME]) == [None]
    (key,) = redis.client.keys("paceline:{responses}:kept:*:*")
    assert b"secret" not in (redis.client.dump(key) or b"")
    assert 0 < redis.client.pttl(key) <= TTL_S * 1000
    assert await yours.delete("ann", NAME)
    assert not await mine.delete("ann", NAME)


async def test_a_record_is_replaced_only_while_it_is_the_one_that_was_read(client) -> None:
    kept = records(client)
    assert not await kept.put("ann", NAME, b"two", replaces=b"one")
    assert await kept.put("ann", NAME, b"one")
    assert await kept.put("ann", NAME, b"two", replaces=b"one")
    assert not await kept.put("ann", NAME, b"three", replaces=b"one")
    assert await kept.get("ann", [NAME]) == [b"two"]
    assert not await kept.put("ann", "resp_2", b"x" * (RECORD_LIMIT_BYTES + 1))
