"""Shared counters and worker reports of several gateways in one Redis are exact."""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from gateway.errors import RecordsUnwritable
from gateway.state.counters import CounterKey
from gateway.state.redis import RedisClient
from gateway.state.shared_counters import SharedCounters
from gateway.state.worker_reports import SharedWorkerReports
from tests.support.boot_reports import boot_report
from tests.support.gateway_fixtures import OpenRedis
from tests.support.redis_server import RedisServer

DONE: CounterKey = ("outcomes", "completed")
COUNTS = "paceline:{counters}:totals"
OpenCounters = Callable[..., "GatewayCounters"]


class GatewayCounters:
    """Shared counters as one gateway uses them."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.boots = SharedWorkerReports(client)
        self.pending: Counter[CounterKey] = Counter()
        self.store = SharedCounters(client, self.boots, self._take_pending)

    def count(self, counts: Mapping[CounterKey, int]) -> None:
        self.pending.update(counts)

    def _take_pending(self) -> Mapping[CounterKey, int]:
        pending, self.pending = self.pending, Counter()
        return pending

    async def sync(self) -> None:
        await self.store.exchange()
        await self.boots.exchange((), ())

    async def counts(self) -> Mapping[CounterKey, int]:
        await self.sync()
        return await self.store.counts()


@pytest.fixture
def open_counters(redis: RedisServer, open_redis: OpenRedis) -> OpenCounters:
    return lambda server=redis: GatewayCounters(open_redis(server))


def make_old(redis: RedisServer, counters: GatewayCounters) -> str:
    """Let the counts of a gateway be so old that others fold them; return the id of its process."""
    process_id = counters.store._id
    text = redis.client.hget(COUNTS, process_id)
    assert isinstance(text, str)
    redis.client.hset(COUNTS, process_id, re.sub(r'"updated_ms":\d+', '"updated_ms":1', text))
    return process_id


async def sync(*gateways: GatewayCounters, times: int = 1) -> None:
    for gateway in gateways * times:
        await gateway.sync()


async def test_an_old_process_is_folded_and_counts_once(redis, open_counters) -> None:
    for count in (2, 3):
        ended = open_counters()
        ended.count({DONE: count})
        await ended.sync()
        make_old(redis, ended)
    first, second = open_counters(), open_counters()
    for _ in range(4):
        assert await first.counts() == await second.counts() == {DONE: 5}
    names = set(redis.client.hkeys(COUNTS)) - {"created_ms", "folds"}
    assert names == {"earlier", first.store._id, second.store._id}
    tombstones = list(redis.client.scan_iter("paceline:{counters}:folded:*"))
    assert len(tombstones) == 2
    assert {round(redis.client.ttl(name) / 86_400, 2) for name in tombstones} == {30}


async def test_a_process_folded_while_disconnected_continues_and_counts_once(
    redis: RedisServer, open_counters: OpenCounters
) -> None:
    cut_off, other = open_counters(), open_counters()
    cut_off.count({DONE: 2})
    await cut_off.sync()
    process_id = make_old(redis, cut_off)
    assert await other.counts() == {DONE: 2}
    cut_off.count({DONE: 5})
    await cut_off.sync()
    assert await cut_off.counts() == await other.counts() == {DONE: 7}
    assert cut_off.store._id != process_id


async def test_gateways_restore_the_counts_of_ended_processes_to_an_emptied_redis(
    redis: RedisServer, open_counters: OpenCounters
) -> None:
    ended, running = open_counters(), open_counters()
    ended.count({DONE: 4})
    await ended.store.store_report(boot_report("a", 5))
    await ended.sync()
    running.count({DONE: 1})
    await running.sync()
    redis.client.flushall()

    assert await running.counts() == {DONE: 5}
    later = open_counters()
    assert await later.counts() == {DONE: 5}
    assert [report.lanes[0].requests for report in await later.store.reports()] == [5]


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"updated_ms":1,"totals":[[5,5]]}', "{}"])
async def test_foreign_data_in_the_hash_is_a_failure_and_no_count(
    redis: RedisServer, open_counters: OpenCounters, text: str
) -> None:
    counters = open_counters()
    counters.count({DONE: 1})
    await counters.sync()
    redis.client.hset(COUNTS, "odd", text)
    redis.client.zadd(COUNTS.replace("totals", "updates"), {"odd": time.time() * 1000})
    with pytest.raises(RecordsUnwritable):
        await counters.sync()
    assert await counters.store.counts() == {DONE: 1}
    assert "holds data that Paceline did not write" in counters.client.problem
    redis.client.hdel(COUNTS, "odd")
    assert await counters.counts() == {DONE: 1}
    assert not counters.client.problem
