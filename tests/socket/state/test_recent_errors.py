"""The last errors over Redis: every gateway lists those of all gateways."""

import contextlib
import json

import pytest

from gateway.errors import RecordsUnwritable
from gateway.state.recent_errors import MAX_ERRORS, ErrorRecord, RecentErrors, SharedErrors
from gateway.state.redis import RedisClient
from tests.support.gateway_fixtures import OpenRedis
from tests.support.redis_server import RedisServer

STREAM = "paceline:{errors}:recent"
START_S = 1_000_000.0


class PeerGateway:
    """The errors of one gateway, with its clock and its exchange with others."""

    def __init__(self, client: RedisClient) -> None:
        self.now_s = START_S
        self.errors = RecentErrors()
        self._shared = SharedErrors(client, self.errors, lambda: self.now_s)

    async def sync(self) -> None:
        await self._shared.exchange()

    def fail(self, request_id: str, key: str = "") -> None:
        self.now_s += 1
        texts = {"model": request_id, "worker_id": "studio", "reason": "The worker failed."}
        failure = {"request_id": request_id, "key": key, "code": "worker_failed", "status": 502}
        record = {"unix_s": self.now_s, **failure, **texts}
        self.errors.add(ErrorRecord.model_validate(record))

    def request_ids(self) -> list[str]:
        return sorted(one.request_id for one in self.errors.newest_first())


async def sync(*gateways: PeerGateway) -> None:
    for gateway in gateways:
        await gateway.sync()


Pair = tuple[PeerGateway, PeerGateway]


@pytest.fixture
def two_gateways(redis: RedisServer, open_redis: OpenRedis) -> Pair:
    return PeerGateway(open_redis(redis)), PeerGateway(open_redis(redis))


async def test_gateways_list_the_errors_of_each_other_once(two_gateways: Pair) -> None:
    first, second = two_gateways
    first.fail("req-1", key="key-1")
    second.fail("req-2")
    await sync(first, second, first, second)
    assert first.request_ids() == second.request_ids() == ["req-1", "req-2"]
    (merged,) = [one for one in second.errors.newest_first() if one.request_id == "req-1"]
    assert (merged.key, merged.worker_id, merged.status) == ("key-1", "studio", 502)


async def test_the_time_of_an_error_follows_the_clock_of_the_gateway_that_lists_it(
    two_gateways: Pair,
) -> None:
    first, second = two_gateways
    second.now_s += 3600
    first.fail("req-1")
    first.now_s += 30  # while Redis was away
    await sync(first, second)
    (merged,) = second.errors.newest_first()
    assert merged.unix_s <= second.now_s - 30


async def test_after_a_reconnect_no_error_is_listed_twice(two_gateways, redis) -> None:
    first, second = two_gateways
    first.fail("req-1")
    await sync(first, second)
    redis.client.client_kill_filter(_type="normal", skipme=True)
    first.fail("req-2")
    for gateway in (first, second, first, second):
        with contextlib.suppress(RecordsUnwritable):
            await gateway.sync()
    assert second.request_ids() == first.request_ids() == ["req-1", "req-2"]


async def test_errors_of_an_outage_reach_the_others_after_it(private_redis, open_redis) -> None:
    first, second = (PeerGateway(open_redis(private_redis)) for _ in range(2))
    await first.sync()
    private_redis.kill()
    for number in range(MAX_ERRORS + 5):
        first.fail(f"req-{number}")
        with pytest.raises(RecordsUnwritable):
            await first.sync()
    assert len(first.request_ids()) == MAX_ERRORS, "a gateway lists its own errors"
    private_redis.start()
    await sync(first, second)
    assert second.request_ids() == first.request_ids()


async def test_an_entry_of_another_version_is_skipped_and_the_stream_is_bounded(
    redis: RedisServer, two_gateways: Pair
) -> None:
    first, second = two_gateways
    for text in ("[1]", "{", json.dumps({"age_s": 1e400}), json.dumps({"age_s": "x"}), "{}"):
        redis.client.xadd(STREAM, {"gateway": "x", "error": text})
    redis.client.xadd(STREAM, {"words": "none"})
    for number in range(20 * MAX_ERRORS):
        first.fail(f"req-{number}")
        if number % MAX_ERRORS == 0:
            await first.sync()
    await sync(first, second)
    assert len(second.request_ids()) == MAX_ERRORS
    assert redis.client.xlen(STREAM) < 7 * MAX_ERRORS
