"""The scheduler of one process: queues, slots, spilling and timeouts; no slot is ever lost.

A pool may have slots, which bound it in addition to the slots of its workers.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from gateway.engines.base import EngineModel, EngineState
from gateway.engines.openai import OpenAIEngine
from gateway.errors import FeatureUntaken, NoWorker, QueueFull, QueueTimeout, WorkerBusy
from gateway.fleet.circuit_breaker import BASE_EJECTION_S, MAX_FAILURES, AttemptResult
from gateway.routing.features import Feature
from gateway.routing.select import RoutingRequest
from gateway.types import Caller
from paceline.request.profile import Priority
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument
from tests.support.fake_clock import START_S
from tests.support.policies import make_policy
from tests.support.request_profiles import GREEDY, SAMPLED
from tests.support.scheduler_harness import SchedulerHarness as Harness
from tests.support.scheduler_harness import cancel_all, run_ready_tasks, worker_report
from tests.support.scripted_worker import lane_report


def policy_of(*, spill_ms: int | None = None, **queue: Any) -> PolicyDocument:
    spill = {} if spill_ms is None else {"spill": {"after_wait_ms": spill_ms}}
    return make_policy(
        [
            {"name": "fast", "when": {"greedy": True}, "to": ["text-mtp", "vlm"], **spill},
            {"name": "rest", "to": "vlm"},
        ],
        {name: {"lanes": name, "queue": queue} for name in ("text-mtp", "vlm")},
    )


def scheduler_of(policy: PolicyDocument | None = None, slots: int = 1, **queue: Any) -> Harness:
    """Return a scheduler with one worker, by a policy or by one with these queues."""
    harness = Harness(policy or policy_of(**queue))
    harness.fleet.heartbeat(worker_report(slots=slots))
    return harness


@pytest.fixture
def scheduler() -> Harness:
    return scheduler_of(limit=3, timeout_s=30)


async def test_a_request_gets_a_free_slot_at_once_or_waits_and_goes_before_a_newer_one(
    scheduler: Harness,
) -> None:
    first = await scheduler.acquire()
    waiting = scheduler.acquire()
    assert await scheduler.queue_length() == 1
    assert not waiting.done()
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    newcomer = scheduler.acquire()
    assert (await waiting).candidate.worker_id == "mac"
    assert await scheduler.queue_length() == 1
    assert not newcomer.done()
    await cancel_all([newcomer])


async def test_a_full_queue_rejects_a_request_with_a_retry_after(scheduler: Harness) -> None:
    first = await scheduler.acquire()
    requests = [RoutingRequest(scheduler.policy, SAMPLED) for _ in range(3)]
    caller = scheduler.caller("a")
    waiting = [asyncio.create_task(scheduler.dispatch.acquire(one, caller)) for one in requests]
    await run_ready_tasks()
    with pytest.raises(QueueFull) as full:
        await scheduler.acquire()
    assert full.value.retry_after_s == 1.0
    scheduler.clock.now_s = START_S + 5.0
    places = [scheduler.dispatch.queue_place(one) for one in requests]
    assert places == [(1, 5.0), (2, 10.0), (3, 15.0)]
    scheduler.fleet.heartbeat(worker_report())
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    assert (await waiting[0]).waited_s == 5.0
    assert scheduler.dispatch.retry_after_s("vlm") == 10.0, "two wait, and one leaves each 5 s"
    assert scheduler.dispatch.queue_place(requests[0]) is None
    scheduler.clock.now_s = START_S + 7.0
    assert scheduler.dispatch.queue_place(requests[2]) == (2, 10.0)
    await cancel_all(waiting[1:])
    assert scheduler.dispatch.queue_place(requests[2]) is None


async def test_c7_a_full_queue_makes_room_for_the_least_busy_client(scheduler: Harness) -> None:
    first = await scheduler.acquire()
    flood = [scheduler.acquire(client="a") for _ in range(3)]
    await run_ready_tasks()
    modest = [scheduler.acquire(client=client) for client in ("b", "c")]
    await run_ready_tasks()
    assert [task.done() for task in flood] == [False, True, True], "the last ones had to leave"
    for task in flood[1:]:
        with pytest.raises(QueueFull):
            await task
    assert await scheduler.queue_length() == 3
    for client in ("a", "b", "d"):  # each has as many as any other
        with pytest.raises(QueueFull):
            await scheduler.acquire(client=client)
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    await flood[0]
    await cancel_all(modest)
    assert await scheduler.queue_length() == 0


async def test_the_log_names_a_client_that_floods_a_queue_once_a_minute(caplog) -> None:
    scheduler = scheduler_of(limit=100)
    await scheduler.acquire()
    tasks = [scheduler.acquire(client=client) for client in ("b", *["a"] * 15, *["b"] * 10)]
    await run_ready_tasks()
    assert caplog.messages == []
    for _ in range(2):
        tasks += [scheduler.acquire(client="a") for _ in range(3)]
        await run_ready_tasks()
        assert caplog.messages == ["queue.flooded pool=vlm client='a' waiting=16"]
    scheduler.clock.now_s += 60
    scheduler.fleet.heartbeat(worker_report())
    tasks += [scheduler.acquire(client="a")]
    await run_ready_tasks()
    assert caplog.messages[-1:] == ["queue.flooded pool=vlm client='a' waiting=22"]
    await cancel_all(tasks)


async def test_c7_a_full_queue_rejects_no_request_that_prefers_another_pool() -> None:
    scheduler = scheduler_of(spill_ms=1, limit=2)
    await scheduler.acquire(GREEDY)
    await scheduler.acquire(SAMPLED)
    spilled = [scheduler.acquire(GREEDY, client="a") for _ in range(2)]
    await asyncio.sleep(0.05)  # they wait for both pools
    waiting = [scheduler.acquire(SAMPLED, client=client) for client in ("b", "c")]
    with pytest.raises(QueueFull):
        await scheduler.acquire(SAMPLED, client="d")
    assert not any(task.done() for task in (*spilled, *waiting))
    await cancel_all([*spilled, *waiting])


async def test_a_request_that_waits_too_long_times_out_and_holds_no_slot() -> None:
    """Without a spill it waits for its first pool alone."""
    scheduler = scheduler_of(timeout_s=0.02)
    for profile in (GREEDY, SAMPLED):
        lease = await scheduler.acquire(profile)
        with pytest.raises(QueueTimeout):
            await scheduler.acquire(profile)
        assert await scheduler.queue_length(lease.candidate.pool) == 0
        scheduler.dispatch.release(lease, AttemptResult.SUCCEEDED)
    assert scheduler.slots_in_use() == 0


async def test_a_cancelled_request_leaves_at_once_and_passes_on_its_slot(scheduler) -> None:
    first = await scheduler.acquire()
    waiting = [scheduler.acquire() for _ in range(3)]
    await run_ready_tasks()
    await cancel_all(waiting[:1])
    assert await scheduler.queue_length() == 2
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    waiting[1].cancel()  # it has its slot, but has not run since
    scheduler.dispatch.release(await waiting[2], AttemptResult.SUCCEEDED)
    assert waiting[1].cancelled()
    assert scheduler.slots_in_use() == 0


async def test_clients_alternate_and_interactive_requests_are_served_first() -> None:
    scheduler = scheduler_of(limit=100)
    lease = await scheduler.acquire()
    order: list[str] = []

    async def run_request(name: str, priority: Priority) -> None:
        request_lease = await scheduler.acquire(client=name, priority=priority)
        order.append(name)
        scheduler.dispatch.release(request_lease, AttemptResult.SUCCEEDED)

    tasks: list[Awaitable[None]] = []
    arrivals = [*[("greedy", Priority.DEFAULT)] * 3, ("modest", Priority.DEFAULT)]
    for name, priority in (*arrivals, ("bulk", Priority.BULK), ("urgent", Priority.INTERACTIVE)):
        tasks.append(asyncio.create_task(run_request(name, priority)))
        await run_ready_tasks()
    scheduler.dispatch.release(lease, AttemptResult.SUCCEEDED)
    await asyncio.gather(*tasks)
    assert order == ["urgent", "greedy", "modest", "greedy", "greedy", "bulk"]


async def test_a_full_pool_spills_after_its_wait_unless_it_has_a_slot_first() -> None:
    scheduler = scheduler_of(spill_ms=20)
    preferred = await scheduler.acquire(GREEDY)
    assert preferred.candidate.reason == "eligible"
    spilling = scheduler.acquire(GREEDY)
    assert await scheduler.queue_length("text-mtp") == 1
    spilled = (await spilling).candidate
    assert (spilled.pool, spilled.reason) == ("vlm", "spilled")
    assert await scheduler.queue_length("text-mtp") == 0
    waiting = scheduler.acquire(GREEDY)
    await asyncio.sleep(0.05)  # it waits for both pools
    assert not waiting.done()
    scheduler.dispatch.release(preferred, AttemptResult.SUCCEEDED)
    assert (await waiting).candidate.reason == "eligible"


async def test_a_spill_after_0_ms_is_immediate() -> None:
    scheduler = scheduler_of(spill_ms=0)
    assert (await scheduler.acquire(GREEDY)).candidate.reason == "eligible"
    spilled = scheduler.acquire(GREEDY)
    await asyncio.sleep(0)  # one step of the task: it waits for nothing
    assert spilled.result().candidate.reason == "spilled"


async def test_queued_requests_use_the_next_pool_when_the_preferred_one_has_no_worker() -> None:
    scheduler = scheduler_of()
    await scheduler.acquire(GREEDY)
    waiting = [scheduler.acquire(GREEDY) for _ in range(3)]
    await run_ready_tasks()
    scheduler.fleet.heartbeat(worker_report(lanes=[lane_report("vlm", slots=3)]))
    scheduler.dispatch.wake()
    for request in waiting:
        lease = await request
        assert (lease.candidate.pool, lease.candidate.reason) == ("vlm", "no_mtp_worker")


async def test_a_new_worker_serves_queued_requests(scheduler: Harness) -> None:
    await scheduler.acquire()
    waiting = scheduler.acquire()
    await run_ready_tasks()
    scheduler.fleet.heartbeat(worker_report("other"))
    assert (await waiting).candidate.worker_id == "other"


async def test_a_request_for_another_model_delays_no_request(scheduler: Harness) -> None:
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


async def test_a_request_fails_at_once_if_no_worker_is_there_or_idle(scheduler: Harness) -> None:
    with pytest.raises(NoWorker):
        await scheduler.acquire(SAMPLED._replace(model="unknown"))
    with pytest.raises(NoWorker):
        await scheduler.acquire(tried=frozenset({"mac"}))
    scheduler.dispatch.release(await scheduler.acquire(), AttemptResult.BUSY, 7.0)
    with pytest.raises(WorkerBusy) as busy:
        await scheduler.acquire()
    assert busy.value.retry_after_s == 7.0


async def test_a_queued_request_gets_a_slot_after_the_retry_after(scheduler: Harness) -> None:
    running = await scheduler.acquire()
    queued = scheduler.acquire()
    assert await scheduler.queue_length() == 1
    scheduler.dispatch.release(running, AttemptResult.BUSY, 0.01)
    scheduler.clock.advance(0.01)
    async with asyncio.timeout(20):
        await queued


@pytest.mark.parametrize("seed", range(20))
async def test_under_random_events_each_slot_is_released_and_none_leased_twice(seed: int) -> None:
    rng = Random(seed)
    scheduler = Harness(policy_of(spill_ms=1, limit=8, timeout_s=0.05))
    for name in ("a", "b"):
        scheduler.fleet.heartbeat(worker_report(name, slots=2))
    results: list[AttemptResult] = list(AttemptResult)
    most = 0

    async def run_request() -> None:
        nonlocal most
        request = RoutingRequest(scheduler.policy, rng.choice((SAMPLED, GREEDY)))
        caller = Caller(rng.choice("xyz"), rng.choice(list(Priority)))
        lease = await scheduler.dispatch.acquire(request, caller)
        most = max(most, scheduler.slots_in_use())
        try:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
        finally:
            scheduler.dispatch.release(lease, rng.choice(results), 0.001)

    tasks = [asyncio.create_task(run_request()) for _ in range(200)]
    events: tuple[Callable[[], object], ...] = (
        lambda: rng.choice(tasks).cancel(),
        lambda: scheduler.fleet.heartbeat(worker_report("a", slots=rng.choice((1, 2)))),
        scheduler.dispatch.wake,
        lambda: scheduler.clock.advance(rng.random()),
        lambda: scheduler.fleet.heartbeat(worker_report("b", slots=2)),
    )
    while not all(task.done() for task in tasks):
        rng.choice(events)()
        await asyncio.sleep(0)
        most = max(most, scheduler.slots_in_use())
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert most <= 8
    assert scheduler.slots_in_use() == 0
    assert scheduler.dispatch.waiting("vlm") == scheduler.dispatch.waiting("text-mtp") == 0
    known = {type(None), QueueFull, QueueTimeout, WorkerBusy, NoWorker, asyncio.CancelledError}
    assert {type(end) for end in ends} <= known


def bounded_pools() -> Harness:
    """Return a scheduler with two pools over one lane; the first has two slots and spills."""
    spill = {"to": ["few", "many"], "spill": {"after_wait_ms": 20}}
    routes = [
        {"name": "few", "when": {"greedy": True}, **spill},
        {"name": "strict", "when": {"stream": True}, "to": "few"},
        {"name": "rest", "to": "many"},
    ]
    few = {"lanes": "vlm", "slots": 2, "queue": {"timeout_s": 5}}
    return scheduler_of(make_policy(routes, {"few": few, "many": {"lanes": "vlm"}}), slots=9)


STRICT = SAMPLED._replace(stream=True)


async def test_a_pool_runs_no_more_requests_than_its_slots_beside_other_pools_of_the_lane() -> None:
    scheduler = bounded_pools()
    leases = [await scheduler.acquire(STRICT) for _ in range(2)]
    waiting = scheduler.acquire(STRICT)
    assert await scheduler.queue_length("few") == 1
    assert scheduler.dispatch.running("few") == 2
    other_leases = [await scheduler.acquire(SAMPLED) for _ in range(3)]
    assert {lease.candidate.pool for lease in other_leases} == {"many"}
    scheduler.dispatch.release(other_leases[0], AttemptResult.SUCCEEDED)
    await run_ready_tasks()
    assert not waiting.done(), "a slot of another pool is no slot of this one"
    scheduler.dispatch.release(leases[0], AttemptResult.SUCCEEDED)
    assert (await waiting).candidate.pool == "few"
    spilled = await scheduler.acquire(GREEDY)
    assert (spilled.candidate.pool, spilled.candidate.reason) == ("many", "spilled")
    assert (scheduler.dispatch.running("few"), scheduler.dispatch.running("many")) == (2, 3)


async def test_a_queued_request_keeps_its_route() -> None:
    """The team and the minute of its arrival decide, however long a request waits."""
    routes = [
        {"name": "night", "when": {"hours": "00:00-06:00", "team": "a"}, "to": "few"},
        {"name": "rest", "to": "many"},
    ]
    pools = {"few": {"lanes": "vlm", "slots": 1}, "many": {"lanes": "vlm"}}
    scheduler = scheduler_of(make_policy(routes, pools), slots=9)
    first = await scheduler.acquire(attributes=CallerAttributes(team="a"))
    second = scheduler.acquire(attributes=CallerAttributes(team="a"))
    assert await scheduler.queue_length("few") == 1
    scheduler.dispatch.release(first, AttemptResult.SUCCEEDED)
    assert (await second).candidate.pool == "few"
    assert (await scheduler.acquire(attributes=CallerAttributes(team="b"))).candidate.pool == "many"


@pytest.fixture
async def one_ejected() -> Harness:
    """Return a fleet of two workers, of which `b` is ejected."""
    harness = Harness(policy_of(limit=3, timeout_s=30))
    for name in "ab":
        harness.fleet.heartbeat(worker_report(name))
    for _ in range(MAX_FAILURES):
        lease = await harness.acquire(tried=frozenset("a"))
        harness.dispatch.release(lease, AttemptResult.FAILED)
    assert harness.ejected() == ["b"]
    return harness


async def test_a_request_that_all_others_have_failed_gets_a_last_chance_at_an_ejected_worker(
    one_ejected: Harness,
) -> None:
    lease = await one_ejected.acquire(tried=frozenset("a"))
    assert lease.candidate.worker_id == "b"
    with pytest.raises(WorkerBusy):  # one at a time, and none waits for it
        await one_ejected.acquire(tried=frozenset("a"))
    one_ejected.dispatch.release(lease, AttemptResult.SUCCEEDED)
    assert one_ejected.ejected() == [], "it has shown that it works"
    with pytest.raises(NoWorker):
        await one_ejected.acquire(tried=frozenset("ab"))


async def test_a_last_chance_that_fails_does_not_lengthen_an_ejection(one_ejected: Harness) -> None:
    for result in (AttemptResult.FAILED, AttemptResult.UNREACHABLE) * 5:
        lease = await one_ejected.acquire(tried=frozenset("a"))
        one_ejected.dispatch.release(lease, result)
        assert one_ejected.ejected() == ["b"]
    one_ejected.clock.now_s += BASE_EJECTION_S
    for name in "ab":
        one_ejected.fleet.heartbeat(worker_report(name))
    assert one_ejected.ejected() == []
    lease = await one_ejected.acquire(tried=frozenset("a"))
    one_ejected.dispatch.release(lease, AttemptResult.FAILED)
    assert one_ejected.ejected() == ["b"], "it is on probation"


async def test_a_first_attempt_waits_for_a_worker_that_is_not_ejected(one_ejected: Harness) -> None:
    first = await one_ejected.acquire()
    second = one_ejected.acquire()
    assert await one_ejected.queue_length() == 1
    one_ejected.dispatch.release(first, AttemptResult.SUCCEEDED)
    assert (await second).candidate.worker_id == "a"


async def test_a_feature_is_refused_only_if_no_worker_of_the_model_takes_it() -> None:
    """A worker that takes it may be busy, ejected or tried: that is no mistake of the client."""
    harness = Harness(policy_of(limit=3, timeout_s=30))
    picture = SAMPLED._replace(media=(("image", 1),))
    blind = OpenAIEngine()
    blind.update(EngineState((EngineModel("demo", lacks=frozenset({Feature.IMAGE})),)))
    harness.fleet.heartbeat(worker_report("blind"), blind)
    with pytest.raises(FeatureUntaken):
        await harness.acquire(picture)
    harness.fleet.heartbeat(worker_report("seeing"))
    lease = await harness.acquire(picture)
    assert lease.candidate.worker_id == "seeing"
    with pytest.raises(NoWorker):
        await harness.acquire(picture, tried=frozenset({"seeing"}))
    harness.dispatch.release(lease, AttemptResult.BUSY, 9.0)
    with pytest.raises(WorkerBusy):
        await harness.acquire(picture)
