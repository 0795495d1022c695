"""Stored reports in Redis: a damaged one counts as none."""

import json
from typing import Any

import pytest

from gateway.state import worker_reports
from gateway.state.counters import MAX_BOOTS
from gateway.state.worker_reports import SharedWorkerReports
from paceline.protocol import WorkerReport
from tests.support.boot_reports import boot_report
from tests.support.gateway_fixtures import MakeClusterGateway, OpenRedis
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import wait_until

BOOTS = "paceline:{workers}:boots"
DAMAGED: tuple[dict[str, Any], ...] = (
    {"first_seen_ms": 10**400},
    {"first_seen_ms": "soon"},
    {"heartbeat_ms": 10**400},
    {"left": None},
    {"report": None},
    {"report": "{}"},
)


def stored_boot(boot_id: str, **changes: Any) -> tuple[str, str]:
    """Return the name and the text of a boot in Redis."""
    report = boot_report(boot_id, 3)
    boot = {"report": report.model_dump_json(), "progress": 1, "first_seen_ms": 5, "left": False}
    return f"{report.worker_id}/{boot_id}", json.dumps({**boot, **changes})


def huge_report() -> str:
    report = boot_report("huge", 3).model_dump(mode="json")
    report["lanes"][0]["time_saved"]["decode_ms"] = 10**400
    return json.dumps(report)


@pytest.fixture
def reports(redis: RedisServer, open_redis: OpenRedis) -> SharedWorkerReports:
    return SharedWorkerReports(open_redis(redis))


async def test_c5_a_damaged_report_in_redis_counts_as_none(
    redis: RedisServer, open_redis: OpenRedis, make_cluster_gateway: MakeClusterGateway
) -> None:
    damaged = [
        stored_boot(f"damaged-{number}", **changes)
        for number, changes in enumerate((*DAMAGED, {"report": huge_report()}))
    ]
    for name, text in damaged:
        redis.client.delete(BOOTS)
        for one in (stored_boot("sound"), (name, text)):
            redis.client.hset(BOOTS, *one)
        reports = SharedWorkerReports(open_redis(redis))
        await reports.exchange([], [])
        assert [report.boot_id for report in reports.reports()] == ["sound"], text
    redis.client.hset(BOOTS, mapping=dict(damaged))
    gateway = make_cluster_gateway()
    wait_until(lambda: "fake-a" in gateway.status()["workers"])
    for path in ("/v1/status", "/metrics"):
        assert gateway.client.get(path).status_code == 200
    status = gateway.status()
    assert status["mtp"]["drafts"] == 3
    assert status["workers"]["fake-a"]["boots"] == 1


async def test_a_heartbeat_that_is_written_late_replaces_no_report_of_after_it(reports) -> None:
    idle = boot_report("1", 3)
    busy = idle.model_copy(update={"draining": True})
    await reports.exchange([(busy, 1.0)], [])
    for age_s, shared in ((2.0, busy), (0.5, idle)):
        await reports.exchange([(idle, age_s)], [])
        assert reports.reports() == (shared,)


async def test_a_report_with_equal_counts_replaces_the_one_before(reports) -> None:
    ready = boot_report("1", 3)
    draining = ready.model_copy(update={"draining": True})
    reports.store(ready)
    reports.store(draining)
    assert reports.reports() == (draining,)


async def test_a_late_report_of_a_boot_that_this_gateway_folded_does_not_count(reports) -> None:
    boots = [boot_report(str(number), 3) for number in range(MAX_BOOTS + 1)]
    for boot in boots:
        reports.store(boot)
        assert await reports.exchange([], []) == []
    assert await reports.exchange([], []) == [], "no worker left"
    for boot in boots:
        reports.store(boot)
    assert sum(report.lanes[0].requests for report in reports.reports()) == 3 * len(boots)


async def test_the_running_boot_of_a_worker_with_many_boots_at_once_is_not_folded(
    reports: SharedWorkerReports, redis: RedisServer, open_redis: OpenRedis
) -> None:
    """All boots arrive in one exchange, so Redis has seen none before another."""
    other = SharedWorkerReports(open_redis(redis))
    # Of an empty hash, all fields are read, in any order.
    reports.store(boot_report("other", 3).model_copy(update={"worker_id": "other"}))
    await reports.exchange([], [])
    await reports.exchange([], [])
    running, *earlier = [boot_report(f"{number:02}", 3) for number in range(MAX_BOOTS + 3)]
    for boot in earlier:
        reports.store(boot)
    await reports.exchange([(running, 0.4)], [])
    for _ in range(4):
        await reports.exchange([], [])
    assert running in [report for report, _ in await other.exchange([(running, 0.0)], [])]


async def test_c5_redis_and_the_queue_for_it_hold_a_bounded_number_of_workers(
    reports: SharedWorkerReports, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_reports, "_MAX_STORED_WORKERS", 2)
    monkeypatch.setattr(worker_reports, "_MAX_PENDING", 2)

    def report_of(worker_id: str, requests: int = 1) -> WorkerReport:
        return boot_report("boot", requests).model_copy(update={"worker_id": worker_id})

    for worker_id in ("a", "b", "c"):
        reports.store(report_of(worker_id))
    await reports.exchange((), ())
    reports.store(report_of("c"))
    reports.store(report_of("a", requests=5))
    await reports.exchange([(report_of("c"), 0.0)], ())
    counts = {report.worker_id: report.lanes[0].requests for report in reports.reports()}
    assert counts == {"a": 5, "b": 1}
    assert {name for name in redis.client.hkeys(BOOTS) if "/" in name} == {"a/boot", "b/boot"}
