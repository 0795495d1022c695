"""Counts and reports of several gateways in one Redis: each counts once, whatever happens to it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack

import pytest

from gateway.cluster.counters import SharedCounters
from gateway.cluster.redis import RedisClient
from gateway.cluster.worker_reports import SharedWorkerReports
from gateway.errors import RecordsUnwritable
from gateway.storage.counters import CounterKey
from tests.support.boot_reports import boot_report
from tests.support.redis_server import RedisServer

DONE: CounterKey = ("outcomes", "completed")
COUNTS = "paceline:{counters}:totals"
Opens = Callable[[RedisServer], "Opened"]


class Opened:
    """The store of one gateway."""

    def __init__(self, link: RedisClient) -> None:
        self.link = link
        self.boots = SharedWorkerReports(link)
        self.pending: Counter[CounterKey] = Counter()
        self.store = SharedCounters(link, self.boots, self._take_pending)

    def count(self, counts: Mapping[CounterKey, int]) -> None:
        self.pending.update(counts)

    def _take_pending(self) -> Mapping[CounterKey, int]:
        pending, self.pending = self.pending, Counter()
        return pending

    async def turn(self) -> None:
        await self.store.exchange()
        await self.boots.exchange((), ())

    async def counts(self) -> Mapping[CounterKey, int]:
        await self.turn()
        return await self.store.counts()


@pytest.fixture
async def open_counters() -> AsyncIterator[Opens]:
    async with AsyncExitStack() as stack:

        def one(server: RedisServer) -> Opened:
            opened = Opened(RedisClient(server.url))
            stack.push_async_callback(opened.link.close)
            return opened

        yield one


async def test_counts_of_all_gateways_add_up_however_often_they_are_told(
    redis: RedisServer, open_counters: Opens
) -> None:
    first, second = open_counters(redis), open_counters(redis)
    first.count({DONE: 2, ("retries",): 1})
    second.count({DONE: 3})
    for _ in range(3):
        await first.turn()
        await second.turn()
    assert await first.counts() == await second.counts() == {DONE: 5, ("retries",): 1}
    first.count({DONE: 1})
    await first.turn()
    assert await open_counters(redis).counts() == {DONE: 6, ("retries",): 1}


async def test_what_is_counted_while_redis_is_away_is_told_later_and_once(
    private_redis: RedisServer, open_counters: Opens
) -> None:
    first, second = open_counters(private_redis), open_counters(private_redis)
    first.count({DONE: 1})
    await first.turn()
    await second.turn()
    private_redis.kill()
    for _ in range(2):
        first.count({DONE: 1})
        with pytest.raises(RecordsUnwritable):
            await first.turn()
    assert await first.store.counts() == {DONE: 3}
    private_redis.start()
    await second.turn()
    await first.turn()
    assert await second.counts() == await first.counts() == {DONE: 3}


async def test_a_life_that_ended_long_ago_is_folded_and_counts_once(
    redis: RedisServer, open_counters: Opens
) -> None:
    for count in (2, 3):
        ended = open_counters(redis)
        ended.count({DONE: count})
        await ended.turn()
        life = ended.store._id
        text = redis.client.hget(COUNTS, life)
        assert isinstance(text, str)
        redis.client.hset(COUNTS, life, re.sub(r'"updated_ms":\d+', '"updated_ms":1', text))
    first, second = open_counters(redis), open_counters(redis)
    for _ in range(4):
        assert await first.counts() == {DONE: 5}
        assert await second.counts() == {DONE: 5}
    names = set(redis.client.hkeys(COUNTS)) - {"created_ms", "folds"}
    assert names == {"earlier", first.store._id, second.store._id}


async def test_a_life_that_was_folded_while_it_was_cut_off_goes_on_and_counts_once(
    redis: RedisServer, open_counters: Opens
) -> None:
    cut_off, other = open_counters(redis), open_counters(redis)
    cut_off.count({DONE: 2})
    await cut_off.turn()
    life = cut_off.store._id
    text = redis.client.hget(COUNTS, life)
    assert isinstance(text, str)
    redis.client.hset(COUNTS, life, re.sub(r'"updated_ms":\d+', '"updated_ms":1', text))
    assert await other.counts() == {DONE: 2}
    cut_off.count({DONE: 5})

    await cut_off.turn()
    assert await cut_off.counts() == {DONE: 7}
    assert await other.counts() == {DONE: 7}
    assert cut_off.store._id != life


async def test_a_redis_that_is_emptied_gets_back_what_gateways_know_of_ended_lives(
    redis: RedisServer, open_counters: Opens
) -> None:
    ended, here = open_counters(redis), open_counters(redis)
    ended.count({DONE: 4})
    await ended.store.store_report(boot_report("a", 5))
    await ended.turn()
    here.count({DONE: 1})
    await here.turn()
    redis.client.flushall()

    assert await here.counts() == {DONE: 5}
    later = open_counters(redis)
    assert await later.counts() == {DONE: 5}
    assert [one.lanes[0].requests for one in await later.store.reports()] == [5]


async def test_an_overtaken_report_does_not_turn_counts_back(
    redis: RedisServer, open_counters: Opens
) -> None:
    first, second = open_counters(redis), open_counters(redis)
    await first.store.store_report(boot_report("a", 5))
    await first.turn()
    await second.store.store_report(boot_report("a", 3))
    await second.turn()
    for each in (first, second, open_counters(redis)):
        await each.turn()
        assert [one.lanes[0].requests for one in await each.store.reports()] == [5]


async def test_sums_over_any_number_of_boots_are_exact_and_what_is_kept_is_bounded(
    redis: RedisServer, open_counters: Opens
) -> None:
    first, second = open_counters(redis), open_counters(redis)
    for boot in range(40):
        await (first, second)[boot % 2].store.store_report(boot_report(f"boot-{boot}", boot))
        await first.turn()
        await second.turn()
    for _ in range(30):
        await first.turn()
        await second.turn()
    for each in (first, second, open_counters(redis)):
        await each.turn()
        kept = await each.store.reports()
        assert sum(one.lanes[0].requests for one in kept) == sum(range(40))
        assert sum(one.lanes[0].speculation.accepted for one in kept) == 2 * sum(range(40))
        assert len(kept) <= 17


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"updated_ms":1,"totals":[[5,5]]}', "{}"])
async def test_a_life_that_nobody_wrote_is_a_failure_and_no_count(
    redis: RedisServer, open_counters: Opens, text: str
) -> None:
    opened = open_counters(redis)
    opened.count({DONE: 1})
    await opened.turn()
    redis.client.hset(COUNTS, "odd", text)
    redis.client.zadd(COUNTS.replace("totals", "updates"), {"odd": time.time() * 1000})
    with pytest.raises(RecordsUnwritable):
        await opened.turn()
    assert await opened.store.counts() == {DONE: 1}
    assert opened.link.problem == "A Redis key of Paceline holds data that Paceline did not write."
    redis.client.hdel(COUNTS, "odd")
    assert await opened.counts() == {DONE: 1}
    assert not opened.link.problem
