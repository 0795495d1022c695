"""What a store keeps of boots and counts: the same in memory and in Redis.

What more there is to several gateways over one Redis is in test_redis_store.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.counters import SharedCounters
from gateway.cluster.redis import RedisClient
from gateway.cluster.worker_reports import SharedWorkerReports
from gateway.storage.counters import CounterKey, CounterStore, MemoryCounters
from tests.support.boot_reports import boot_report
from workers.protocol import LaneReport


class Kept(NamedTuple):
    store: CounterStore
    turn: Callable[[], Awaitable[None]]
    """What is done beside requests, twice a second."""
    pending: Counter[CounterKey]
    """Counts that the store has not taken yet."""


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Kept]:
    pending: Counter[CounterKey] = Counter()

    def take_pending() -> dict[CounterKey, int]:
        taken = dict(pending)
        pending.clear()
        return taken

    if request.param == "memory":

        async def nothing() -> None:
            pass

        yield Kept(MemoryCounters(take_pending), nothing, pending)
        return
    link = RedisClient(request.getfixturevalue("redis").url)
    boots = SharedWorkerReports(link)
    store = SharedCounters(link, boots, take_pending)

    async def turn() -> None:
        await store.exchange()
        await boots.exchange((), ())

    yield Kept(store, turn, pending)
    await link.close()


async def test_an_overtaken_report_does_not_turn_counts_back(store: Kept) -> None:
    for requests in (5, 3):
        await store.store.store_report(boot_report("a", requests))
        await store.turn()
    assert [one.lanes[0].requests for one in await store.store.reports()] == [5]


async def test_a_crash_loop_costs_no_count_and_fills_no_memory(store: Kept) -> None:
    for boot in range(40):
        await store.store.store_report(boot_report(f"boot-{boot}", boot))
        await store.turn()
    for _ in range(30):
        await store.turn()
    reports = await store.store.reports()
    assert sum(one.lanes[0].requests for one in reports) == sum(range(40))
    assert len(reports) <= 17


async def test_pending_counts_are_added_once(store: Kept) -> None:
    store.pending.update({("outcomes", "completed"): 1, ("retries",): 2})
    await store.turn()
    store.pending.update({("outcomes", "completed"): 1})
    assert await store.store.counts() == {("outcomes", "completed"): 2, ("retries",): 2}
    await store.turn()
    assert await store.store.counts() == {("outcomes", "completed"): 2, ("retries",): 2}


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["demo", "other"])), max_size=60))
async def test_sums_over_any_number_of_boots_are_exact_and_memory_is_bounded(
    lives: list[tuple[int, str]],
) -> None:
    store = MemoryCounters()
    for boot, (requests, model) in enumerate(lives):
        await store.store_report(boot_report(f"boot-{boot}", requests, model))
    kept = await store.reports()
    for model in ("demo", "other"):
        lanes = [one.lanes[0] for one in kept if one.model == model]
        expected = sum(requests for requests, named in lives if named == model)
        assert sum(lane.requests for lane in lanes) == expected
        assert sum(lane.speculation.accepted for lane in lanes) == 2 * expected
        assert sum(lane.bypass_counts.get("media", 0) for lane in lanes) == expected
    assert len(kept) <= 18


def test_every_field_of_a_lane_either_adds_up_or_is_of_the_moment() -> None:
    """A count that somebody adds to the report must not get lost between two boots."""
    of_the_moment = {
        "name",
        "running",
        "waiting",
        "slots",
        "pending_prefill_tokens",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "mtp_enabled",
        "requested_draft_tokens",
        "effective_draft_tokens",
        "draft_tokens_by_rows",
        "head_healthy",
    }
    added = {
        "speculation",
        "bypass_counts",
        "spec_prefill",
        "prefix",
        "time_saved",
        "requests",
        "prompt_tokens",
        "completion_tokens",
    }
    assert set(LaneReport.model_fields) == of_the_moment | added
