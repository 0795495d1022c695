"""Prefix claims over Redis: every gateway learns the claims of all gateways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest

from gateway.cluster import shared_stream
from gateway.cluster.prefix_claims import SharedPrefixClaims
from gateway.cluster.redis import RedisClient
from gateway.errors import RecordsUnwritable
from gateway.routing.prefix_affinity import (
    MAX_PENDING_CLAIMS,
    NOTHING_EXPECTED,
    PrefixIndex,
)
from gateway.types import Usage
from policies.sections import PrefixPolicy
from tests.support.prefix_claims import (
    LAPTOP,
    RULES,
    STUDIO,
    key_of,
    prefix_holders,
    system_prompt,
)
from tests.support.redis_server import TEST_DEADLINE_S, RedisServer


class PeerGateway:
    """The prefix index of one gateway, with its Redis client."""

    def __init__(self, url: str) -> None:
        self.now_s = 1_000_000.0
        self.prefixes = PrefixIndex(lambda: self.now_s)
        self.client = RedisClient(url, TEST_DEADLINE_S)
        self._shared = SharedPrefixClaims(self.client, self.prefixes)

    async def sync(self) -> None:
        await self._shared.exchange()

    def workers(self, name: str = "p") -> set[tuple[str, str]]:
        return prefix_holders(self.prefixes, name)


@pytest.fixture
async def two_indexes(redis: RedisServer) -> AsyncIterator[tuple[PeerGateway, PeerGateway]]:
    pair = PeerGateway(redis.url), PeerGateway(redis.url)
    yield pair
    for gateway in pair:
        await gateway.client.close()


async def test_gateways_exchange_claims_and_their_removal(
    two_indexes: tuple[PeerGateway, PeerGateway],
) -> None:
    first, second = two_indexes
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, RULES)
    await first.sync()
    await second.sync()
    assert second.workers() == {STUDIO}
    expected = second.prefixes.record_dispatch(system_prompt(), STUDIO, RULES)
    second.prefixes.record_usage(system_prompt(), STUDIO, Usage(100, 5, 0), expected)
    await second.sync()
    await first.sync()
    assert first.workers() == set()


async def test_a_claim_expires_at_another_gateway_after_its_ttl(
    two_indexes: tuple[PeerGateway, PeerGateway],
) -> None:
    first, second = two_indexes
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, PrefixPolicy(ttl_s=60))
    await first.sync()
    await second.sync()
    second.now_s += 61
    assert second.workers() == set()


async def test_a_started_gateway_loads_earlier_claims(redis: RedisServer) -> None:
    early = PeerGateway(redis.url)
    for number in range(50):
        early.prefixes.record_dispatch(system_prompt(str(number)), STUDIO, RULES)
        await early.sync()
    early.prefixes.record_dispatch(system_prompt("0"), LAPTOP, RULES)
    await early.sync()
    late = PeerGateway(redis.url)
    await late.sync()
    assert late.workers("0") == {STUDIO, LAPTOP}
    assert late.workers("49") == {STUDIO}
    for gateway in (early, late):
        await gateway.client.close()


async def test_a_started_gateway_reads_many_claims_page_by_page(
    two_indexes: tuple[PeerGateway, PeerGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_stream, "PAGE_ENTRIES", 8)
    early, late = two_indexes
    for number in range(50):
        early.prefixes.record_dispatch(system_prompt(str(number)), STUDIO, RULES)
    await early.sync()
    await late.sync()
    assert len(late.prefixes) == 5 * 8
    await late.sync()
    assert len(late.prefixes) == 50
    early.prefixes.record_dispatch(system_prompt("0"), LAPTOP, RULES)
    await early.sync()
    await late.sync()
    assert late.workers("0") == {STUDIO, LAPTOP}


async def test_a_gateway_ignores_its_own_claims_from_redis(
    two_indexes: tuple[PeerGateway, PeerGateway],
) -> None:
    first, _ = two_indexes
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, RULES)
    await first.sync()
    first.prefixes.record_usage(system_prompt(), STUDIO, None, NOTHING_EXPECTED)
    syncing = asyncio.create_task(first.sync())
    await asyncio.sleep(0)  # the exchange is running
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, RULES)
    await syncing
    assert first.workers() == {STUDIO}, "a returning claim is older than the gateway's own"


async def test_a_gateway_reads_all_claims_after_a_reconnect(
    two_indexes: tuple[PeerGateway, PeerGateway], redis: RedisServer
) -> None:
    first, second = two_indexes
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, RULES)
    for gateway in (first, second, second):
        await gateway.sync()
    # Another Redis behind the connection has an entry that is older than the last one read.
    stream = "paceline:{prefixes}:claims"
    claim = json.dumps([[[key_of("q").hex(), 300]], *LAPTOP, 900])
    redis.client.delete(stream)
    redis.client.xadd(
        stream, {"gateway": "other", "claim": claim}, id=f"{int(time.time() * 1000) - 5000}-0"
    )
    await second.sync()
    assert second.workers("q") == set()
    redis.client.client_kill_filter(_type="normal", skipme=True)
    for _ in range(3):
        with contextlib.suppress(RecordsUnwritable):
            await second.sync()
    assert second.workers("q") == {LAPTOP}


async def test_a_claim_ages_while_it_is_stored_in_redis(
    two_indexes: tuple[PeerGateway, PeerGateway],
) -> None:
    first, late = two_indexes
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, PrefixPolicy(ttl_s=0.1))
    first.prefixes.record_dispatch(system_prompt("q"), STUDIO, RULES)
    await first.sync()
    await asyncio.sleep(0.2)
    await late.sync()
    assert (late.workers("p"), late.workers("q")) == (set(), {STUDIO})


async def test_claims_of_an_outage_are_written_after_it(
    private_redis: RedisServer,
) -> None:
    first, second = PeerGateway(private_redis.url), PeerGateway(private_redis.url)
    await first.sync()
    private_redis.kill()
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, RULES)
    for _ in range(2):
        with pytest.raises(RecordsUnwritable):
            await first.sync()
    assert first.workers() == {STUDIO}, "a gateway uses its own claims"
    private_redis.start()
    await first.sync()
    await second.sync()
    assert second.workers() == {STUDIO}
    for gateway in (first, second):
        await gateway.client.close()


async def test_an_invalid_entry_is_skipped(
    redis: RedisServer, two_indexes: tuple[PeerGateway, PeerGateway]
) -> None:
    first, second = two_indexes
    redis.client.xadd("paceline:{prefixes}:claims", {"gateway": "x", "claim": "[1]"})
    redis.client.xadd("paceline:{prefixes}:claims", {"words": "none"})
    first.prefixes.record_dispatch(system_prompt("p"), STUDIO, RULES)
    await first.sync()
    await second.sync()
    assert second.workers() == {STUDIO}


def test_pending_claims_are_bounded() -> None:
    prefixes = PrefixIndex(lambda: 1_000_000.0)
    for number in range(MAX_PENDING_CLAIMS + 10):
        prefixes.record_dispatch(system_prompt(str(number)), STUDIO, RULES)
    pending = prefixes.take_pending()
    assert len(pending) == MAX_PENDING_CLAIMS
    assert pending[-1].ends == ((key_of(str(MAX_PENDING_CLAIMS + 9)).hex(), 0),)
    assert not prefixes.take_pending()
