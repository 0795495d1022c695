"""A drain asks the worker which requests it runs, whoever sent them."""

from typing import cast

from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.cordons import Cordons
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.routing.select import Candidate
from paceline.protocol import WorkerReport
from tests.support.fake_clock import FakeClock
from tests.support.memory_records import MemoryRecords
from tests.support.scheduler_harness import worker_report
from tests.support.scripted_worker import lane_report


def report(running: int) -> WorkerReport:
    return worker_report(lanes=[lane_report("vlm", running=running)])


async def test_a_worker_that_runs_a_request_of_another_gateway_is_not_drained() -> None:
    """Nor does a request of this gateway that ended since the last report hide that one."""
    clock = FakeClock()
    fleet = WorkerRegistry(clock, jitter=lambda: 0.0)
    fleet.heartbeat(report(0))
    running = 1

    class AskedWorker:
        async def probe(self, _worker: WorkerReport) -> None:
            clock.advance(0.01)
            fleet.probe_succeeded(report(running))

    asked = cast("ReportClient", AskedWorker())
    cordons = Cordons(MemoryRecords(), fleet, asked, clock, propagation_s=0.0)
    lease = fleet.acquire(Candidate("vlm", "vlm", "mac", "policy", 0.0))
    assert lease is not None
    await cordons.add("mac", "tests")
    running = 0
    assert not await cordons.drained("mac", 0), "this gateway's request runs"
    fleet.release(lease, AttemptResult.SUCCEEDED)
    running = 1
    assert not await cordons.drained("mac", 0)
    running = 0
    assert await cordons.drained("mac", 0)
