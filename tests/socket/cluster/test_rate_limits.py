"""Rate limits over several gateways, exchange by exchange."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from gateway.auth.rate_limits import RateLimiter, day_of
from gateway.auth.records import Limits
from gateway.cluster.rate_limits import SharedRateLimits
from gateway.cluster.redis import RedisClient
from gateway.errors import RecordsUnwritable
from tests.support.rate_limit_model import ALL_LIMITS, NOON, START_S
from tests.support.redis_server import RedisServer

Opens = Callable[..., "Gateway"]


class Gateway:
    """The limiter of one key at one gateway."""

    def __init__(self, url: str, limits: Limits = ALL_LIMITS, used_today: int = 0) -> None:
        self.redis = RedisClient(url)
        self.limiter = RateLimiter(limits, START_S, NOON, used_today)
        self.shared = SharedRateLimits(
            self.redis, lambda: [("key-a", self.limiter)], lambda: START_S
        )

    def use(self, requests: int, tokens: int) -> None:
        """Let requests of so many tokens run and end."""
        for _ in range(requests):
            reservation = self.limiter.reserve(tokens, START_S, NOON)
            self.limiter.settle(reservation, 1, tokens, START_S, NOON)

    def remaining(self) -> tuple[int, int]:
        """Return the remaining requests and tokens of the minute."""
        requests, tokens = self.limiter._requests, self.limiter._tokens
        assert requests is not None
        assert tokens is not None
        return requests.remaining, tokens.remaining

    def remaining_today(self) -> int:
        assert self.limiter._day is not None
        return self.limiter._day.remaining


@pytest.fixture
async def open_gateway() -> AsyncIterator[Opens]:
    async with AsyncExitStack() as stack:

        def one(server: RedisServer, used_today: int = 0) -> Gateway:
            gateway = Gateway(server.url, used_today=used_today)
            stack.push_async_callback(gateway.redis.close)
            return gateway

        yield one


async def test_each_gateway_charges_what_the_other_admits_once(
    redis: RedisServer, open_gateway: Opens
) -> None:
    first, second = open_gateway(redis), open_gateway(redis)
    await first.shared.exchange()
    await second.shared.exchange()
    first.use(2, 100)
    for _ in range(2):
        await first.shared.exchange()
        await second.shared.exchange()
        assert second.remaining() == first.remaining() == (4, 400)
        assert second.remaining_today() == first.remaining_today() == 1800
    second.use(1, 50)
    await second.shared.exchange()
    await first.shared.exchange()
    assert second.remaining() == first.remaining() == (3, 350)
    assert first.limiter.admitted()[:4] == (2, 200, day_of(NOON), 200), "its own alone"
    assert first.shared.gateways == second.shared.gateways == 2


async def test_running_requests_count_everywhere_and_a_refund_comes_back(
    redis: RedisServer, open_gateway: Opens
) -> None:
    first, second = open_gateway(redis), open_gateway(redis)
    await second.shared.exchange()
    running = first.limiter.reserve(300, START_S, NOON)
    await first.shared.exchange()
    await second.shared.exchange()
    assert second.remaining() == (5, 300)
    assert second.remaining_today() == 1700
    assert second.limiter._remote_running == 1
    first.limiter.settle(running, 0, 0, START_S, NOON)
    await first.shared.exchange()
    await second.shared.exchange()
    assert second.remaining() == (6, 600)
    assert second.remaining_today() == 2000
    assert second.limiter._remote_running == 0


async def test_a_gateway_that_leaves_has_nothing_running(
    redis: RedisServer, open_gateway: Opens
) -> None:
    first, second = open_gateway(redis), open_gateway(redis)
    first.limiter.reserve(300, START_S, NOON)
    await first.shared.exchange()
    await second.shared.exchange()
    assert second.limiter._remote_running == 1
    await first.shared.leave()
    await second.shared.exchange()
    assert second.limiter._remote_running == 0
    assert second.remaining_today() == 2000
    assert second.shared.gateways == 1


async def test_a_gateway_that_starts_has_earlier_use_in_its_budget_already(
    redis: RedisServer, open_gateway: Opens
) -> None:
    first = open_gateway(redis)
    first.use(2, 100)
    await first.shared.exchange()
    late = open_gateway(redis, used_today=200)
    await late.shared.exchange()
    assert late.remaining() == (6, 600)
    assert late.remaining_today() == 1800
    first.use(1, 100)
    await first.shared.exchange()
    await late.shared.exchange()
    assert late.remaining() == (5, 500)
    assert late.remaining_today() == 1700


async def test_after_an_outage_the_day_is_charged_and_the_minute_is_not(
    private_redis: RedisServer, open_gateway: Opens
) -> None:
    first, second = open_gateway(private_redis), open_gateway(private_redis)
    for gateway in (first, second, first):
        await gateway.shared.exchange()
    private_redis.kill()
    for gateway in (first, second):
        with pytest.raises(RecordsUnwritable):
            await gateway.shared.exchange()
        assert gateway.remaining() == (3, 300)
        assert gateway.remaining_today() == 1000
    first.use(2, 100)
    private_redis.start()
    for gateway in (first, second, first):
        await gateway.shared.exchange()
    assert second.remaining()[0] == 3, "it refills to the whole limit from its share"
    assert first.remaining_today() == second.remaining_today() == 1800


async def test_without_any_exchange_a_gateway_assumes_another_one(
    private_redis: RedisServer, open_gateway: Opens
) -> None:
    private_redis.kill()
    alone = open_gateway(private_redis)
    with pytest.raises(RecordsUnwritable):
        await alone.shared.exchange()
    assert alone.remaining() == (3, 300)
    assert alone.shared.gateways == 0
