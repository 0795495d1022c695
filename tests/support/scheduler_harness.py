"""A scheduler over a fleet in this process, and its waiting requests."""

import asyncio
from random import Random
from typing import Any

from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.scheduler import Scheduler
from gateway.fleet.worker import Lease
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.select import RoutingRequest
from gateway.types import Caller
from paceline.protocol import WorkerReport
from paceline.request.profile import Priority, RequestProfile
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument
from tests.support.fake_clock import FakeClock
from tests.support.request_profiles import SAMPLED
from tests.support.scripted_worker import lane_report


class SchedulerHarness:
    """A scheduler over one fleet, with shortcuts to acquire slots."""

    def __init__(self, policy: PolicyDocument) -> None:
        self.policy = policy
        """The policy of new requests."""
        self.clock = FakeClock()
        self.fleet = WorkerRegistry(self.clock, jitter=lambda: 0.0)
        self.dispatch = Scheduler(self.fleet, PrefixIndex(self.clock), self.clock, Random(0))

    def acquire(
        self,
        profile: RequestProfile = SAMPLED,
        client: str = "a",
        priority: Priority = Priority.DEFAULT,
        tried: frozenset[str] = frozenset(),
        attributes: CallerAttributes = ANONYMOUS,
    ) -> asyncio.Task[Lease]:
        request = RoutingRequest(self.policy, profile, attributes)
        caller = self.caller(client, priority)
        return asyncio.create_task(self.dispatch.acquire(request, caller, tried))

    @staticmethod
    def caller(client: str, priority: Priority = Priority.DEFAULT) -> Caller:
        return Caller(client, priority)

    async def queue_length(self, pool: str = "vlm") -> int:
        """Return the number of requests in the queue of a pool, after all ready tasks have run."""
        await run_ready_tasks()
        return self.dispatch.waiting(pool)

    def ejected(self) -> list[str]:
        workers = self.fleet.workers()
        return [one.report.worker_id for one in workers if one.ejected_for_s]

    def slots_in_use(self) -> int:
        return sum(sum(worker.in_flight.values()) for worker in self.fleet.workers())


def worker_report(worker_id: str = "mac", *, slots: int = 1, **changes: Any) -> WorkerReport:
    """Return the report of a worker with both lanes and this number of slots in each."""
    values = {
        "worker_id": worker_id,
        "boot_id": "1",
        "url": f"http://{worker_id}:9200",
        "model": "demo",
        "context_tokens": 100,
        "lanes": [lane_report(name, slots=slots).model_dump() for name in ("text-mtp", "vlm")],
    }
    return WorkerReport.model_validate({**values, **changes})


async def run_ready_tasks() -> None:
    """Run every ready task until its next wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cancel_all(tasks: list[asyncio.Task[Lease]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
