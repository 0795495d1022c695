"""Slots and waiting lines in one process: who gets a slot, when, and that none is ever lost.

Pools with slots of their own, beside those of their workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from gateway.errors import NoWorker, QueueFull, QueueTimeout, WorkerBusy
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.routing.select import RoutingRequest
from gateway.types import Caller
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument, Priority, read_policy
from tests.support.fake_clock import START_S
from tests.support.request_profiles import GREEDY, SAMPLED
from tests.support.scheduler_harness import (
    SchedulerHarness,
    cancel_all,
    run_ready_tasks,
    worker_report,
)
from tests.support.scripted_worker import lane_report


def policy_of(*, spill_ms: int | None = None, **queue: Any) -> PolicyDocument:
    spill = {} if spill_ms is None else {"spill": {"after_wait_ms": spill_ms}}
    return read_policy(
        {
            "version": 1,
            "routes": [
                {"name": "fast", "when": {"greedy": True}, "to": ["text-mtp", "vlm"], **spill},
                {"name": "rest", "to": ["vlm"]},
            ],
            "pools": {
                "text-mtp": {"lanes": ["text-mtp"], "queue": queue},
                "vlm": {"lanes": ["vlm"], "queue": queue},
            },
        },
        "test",
    )


@pytest.fixture
def scheduler() -> SchedulerHarness:
    made = SchedulerHarness(policy_of(limit=3, timeout_s=30))
    made.fleet.heartbeat(worker_report())
    return made


async def test_a_free_slot_is_had_at_once_and_then_one_waits(scheduler: SchedulerHarness) -> None:
    first = await scheduler.acquire()
    second = scheduler.acquire()
    assert await scheduler.queue_length() == 1
    assert not second.done()
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    assert (await second).candidate.worker_id == "mac"
    assert await scheduler.queue_length() == 0


async def test_a_slot_that_is_given_back_goes_to_the_line_and_not_to_who_just_came(
    scheduler: SchedulerHarness,
) -> None:
    first = await scheduler.acquire()
    waiting = scheduler.acquire()
    await run_ready_tasks()
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    newcomer = scheduler.acquire()
    await run_ready_tasks()
    assert (waiting.done(), newcomer.done()) == (True, False)
    newcomer.cancel()


async def test_the_line_is_bounded_and_says_when_to_come_back(scheduler: SchedulerHarness) -> None:
    first = await scheduler.acquire()
    waiting = [scheduler.acquire() for _ in range(3)]
    await run_ready_tasks()
    with pytest.raises(QueueFull) as full:
        await scheduler.acquire()
    assert full.value.retry_after_s == 1.0
    scheduler.clock.now_s = START_S + 5.0
    scheduler.fleet.heartbeat(worker_report())
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    lease = await waiting[0]
    assert lease.waited_s == 5.0
    assert scheduler.dispatch.retry_after_s("vlm") == 5.0
    await cancel_all(waiting[1:])


async def test_who_waits_too_long_is_told_so_and_leaves_no_trace() -> None:
    door = SchedulerHarness(policy_of(timeout_s=0.02))
    door.fleet.heartbeat(worker_report())
    lease = await door.acquire()
    with pytest.raises(QueueTimeout):
        await door.acquire()
    assert await door.queue_length() == 0
    door.dispatch.release(lease, AttemptResult.SUCCEEDED)
    assert door.slots_in_use() == 0


async def test_who_leaves_the_line_frees_the_place_at_once(scheduler: SchedulerHarness) -> None:
    first = await scheduler.acquire()
    waiting = [scheduler.acquire() for _ in range(3)]
    await run_ready_tasks()
    await cancel_all(waiting[:2])
    assert await scheduler.queue_length() == 1
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    scheduler.dispatch.release(await waiting[2], AttemptResult.SUCCEEDED)
    assert scheduler.slots_in_use() == 0


async def test_who_leaves_in_the_moment_of_getting_a_slot_passes_it_on(
    scheduler: SchedulerHarness,
) -> None:
    first = await scheduler.acquire()
    leaving, next_one = scheduler.acquire(), scheduler.acquire()
    await run_ready_tasks()
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    leaving.cancel()  # its slot is already its own, and it has not run since
    lease = await next_one
    assert leaving.cancelled()
    scheduler.dispatch.release(lease, AttemptResult.SUCCEEDED)
    assert scheduler.slots_in_use() == 0


async def test_clients_take_turns_and_interactive_requests_come_first() -> None:
    door = SchedulerHarness(policy_of(limit=100))
    door.fleet.heartbeat(worker_report())
    lease = await door.acquire()
    order: list[str] = []

    async def one(name: str, client: str, priority: Priority) -> None:
        own = await door.acquire(client=client, priority=priority)
        order.append(name)
        door.dispatch.release(own, AttemptResult.SUCCEEDED)

    tasks: list[Awaitable[None]] = []
    for name, client, priority in (
        *(("greedy", "a", Priority.DEFAULT),) * 3,
        ("modest", "b", Priority.DEFAULT),
        ("bulk", "c", Priority.BULK),
        ("urgent", "d", Priority.INTERACTIVE),
    ):
        tasks.append(asyncio.create_task(one(name, client, priority)))
        await run_ready_tasks()
    door.dispatch.release(lease, AttemptResult.SUCCEEDED)
    await asyncio.gather(*tasks)
    assert order == ["urgent", "greedy", "modest", "greedy", "greedy", "bulk"]


async def test_a_full_pool_spills_after_its_wait_and_the_reason_says_so() -> None:
    door = SchedulerHarness(policy_of(spill_ms=20))
    door.fleet.heartbeat(worker_report())
    assert (await door.acquire(GREEDY)).candidate.reason == "eligible"
    spilled = door.acquire(GREEDY)
    assert await door.queue_length("text-mtp") == 1
    lease = await spilled
    assert (lease.candidate.pool, lease.candidate.reason) == ("vlm", "spilled")
    assert await door.queue_length("text-mtp") == 0


async def test_without_spill_a_full_pool_is_waited_for() -> None:
    door = SchedulerHarness(policy_of(timeout_s=0.05))
    door.fleet.heartbeat(worker_report())
    await door.acquire(GREEDY)
    with pytest.raises(QueueTimeout):
        await door.acquire(GREEDY)


async def test_a_spill_after_no_wait_is_at_once() -> None:
    door = SchedulerHarness(policy_of(spill_ms=0))
    door.fleet.heartbeat(worker_report())
    reasons = [(await door.acquire(GREEDY)).candidate.reason for _ in range(2)]
    assert reasons == ["eligible", "spilled"]


async def test_who_has_spilled_still_takes_the_preferred_pool_when_that_is_free_first() -> None:
    door = SchedulerHarness(policy_of(spill_ms=1))
    door.fleet.heartbeat(worker_report())
    preferred = await door.acquire(GREEDY)
    await door.acquire(SAMPLED)
    waiting = door.acquire(GREEDY)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    door.dispatch.release(preferred, AttemptResult.SUCCEEDED)
    assert (await waiting).candidate.reason == "eligible"


async def test_a_worker_that_joins_serves_those_who_wait(scheduler: SchedulerHarness) -> None:
    await scheduler.acquire()
    waiting = scheduler.acquire()
    await run_ready_tasks()
    scheduler.fleet.heartbeat(worker_report("other"))
    scheduler.dispatch.wake()
    assert (await waiting).candidate.worker_id == "other"


async def test_when_the_preferred_pool_is_gone_who_waits_for_it_takes_the_next() -> None:
    door = SchedulerHarness(policy_of())
    door.fleet.heartbeat(worker_report())
    await door.acquire(GREEDY)
    waiting = [door.acquire(GREEDY) for _ in range(3)]
    await run_ready_tasks()
    vlm_alone = [lane_report("vlm", slots=3).model_dump()]
    door.fleet.heartbeat(worker_report(lanes=vlm_alone))
    door.dispatch.wake()
    for each in waiting:
        lease = await each
        assert (lease.candidate.pool, lease.candidate.reason) == ("vlm", "no_mtp_worker")


async def test_a_request_of_another_model_holds_nobody_up(scheduler: SchedulerHarness) -> None:
    scheduler.fleet.heartbeat(worker_report("second", model="other"))
    demo = await scheduler.acquire()
    other = await scheduler.acquire(SAMPLED._replace(model="other"))
    blocked, waiting = scheduler.acquire(), scheduler.acquire(SAMPLED._replace(model="other"))
    await run_ready_tasks()
    scheduler.dispatch.release(other, AttemptResult.SUCCEEDED)
    assert (await waiting).candidate.worker_id == "second"
    assert not blocked.done()
    scheduler.dispatch.release(demo, AttemptResult.SUCCEEDED)
    await blocked


async def test_nobody_there_is_said_at_once_and_so_is_everybody_busy(
    scheduler: SchedulerHarness,
) -> None:
    with pytest.raises(NoWorker):
        await scheduler.acquire(SAMPLED._replace(model="unknown"))
    with pytest.raises(NoWorker):
        await scheduler.acquire(tried=frozenset({"mac"}))
    scheduler.dispatch.release(await scheduler.acquire(), AttemptResult.BUSY, 7.0)
    with pytest.raises(WorkerBusy) as busy:
        await scheduler.acquire()
    assert busy.value.retry_after_s == 7.0


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_every_slot_comes_back_and_none_is_given_twice(seed: int) -> None:
    rng = Random(seed)
    door = SchedulerHarness(policy_of(spill_ms=1, limit=8, timeout_s=0.05))
    for name in ("a", "b"):
        door.fleet.heartbeat(worker_report(name, slots=2))
    verdicts: list[AttemptResult] = list(AttemptResult)
    most = 0

    async def one() -> None:
        nonlocal most
        case = RoutingRequest(door.policy, rng.choice((SAMPLED, GREEDY)))
        caller = Caller(rng.choice("xyz"), rng.choice(list(Priority)))
        lease = await door.dispatch.acquire(case, caller)
        most = max(most, door.slots_in_use())
        try:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
        finally:
            door.dispatch.release(lease, rng.choice(verdicts), 0.001)

    tasks = [asyncio.create_task(one()) for _ in range(200)]
    moves: tuple[Callable[[], object], ...] = (
        lambda: rng.choice(tasks).cancel(),
        lambda: door.fleet.heartbeat(worker_report("a", slots=rng.choice((1, 2)))),
        door.dispatch.wake,
        lambda: setattr(door.clock, "now_s", door.clock.now_s + rng.random()),
        lambda: door.fleet.heartbeat(worker_report("b", slots=2)),
    )
    while not all(task.done() for task in tasks):
        rng.choice(moves)()
        await asyncio.sleep(0)
        most = max(most, door.slots_in_use())
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert most <= 8
    assert door.slots_in_use() == 0
    assert door.dispatch.waiting("vlm") == door.dispatch.waiting("text-mtp") == 0
    known = {type(None), QueueFull, QueueTimeout, WorkerBusy, NoWorker, asyncio.CancelledError}
    assert {type(end) for end in ends} <= known


def bounded_pools(slots: int) -> PolicyDocument:
    """Two pools over the same lane, of which one has few slots and spills to the other."""
    return read_policy(
        {
            "version": 1,
            "routes": [
                {
                    "name": "few",
                    "when": {"greedy": True},
                    "to": ["few", "many"],
                    "spill": {"after_wait_ms": 20},
                },
                {"name": "strict", "when": {"stream": True}, "to": "few"},
                {"name": "rest", "to": "many"},
            ],
            "pools": {
                "few": {"lanes": "vlm", "slots": slots, "queue": {"timeout_s": 5}},
                "many": {"lanes": "vlm"},
            },
        },
        "test",
    )


STRICT = SAMPLED._replace(stream=True)


async def test_a_pool_has_no_more_requests_than_its_own_slots_and_the_lane_serves_others() -> None:
    door = SchedulerHarness(bounded_pools(2))
    door.fleet.heartbeat(worker_report(slots=9))
    held = [await door.acquire(STRICT) for _ in range(2)]
    waiting = door.acquire(STRICT)
    assert await door.queue_length("few") == 1
    assert door.dispatch.running("few") == 2
    others = [await door.acquire(SAMPLED) for _ in range(3)]
    assert {lease.candidate.pool for lease in others} == {"many"}
    door.dispatch.release(others[0], AttemptResult.SUCCEEDED)
    await run_ready_tasks()
    assert not waiting.done(), "a slot of another pool is none of this one"
    door.dispatch.release(held[0], AttemptResult.SUCCEEDED)
    assert (await waiting).candidate.pool == "few"
    assert (door.dispatch.running("few"), door.dispatch.running("many")) == (2, 2)


async def test_a_pool_that_is_full_by_its_own_slots_spills_like_any_other() -> None:
    door = SchedulerHarness(bounded_pools(1))
    door.fleet.heartbeat(worker_report(slots=9))
    assert (await door.acquire(GREEDY)).candidate.pool == "few"
    spilled = await door.acquire(GREEDY)
    assert (spilled.candidate.pool, spilled.candidate.reason) == ("many", "spilled")
    assert (door.dispatch.running("few"), door.dispatch.running("many")) == (1, 1)


async def test_who_waits_keeps_the_route_that_they_were_given() -> None:
    """Of their own team and minute, however long they wait."""
    policy = read_policy(
        {
            "version": 1,
            "routes": [
                {"name": "night", "when": {"hours": "00:00-06:00", "team": "a"}, "to": "few"},
                {"name": "rest", "to": "many"},
            ],
            "pools": {"few": {"lanes": "vlm", "slots": 1}, "many": {"lanes": "vlm"}},
        },
        "test",
    )
    door = SchedulerHarness(policy)
    door.fleet.heartbeat(worker_report(slots=9))
    first = await door.acquire(attributes=CallerAttributes(team="a"))
    second = door.acquire(attributes=CallerAttributes(team="a"))
    assert await door.queue_length("few") == 1
    door.dispatch.release(first, AttemptResult.SUCCEEDED)
    assert (await second).candidate.pool == "few"
    assert (await door.acquire(attributes=CallerAttributes(team="b"))).candidate.pool == "many"
