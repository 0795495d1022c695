"""Rate limits over several gateways, exchange by exchange."""

import json
import time
from collections.abc import Callable

import pytest

from gateway.auth.rate_limits import DAY_S, RateLimiter, day_of
from gateway.cluster.rate_limits import SharedRateLimits
from gateway.errors import RecordsUnwritable
from gateway.state.redis import RedisClient
from tests.support.gateway_fixtures import OpenRedis
from tests.support.rate_limit_model import ALL_LIMITS, NOON, START_S
from tests.support.redis_server import RedisServer

OpenGateway = Callable[..., "Gateway"]


class Gateway:
    def __init__(self, client: RedisClient, used_today: int) -> None:
        self.limiter = RateLimiter(ALL_LIMITS, START_S, NOON, used_today)
        self.shared = SharedRateLimits(client, lambda: [("key-a", self.limiter)], lambda: START_S)

    def use(self, requests: int, tokens: int) -> None:
        """Reserve and settle requests of so many tokens each."""
        for _ in range(requests):
            reservation = self.limiter.reserve(tokens, START_S, NOON)
            self.limiter.settle(reservation, 1, tokens, START_S, NOON)

    def remaining(self) -> tuple[int, ...]:
        """Return the remaining requests and tokens of the minute, and the tokens of the day."""
        limits = (self.limiter._requests, self.limiter._tokens, self.limiter._day)
        return tuple(limit.remaining for limit in limits if limit)


@pytest.fixture
def open_gateway(redis: RedisServer, open_redis: OpenRedis) -> OpenGateway:
    return lambda server=redis, used_today=0: Gateway(open_redis(server), used_today)


async def exchange(*gateways: Gateway) -> None:
    for gateway in gateways:
        await gateway.shared.exchange()


async def test_each_gateway_charges_requests_of_the_other_once(open_gateway: OpenGateway) -> None:
    first, second = open_gateway(), open_gateway()
    await exchange(first, second)
    first.use(2, 100)
    for _ in range(2):
        await exchange(first, second)
        assert second.remaining() == first.remaining() == (4, 400, 1800)
    second.use(1, 50)
    await exchange(second, first)
    assert second.remaining() == first.remaining() == (3, 350, 1750)
    assert first.limiter.admitted()[:4] == (2, 200, day_of(NOON), 200), "only its own requests"
    assert first.shared.gateways == second.shared.gateways == 2


async def test_running_requests_count_at_both_gateways_and_are_refunded(open_gateway) -> None:
    first, second = open_gateway(), open_gateway()
    await second.shared.exchange()
    running = first.limiter.reserve(300, START_S, NOON)
    await exchange(first, second)
    assert second.remaining() == (5, 300, 1700)
    assert second.limiter._remote_running == 1
    first.limiter.settle(running, 0, 0, START_S, NOON)
    await exchange(first, second)
    assert second.remaining() == (6, 600, 2000)
    assert second.limiter._remote_running == 0


async def test_tokens_reserved_at_a_gateway_after_midnight_count_not_today(open_gateway) -> None:
    first, second = open_gateway(), open_gateway()
    await second.shared.exchange()
    first.limiter.reserve(300, START_S, NOON + DAY_S)
    await exchange(first, second)
    assert second.remaining()[2] == 2000


async def test_running_requests_of_a_gateway_that_leaves_are_refunded(open_gateway) -> None:
    first, second = open_gateway(), open_gateway()
    first.limiter.reserve(300, START_S, NOON)
    await exchange(first, second)
    assert second.limiter._remote_running == 1
    await first.shared.leave()
    await second.shared.exchange()
    assert second.limiter._remote_running == 0
    assert second.remaining()[2] == 2000
    assert second.shared.gateways == 1


async def test_a_started_gateway_charges_earlier_usage_once(open_gateway: OpenGateway) -> None:
    first = open_gateway()
    first.use(2, 100)
    await first.shared.exchange()
    started = open_gateway(used_today=200)
    await started.shared.exchange()
    assert started.remaining() == (6, 600, 1800)
    first.use(1, 100)
    await exchange(first, started)
    assert started.remaining() == (5, 500, 1700)


async def test_after_an_outage_the_day_is_charged_and_the_minute_is_not(
    private_redis: RedisServer, open_gateway: OpenGateway
) -> None:
    first, second = open_gateway(private_redis), open_gateway(private_redis)
    await exchange(first, second, first)
    private_redis.kill()
    for gateway in (first, second):
        with pytest.raises(RecordsUnwritable):
            await gateway.shared.exchange()
        assert gateway.remaining() == (3, 300, 1000)
    first.use(2, 100)
    private_redis.start()
    await exchange(first, second, first)
    assert second.remaining()[0] == 3, "the limit refills from the gateway's share"
    assert first.remaining()[2] == second.remaining()[2] == 1800


async def test_without_any_exchange_a_gateway_assumes_another_one(
    private_redis: RedisServer, open_gateway: OpenGateway
) -> None:
    private_redis.kill()
    alone = open_gateway(private_redis)
    with pytest.raises(RecordsUnwritable):
        await alone.shared.exchange()
    assert alone.remaining()[:2] == (3, 300)
    assert alone.shared.gateways == 0


@pytest.mark.parametrize("gateways", [65, 200])
async def test_c14_any_number_of_gateways_is_charged_once(redis, open_gateway, gateways) -> None:
    gateway = open_gateway()
    await gateway.shared.exchange()
    totals = json.dumps({"key-a": [1, 2, day_of(NOON), 2, 0, 0]})
    now_ms = int(time.time() * 1000)
    for number in range(gateways):
        redis.client.hset("paceline:{rate_limits}:admitted", f"gateway-{number}", totals)
        redis.client.zadd("paceline:{rate_limits}:gateways", {f"gateway-{number}": now_ms})
    for _ in range(3):
        await gateway.shared.exchange()
        assert gateway.remaining()[2] == 2000 - 2 * gateways
    assert gateway.shared.gateways == gateways + 1
    redis.client.delete("paceline:{rate_limits}:admitted")
    await gateway.shared.exchange()
    for number in range(gateways - 64, gateways):
        # They return after a pause longer than Redis remembers.
        redis.client.hset("paceline:{rate_limits}:admitted", f"gateway-{number}", totals)
    await gateway.shared.exchange()
    assert gateway.remaining()[2] == 2000 - 2 * gateways
