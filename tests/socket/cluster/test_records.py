"""Records that gateways share over Redis: followed, never lost, and known while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.cluster.records import RedisRecords
from gateway.cluster.redis import RedisClient
from gateway.errors import RecordsUnwritable, WriteUnconfirmed
from tests.support.redis_server import RedisServer

Opens = Callable[[RedisServer], tuple[RedisRecords, RedisClient]]


@pytest.fixture
async def open_records(tmp_path: Path) -> AsyncIterator[Opens]:
    """Open the records as one gateway does; all share a state folder."""
    async with AsyncExitStack() as stack:

        def one(server: RedisServer) -> tuple[RedisRecords, RedisClient]:
            link = RedisClient(server.url)
            stack.push_async_callback(link.close)
            return RedisRecords(link, tmp_path), link

        yield one


async def answers(link: RedisClient) -> None:
    """Ask as the turns of sharing do."""
    await link.call("turns", link.script("return 1"))


async def test_what_another_gateway_changes_is_seen_at_the_next_look(
    redis: RedisServer, open_records: Opens
) -> None:
    (here, _), (there, _) = open_records(redis), open_records(redis)
    assert await here.all("keys") == {}
    await there.add("keys", "a", '{"n":1}')
    await there.add("keys", "b", '{"n":2}')
    assert await here.all("keys") == {"a": '{"n":1}', "b": '{"n":2}'}
    await there.replace("keys", "a", '{"n":3}')
    await there.remove("keys", "b")
    assert await here.all("keys") == {"a": '{"n":3}'}


async def test_of_many_that_add_one_name_one_wins(redis: RedisServer, open_records: Opens) -> None:
    gateways, links = zip(*(open_records(redis) for _ in range(4)), strict=True)
    # As in a gateway that serves: an edit does not wait until connections are made.
    await asyncio.gather(*(answers(link) for link in links for _ in range(3)))
    await gateways[0].add("policy", "6", "{}")
    added = await asyncio.gather(
        *(gateways[i % 4].add("policy", "7", f'{{"by":{i}}}') for i in range(12))
    )
    assert sum(added) == 1


async def test_a_redis_that_lost_everything_gets_it_back_and_nobody_forgets_meanwhile(
    private_redis: RedisServer, open_records: Opens
) -> None:
    records, link = open_records(private_redis)
    await records.add("keys", "a", '{"n":1}')
    await records.add("keys", "a/revoked", '{"at":2}')
    kept = await records.all("keys")

    private_redis.kill()
    assert await records.all("keys") == kept
    assert link.problem
    assert link.problem == "Redis cannot be reached."
    private_redis.start()
    await answers(link)
    assert await records.all("keys") == kept

    assert not link.problem
    assert await open_records(private_redis)[0].all("keys") == kept


async def test_a_start_without_redis_knows_what_the_copy_tells_and_that_it_is_old(
    private_redis: RedisServer, open_records: Opens
) -> None:
    records, _ = open_records(private_redis)
    await records.add("keys", "b", "1")
    await records.add("keys", "a", "2")
    kept = await records.all("keys")
    assert records._writing is not None
    await records._writing
    private_redis.kill()

    later, link = open_records(private_redis)
    assert list(await later.all("keys")) == list(kept) == ["b", "a"]
    assert not later.is_current("keys")
    with pytest.raises(RecordsUnwritable):
        await later.add("keys", "c", "3")

    private_redis.start()
    await answers(link)
    assert await later.all("keys") == kept
    assert later.is_current("keys")
    assert await later.add("keys", "c", "3")
    assert not link.problem


async def test_an_older_state_of_redis_does_not_bring_back_a_revoked_key(
    private_redis: RedisServer, open_records: Opens
) -> None:
    records, _ = open_records(private_redis)
    await records.add("keys", "a", "1")
    before = private_redis.client.dump("paceline:{keys}:records")
    assert before is not None
    await records.add("keys", "a/revoked", "2")
    assert set(await records.all("keys")) == {"a", "a/revoked"}
    private_redis.client.restore("paceline:{keys}:records", 0, before, replace=True)

    assert set(await records.all("keys")) == {"a", "a/revoked"}
    assert set(await open_records(private_redis)[0].all("keys")) == {"a", "a/revoked"}


@pytest.mark.parametrize("value", ["not one of ours", "[7,half", "[]"])
async def test_a_value_that_nobody_wrote_means_nothing_and_breaks_nothing(
    redis: RedisServer, open_records: Opens, value: str
) -> None:
    records, link = open_records(redis)
    await records.add("keys", "a", "1")
    redis.client.hset("paceline:{keys}:records", "odd", value)
    told = await records.all("keys")
    assert told["a"] == "1"
    assert told["odd"].startswith('"')
    assert not link.problem


async def test_a_key_of_another_type_is_a_failure_and_no_empty_answer(
    redis: RedisServer, open_records: Opens
) -> None:
    records, link = open_records(redis)
    await records.add("keys", "a", "1")
    await records.all("keys")
    redis.client.set("paceline:{keys}:records", "a string")

    assert await records.all("keys") == {"a": "1"}
    assert link.problem == "A Redis key of Paceline has another type."
    redis.client.delete("paceline:{keys}:records")
    assert await records.all("keys") == {"a": "1"}
    assert not link.problem
    assert redis.client.hexists("paceline:{keys}:records", "a")


async def test_a_full_redis_refuses_an_edit_and_is_still_read(
    private_redis: RedisServer, open_records: Opens
) -> None:
    records, _ = open_records(private_redis)
    await records.add("keys", "a", "1")
    private_redis.configure("maxmemory", "1")
    with pytest.raises(RecordsUnwritable):
        await records.add("keys", "b", "2")
    assert await records.all("keys") == {"a": "1"}
    private_redis.configure("maxmemory", "0")
    assert await records.add("keys", "b", "2")


async def test_nobody_waits_for_an_edit_that_redis_is_slow_to_answer_and_it_may_be_kept(
    private_redis: RedisServer, open_records: Opens
) -> None:
    records, link = open_records(private_redis)
    await records.add("keys", "a", "1")
    assert await records.all("keys") == {"a": "1"}
    private_redis.freeze()
    with pytest.raises(WriteUnconfirmed):
        await records.add("keys", "b", "2")
    assert link.unreachable
    with pytest.raises(RecordsUnwritable) as refused:
        await records.remove("keys", "a")  # of which Redis never hears
    assert refused.type is RecordsUnwritable, "that is certain"
    assert await records.all("keys") == {"a": "1"}

    private_redis.resume()
    await answers(link)
    async with asyncio.timeout(10):
        while await records.all("keys") != {"a": "1", "b": "2"}:
            await asyncio.sleep(0.05)


async def test_an_edit_waits_for_a_redis_that_is_slow(
    private_redis: RedisServer, open_records: Opens
) -> None:
    records, link = open_records(private_redis)
    await records.add("keys", "a", "1")
    assert await records.all("keys") == {"a": "1"}
    private_redis.freeze()
    edit = asyncio.create_task(records.add("keys", "b", "2"))
    await asyncio.sleep(1.2)
    assert not edit.done()
    private_redis.resume()
    assert await edit
    assert not link.unreachable
