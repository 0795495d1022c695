"""Claims to system prompts over Redis: what one gateway learns the others know soon after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.cluster.prefix_claims import SharedPrefixClaims
from gateway.cluster.redis import RedisClient
from gateway.errors import RecordsUnwritable
from gateway.routing.prefix_affinity import MAX_PENDING_CLAIMS, PrefixIndex
from gateway.types import Usage
from policies.sections import PrefixPolicy
from tests.support.prefix_claims import LAPTOP, RULES, STUDIO, prefix_holders
from tests.support.redis_server import RedisServer


class Neighbour:
    """One gateway's claims, with its way to Redis."""

    def __init__(self, url: str) -> None:
        self.now_s = 1_000_000.0
        self.prefixes = PrefixIndex(lambda: self.now_s)
        self.link = RedisClient(url)
        self._shared = SharedPrefixClaims(self.link, self.prefixes)

    async def turn(self) -> None:
        await self._shared.exchange()

    def holders(self, name: str = "p") -> set[tuple[str, str]]:
        return prefix_holders(self.prefixes, name)


@pytest.fixture
async def two_indexes(redis: RedisServer) -> AsyncIterator[tuple[Neighbour, Neighbour]]:
    both = Neighbour(redis.url), Neighbour(redis.url)
    yield both
    for one in both:
        await one.link.close()


async def test_what_one_gateway_claims_the_other_knows_and_what_it_drops_too(
    two_indexes: tuple[Neighbour, Neighbour],
) -> None:
    one, other = two_indexes
    one.prefixes.record_dispatch("p", STUDIO, RULES)
    await one.turn()
    await other.turn()
    assert other.holders() == {STUDIO}
    other.prefixes.record_usage("p", STUDIO, Usage(100, 5, 0), expected=True)
    await other.turn()
    await one.turn()
    assert one.holders() == set()


async def test_a_claim_is_as_old_elsewhere_as_it_is_here(
    two_indexes: tuple[Neighbour, Neighbour],
) -> None:
    one, other = two_indexes
    one.prefixes.record_dispatch("p", STUDIO, PrefixPolicy(ttl_s=60))
    await one.turn()
    await other.turn()
    other.now_s += 61
    assert other.holders() == set()


async def test_a_gateway_that_starts_knows_what_was_claimed_before(redis: RedisServer) -> None:
    early = Neighbour(redis.url)
    for number in range(50):
        early.prefixes.record_dispatch(str(number), STUDIO, RULES)
        await early.turn()
    early.prefixes.record_dispatch("0", LAPTOP, RULES)
    await early.turn()
    late = Neighbour(redis.url)
    await late.turn()
    assert late.holders("0") == {STUDIO, LAPTOP}
    assert late.holders("49") == {STUDIO}
    for one in (early, late):
        await one.link.close()


async def test_its_own_news_come_back_to_nobody(two_indexes: tuple[Neighbour, Neighbour]) -> None:
    one, _ = two_indexes
    one.prefixes.record_dispatch("p", STUDIO, RULES)
    await one.turn()
    one.prefixes.record_usage("p", STUDIO, None, expected=False)
    turning = asyncio.create_task(one.turn())
    await asyncio.sleep(0)  # the news are on their way
    one.prefixes.record_dispatch("p", STUDIO, RULES)
    await turning
    assert one.holders() == {STUDIO}, "what came back is older than what it knows"


async def test_a_claim_that_waited_in_redis_has_grown_older_there(
    two_indexes: tuple[Neighbour, Neighbour],
) -> None:
    one, late = two_indexes
    one.prefixes.record_dispatch("p", STUDIO, PrefixPolicy(ttl_s=0.1))
    one.prefixes.record_dispatch("q", STUDIO, RULES)
    await one.turn()
    await asyncio.sleep(0.2)
    await late.turn()
    assert (late.holders("p"), late.holders("q")) == (set(), {STUDIO})


async def test_what_could_not_be_told_is_told_once_redis_is_back(
    private_redis: RedisServer,
) -> None:
    one, other = Neighbour(private_redis.url), Neighbour(private_redis.url)
    await one.turn()
    private_redis.kill()
    one.prefixes.record_dispatch("p", STUDIO, RULES)
    for _ in range(2):
        with pytest.raises(RecordsUnwritable):
            await one.turn()
    assert one.holders() == {STUDIO}, "what it knows itself it goes by"
    private_redis.start()
    await one.turn()
    await other.turn()
    assert other.holders() == {STUDIO}
    for each in (one, other):
        await each.link.close()


async def test_an_entry_that_nobody_understands_stops_none_of_the_others(
    redis: RedisServer, two_indexes: tuple[Neighbour, Neighbour]
) -> None:
    one, other = two_indexes
    redis.client.xadd("paceline:{prefixes}:claims", {"gateway": "x", "claim": "[1]"})
    redis.client.xadd("paceline:{prefixes}:claims", {"words": "none"})
    one.prefixes.record_dispatch("p", STUDIO, RULES)
    await one.turn()
    await other.turn()
    assert other.holders() == {STUDIO}


def test_news_that_nobody_hears_are_bounded() -> None:
    prefixes = PrefixIndex(lambda: 1_000_000.0)
    for number in range(MAX_PENDING_CLAIMS + 10):
        prefixes.record_dispatch(str(number), STUDIO, RULES)
    news = prefixes.take_pending()
    assert len(news) == MAX_PENDING_CLAIMS
    assert news[-1].prefix_key == str(MAX_PENDING_CLAIMS + 9)
    assert not prefixes.take_pending()
