"""Prefix claims over Redis: every gateway learns the claims of all gateways."""

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from gateway.errors import RecordsUnwritable
from gateway.routing.prefix_affinity import MAX_PENDING_CLAIMS, NOTHING_EXPECTED, PrefixIndex
from gateway.state import shared_stream
from gateway.state.prefix_claims import SharedPrefixClaims
from gateway.state.redis import RedisClient
from gateway.types import Usage
from policies.sections import PrefixPolicy
from tests.support.gateway_fixtures import OpenRedis
from tests.support.prefix_claims import LAPTOP, RULES, STUDIO, key_of, prefix_holders, system_prompt
from tests.support.redis_server import RedisServer

STREAM = "paceline:{prefixes}:claims"


class PeerGateway:
    """The prefix index of one gateway, and its exchange with others."""

    def __init__(self, client: RedisClient) -> None:
        self.now_s = 1_000_000.0
        self.prefixes = PrefixIndex(lambda: self.now_s)
        self._shared = SharedPrefixClaims(client, self.prefixes)

    async def sync(self) -> None:
        await self._shared.exchange()

    def claim(
        self, *names: str, worker: tuple[str, str] = STUDIO, rules: PrefixPolicy = RULES
    ) -> None:
        """Send requests with these system prompts to a worker."""
        for name in names:
            self.prefixes.record_dispatch(system_prompt(name), worker, rules)

    def workers(self, name: str = "p") -> set[tuple[str, str]]:
        return prefix_holders(self.prefixes, name)


async def sync(*gateways: PeerGateway) -> None:
    for gateway in gateways:
        await gateway.sync()


Pair = tuple[PeerGateway, PeerGateway]


@pytest.fixture
def two_indexes(redis: RedisServer, open_redis: OpenRedis) -> Pair:
    return PeerGateway(open_redis(redis)), PeerGateway(open_redis(redis))


async def test_gateways_exchange_claims_and_their_removal(two_indexes: Pair) -> None:
    first, second = two_indexes
    first.claim("p")
    await sync(first, second)
    assert second.workers() == {STUDIO}
    expected = second.prefixes.record_dispatch(system_prompt(), STUDIO, RULES)
    second.prefixes.record_usage(system_prompt(), STUDIO, Usage(100, 5, 0), expected)
    await sync(second, first)
    assert first.workers() == set()


@pytest.mark.parametrize("together", [False, True])
async def test_a_started_gateway_loads_earlier_claims_page_by_page(
    two_indexes: Pair, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.setattr(shared_stream, "PAGE_ENTRIES", 8)
    early, late = two_indexes
    for number in range(50):
        early.claim(str(number))
        if not together:
            await early.sync()
    await sync(early, late)
    assert len(late.prefixes) == 5 * 8
    await late.sync()
    assert len(late.prefixes) == 50
    early.claim("0", worker=LAPTOP)
    await sync(early, late)
    assert (late.workers("0"), late.workers("49")) == ({STUDIO, LAPTOP}, {STUDIO})


async def test_a_gateway_ignores_its_own_claims_from_redis(two_indexes: Pair) -> None:
    first, _ = two_indexes
    first.claim("p")
    await first.sync()
    first.prefixes.record_usage(system_prompt(), STUDIO, None, NOTHING_EXPECTED)
    syncing = asyncio.create_task(first.sync())
    await asyncio.sleep(0)  # the exchange is running
    first.claim("p")
    await syncing
    assert first.workers() == {STUDIO}, "a returning claim is older than the gateway's own"


async def test_a_gateway_reads_all_claims_after_a_reconnect(two_indexes, redis) -> None:
    first, second = two_indexes
    first.claim("p")
    await sync(first, second, second)
    # Another Redis behind the connection has an entry that is older than the last one read.
    claim = json.dumps([[[key_of("q").hex(), 300]], *LAPTOP, 900])
    redis.client.delete(STREAM)
    entry_id = f"{int(time.time() * 1000) - 5000}-0"
    redis.client.xadd(STREAM, {"gateway": "other", "claim": claim}, id=entry_id)
    await second.sync()
    assert second.workers("q") == set()
    redis.client.client_kill_filter(_type="normal", skipme=True)
    for _ in range(3):
        with contextlib.suppress(RecordsUnwritable):
            await second.sync()
    assert second.workers("q") == {LAPTOP}


async def test_a_claim_ages_while_it_is_stored_in_redis(two_indexes, redis) -> None:
    first, late = two_indexes
    first.claim("p", rules=PrefixPolicy(ttl_s=4))
    first.claim("q")
    await first.sync()
    entries: Any = redis.client.xrange(STREAM)
    redis.client.delete(STREAM)
    stored_ms = int(time.time() * 1000) - 5000
    for number, (_, fields) in enumerate(entries):
        redis.client.xadd(STREAM, fields, id=f"{stored_ms}-{number}")
    await late.sync()
    assert (late.workers("p"), late.workers("q")) == (set(), {STUDIO})


async def test_an_invalid_entry_is_skipped(redis: RedisServer, two_indexes: Pair) -> None:
    first, second = two_indexes
    redis.client.xadd(STREAM, {"gateway": "x", "claim": "[1]"})
    redis.client.xadd(STREAM, {"words": "none"})
    first.claim("p")
    await sync(first, second)
    assert second.workers() == {STUDIO}


def test_pending_claims_are_bounded() -> None:
    prefixes = PrefixIndex(lambda: 1_000_000.0)
    for number in range(MAX_PENDING_CLAIMS + 10):
        prefixes.record_dispatch(system_prompt(str(number)), STUDIO, RULES)
    pending = prefixes.take_pending()
    assert len(pending) == MAX_PENDING_CLAIMS
    assert pending[-1].ends == ((key_of(str(MAX_PENDING_CLAIMS + 9)).hex(), 0),)
    assert not prefixes.take_pending()
