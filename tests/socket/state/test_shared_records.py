"""Records that gateways share over Redis: synchronized, durable, and readable during an outage."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.errors import RecordsUnwritable
from gateway.state.records import RedisRecords
from gateway.state.redis import RedisClient
from tests.support.gateway_fixtures import OpenRedis
from tests.support.redis_server import TEST_DEADLINE_S, RedisServer

KEYS = "paceline:{keys}:records"
OpenRecords = Callable[..., tuple[RedisRecords, RedisClient]]


@pytest.fixture
def open_records(redis: RedisServer, open_redis: OpenRedis, tmp_path: Path) -> OpenRecords:
    """Open the records as one gateway does; all share a state folder."""

    def open_one(
        server: RedisServer = redis,
        deadline_s: float = TEST_DEADLINE_S,
        admin_deadline_s: float = TEST_DEADLINE_S,
    ) -> tuple[RedisRecords, RedisClient]:
        client = open_redis(server, deadline_s, admin_deadline_s)
        return RedisRecords(client, tmp_path), client

    return open_one


async def check_redis(client: RedisClient) -> None:
    """Call Redis as the periodic exchanges do."""
    await client.call("exchange", client.script("return 1"))


async def test_a_change_of_another_gateway_is_in_the_next_read(open_records: OpenRecords) -> None:
    (first, _), (second, _) = open_records(), open_records()
    assert await first.all("keys") == {}
    await second.add("keys", "a", '{"n":1}')
    await second.add("keys", "b", '{"n":2}')
    assert await first.all("keys") == {"a": '{"n":1}', "b": '{"n":2}'}
    await second.replace("keys", "a", '{"n":3}')
    await second.remove("keys", "b")
    assert await first.all("keys") == {"a": '{"n":3}'}


async def test_a_removed_record_stays_removed_while_a_gateway_opens_more_connections(
    open_records: OpenRecords,
) -> None:
    (first, client), (second, _) = open_records(), open_records()
    await second.add("cordons", "a", "{}")
    assert set(await first.all("cordons")) == {"a"}
    await asyncio.gather(*(check_redis(client) for _ in range(3)))
    await second.remove("cordons", "a")
    assert await first.all("cordons") == await second.all("cordons") == {}


async def test_f60_records_are_restored_where_an_edit_or_a_second_loss_comes_first(
    redis: RedisServer, open_records: OpenRecords
) -> None:
    (first, _), (second, _) = open_records(), open_records()
    await first.add("keys", "a", "{}")
    await first.add("keys", "a/revoked", "{}")
    expected = {"a", "a/revoked"}
    for records in (first, second):
        assert set(await records.all("keys")) == expected
    redis.client.flushall()
    await first.add("keys", "b", "{}")
    assert set(await second.all("keys")) == {*expected, "b"}
    redis.client.flushall()
    await second.add("keys", "c", "{}")
    for records in (second, first, second):
        assert set(await records.all("keys")) == {*expected, "b", "c"}
    await first.remove("keys", "a")
    for records in (first, second):
        assert set(await records.all("keys")) == {"a/revoked", "b", "c"}


async def test_an_older_redis_state_does_not_reactivate_a_revoked_key(
    private_redis: RedisServer, open_records: OpenRecords
) -> None:
    records, _ = open_records(private_redis)
    await records.add("keys", "a", "1")
    before = private_redis.client.dump(KEYS)
    assert before is not None
    await records.add("keys", "a/revoked", "2")
    assert set(await records.all("keys")) == {"a", "a/revoked"}
    private_redis.client.restore(KEYS, 0, before, replace=True)
    for one in (records, open_records(private_redis)[0]):
        assert set(await one.all("keys")) == {"a", "a/revoked"}


async def test_a_foreign_value_is_returned_as_a_string_and_breaks_no_record(
    redis: RedisServer, open_records: OpenRecords
) -> None:
    records, client = open_records()
    await records.add("keys", "a", "1")
    for value in ("not one of ours", "[7,half", "[]"):
        redis.client.hset(KEYS, "odd", value)
        records_read = await records.all("keys")
        assert records_read["a"] == "1"
        assert records_read["odd"].startswith('"')
    assert not client.problem


async def test_a_full_redis_takes_edits_and_what_it_has_lost(private_redis, open_records) -> None:
    records, _ = open_records(private_redis)
    await records.add("keys", "a", "1")
    private_redis.configure("maxmemory", "1")
    assert await records.add("keys", "b", "2")
    await records.replace("keys", "a", "3")
    assert await records.all("keys") == {"a": "3", "b": "2"}
    private_redis.client.flushall()
    assert await records.all("keys") == {"a": "3", "b": "2"}
    assert private_redis.client.hexists("paceline:{keys}:records", "b")
    await records.remove("keys", "b")
    assert await records.all("keys") == {"a": "3"}


async def test_an_edit_waits_for_a_slow_redis(private_redis, open_records) -> None:
    records, client = open_records(private_redis, deadline_s=0.3)
    await records.add("keys", "a", "1")
    assert await records.all("keys") == {"a": "1"}
    private_redis.freeze()
    edit = asyncio.create_task(records.add("keys", "b", "2"))
    _, other = open_records(private_redis, deadline_s=0.3)
    for _ in range(2):
        with pytest.raises(RecordsUnwritable):
            await check_redis(other)
    assert not edit.done()
    private_redis.resume()
    assert await edit
    assert not client.unreachable
