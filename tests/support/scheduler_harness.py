"""A dispatch over one fleet in this process, the worker behind it, and those who wait."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.scheduler import Scheduler
from gateway.fleet.worker import Lease
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.select import RoutingRequest
from gateway.types import Caller
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument, Priority
from policies.request.profile import RequestProfile
from tests.support.fake_clock import FakeClock
from tests.support.request_profiles import SAMPLED
from tests.support.scripted_worker import lane_report
from workers.protocol import WorkerReport


class SchedulerHarness:
    """A dispatch over one fleet, and a short way to ask it."""

    def __init__(self, policy: PolicyDocument) -> None:
        self.policy = policy
        """Of those who ask from now on."""
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
        """Ask for a slot, and for what the policy decides of it."""
        case = RoutingRequest(self.policy, profile, attributes)
        caller = self.caller(client, priority)
        return asyncio.create_task(self.dispatch.acquire(case, caller, tried))

    @staticmethod
    def caller(client: str, priority: Priority = Priority.DEFAULT) -> Caller:
        """Name who asks."""
        return Caller(client, priority)

    async def queue_length(self, pool: str = "vlm") -> int:
        """Count who waits for a pool, once everybody who can has moved on."""
        await run_ready_tasks()
        return self.dispatch.waiting(pool)

    def slots_in_use(self) -> int:
        """Count the slots that are taken."""
        return sum(sum(member.in_flight.values()) for member in self.fleet.workers())


def worker_report(worker_id: str = "mac", *, slots: int = 1, **changes: Any) -> WorkerReport:
    """Tell of a worker with both lanes and so many slots in each."""
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
    """Let every task that can run come to its next wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cancel_all(tasks: list[asyncio.Task[Lease]]) -> None:
    """Let all who wait leave the line, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
