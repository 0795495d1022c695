"""Counter stores: the same behavior in memory and in Redis."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest

from gateway.state.counters import (
    GONE_WORKERS,
    MAX_BOOTS,
    MAX_MODELS,
    MAX_WORKERS,
    OTHER_MODELS,
    MemoryCounters,
)
from gateway.state.redis import RedisClient
from gateway.state.shared_counters import CounterStore, SharedCounters
from gateway.state.worker_reports import SharedWorkerReports
from paceline.protocol import LaneReport
from tests.support.boot_reports import boot_report
from tests.support.redis_server import TEST_DEADLINE_S


class StoreUnderTest(NamedTuple):
    store: CounterStore
    sync: Callable[[], Awaitable[None]]
    """The periodic exchange."""


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StoreUnderTest]:
    if request.param == "memory":

        async def no_sync() -> None:
            pass

        yield StoreUnderTest(MemoryCounters(), no_sync)
        return
    client = RedisClient(request.getfixturevalue("redis").url, TEST_DEADLINE_S)
    boots = SharedWorkerReports(client)
    store = SharedCounters(client, boots)

    async def sync() -> None:
        await store.exchange()
        await boots.exchange((), ())

    yield StoreUnderTest(store, sync)
    await client.close()


async def test_an_outdated_report_does_not_decrease_counts(store: StoreUnderTest) -> None:
    for requests in (5, 3):
        await store.store.store_report(boot_report("a", requests))
        await store.sync()
    assert [report.lanes[0].requests for report in await store.store.reports()] == [5]


async def test_c5_counts_of_endless_workers_and_models_are_exact_and_bounded(store) -> None:
    workers = MAX_WORKERS + MAX_MODELS + 5
    for number in range(workers):
        report = boot_report("boot", 2, f"model-{number}")
        await store.store.store_report(report.model_copy(update={"worker_id": f"mac-{number}"}))
    for _ in range(2 * MAX_MODELS):
        await store.sync()
    reports = await store.store.reports()
    assert sum(report.lanes[0].requests for report in reports) == 2 * workers
    assert len({report.worker_id for report in reports}) == MAX_WORKERS + 1
    sums = {report.model: report for report in reports if report.worker_id == GONE_WORKERS}
    assert len(sums) == MAX_MODELS + 1
    assert sums[OTHER_MODELS].lanes[0].requests == 2 * 5


async def test_c5_a_worker_that_invents_models_has_a_bounded_number_of_sums() -> None:
    store = MemoryCounters()
    boots = MAX_BOOTS + MAX_MODELS + 5
    for boot in range(boots):
        await store.store_report(boot_report(f"boot-{boot}", 1, f"model-{boot}"))
    reports = await store.reports()
    assert sum(report.lanes[0].requests for report in reports) == boots
    assert len(reports) == MAX_BOOTS + MAX_MODELS + 1
    assert reports[-1].boot_id == f"boot-{boots - 1}"


def test_every_field_of_a_lane_is_either_summed_or_current() -> None:
    """A new field of the report must be in one of the two lists, so that no count is lost."""
    current = {
        *("name", "running", "waiting", "slots", "pending_prefill_tokens", "mtp_enabled"),
        *("prefill_tokens_per_s", "decode_tokens_per_s", "requested_draft_tokens"),
        *("effective_draft_tokens", "draft_tokens_by_rows", "draft_speedup_by_rows"),
        "head_healthy",
    }
    summed = {
        *("speculation", "bypass_counts", "spec_prefill", "prefix", "time_saved", "requests"),
        *("prompt_tokens", "completion_tokens", "steps", "steps_ahead"),
    }
    assert set(LaneReport.model_fields) == current | summed
