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
from gateway.fleet.circuit_breaker import Verdict
from gateway.routing.select import RoutingRequest
from gateway.types import Caller
from policies.compiler import Asker
from policies.document import PolicyDocument, Priority, read_policy
from tests.support.request_profiles import GREEDY, SAMPLED
from tests.support.scheduler_harness import Door, cancelled, report, settled
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
def door() -> Door:
    made = Door(policy_of(limit=3, timeout_s=30))
    made.fleet.beat(report())
    return made


async def test_a_free_slot_is_had_at_once_and_then_one_waits(door: Door) -> None:
    first = await door.ask()
    second = door.ask()
    assert await door.waiting() == 1
    assert not second.done()
    door.dispatch.give_back(first, Verdict.ANSWERED)
    assert (await second).candidate.worker_id == "mac"
    assert await door.waiting() == 0


async def test_a_slot_that_is_given_back_goes_to_the_line_and_not_to_who_just_came(
    door: Door,
) -> None:
    first = await door.ask()
    waiting = door.ask()
    await settled()
    door.dispatch.give_back(first, Verdict.ANSWERED)
    newcomer = door.ask()
    await settled()
    assert (waiting.done(), newcomer.done()) == (True, False)
    newcomer.cancel()


async def test_the_line_is_bounded_and_says_when_to_come_back(door: Door) -> None:
    first = await door.ask()
    waiting = [door.ask() for _ in range(3)]
    await settled()
    with pytest.raises(QueueFull) as full:
        await door.ask()
    assert full.value.retry_after_s == 1.0
    door.clock.now_s = 5.0
    door.fleet.beat(report())
    door.dispatch.give_back(first, Verdict.ANSWERED)
    lease = await waiting[0]
    assert lease.waited_s == 5.0
    assert door.dispatch.retry_after_s("vlm") == 5.0
    await cancelled(waiting[1:])


async def test_who_waits_too_long_is_told_so_and_leaves_no_trace() -> None:
    door = Door(policy_of(timeout_s=0.02))
    door.fleet.beat(report())
    lease = await door.ask()
    with pytest.raises(QueueTimeout):
        await door.ask()
    assert await door.waiting() == 0
    door.dispatch.give_back(lease, Verdict.ANSWERED)
    assert door.busy() == 0


async def test_who_leaves_the_line_frees_the_place_at_once(door: Door) -> None:
    first = await door.ask()
    waiting = [door.ask() for _ in range(3)]
    await settled()
    await cancelled(waiting[:2])
    assert await door.waiting() == 1
    door.dispatch.give_back(first, Verdict.ANSWERED)
    door.dispatch.give_back(await waiting[2], Verdict.ANSWERED)
    assert door.busy() == 0


async def test_who_leaves_in_the_moment_of_getting_a_slot_passes_it_on(door: Door) -> None:
    first = await door.ask()
    leaving, next_one = door.ask(), door.ask()
    await settled()
    door.dispatch.give_back(first, Verdict.ANSWERED)
    leaving.cancel()  # its slot is already its own, and it has not run since
    lease = await next_one
    assert leaving.cancelled()
    door.dispatch.give_back(lease, Verdict.ANSWERED)
    assert door.busy() == 0


async def test_clients_take_turns_and_interactive_requests_come_first() -> None:
    door = Door(policy_of(limit=100))
    door.fleet.beat(report())
    lease = await door.ask()
    order: list[str] = []

    async def one(name: str, client: str, priority: Priority) -> None:
        own = await door.ask(client=client, priority=priority)
        order.append(name)
        door.dispatch.give_back(own, Verdict.ANSWERED)

    tasks: list[Awaitable[None]] = []
    for name, client, priority in (
        *(("greedy", "a", Priority.DEFAULT),) * 3,
        ("modest", "b", Priority.DEFAULT),
        ("bulk", "c", Priority.BULK),
        ("urgent", "d", Priority.INTERACTIVE),
    ):
        tasks.append(asyncio.create_task(one(name, client, priority)))
        await settled()
    door.dispatch.give_back(lease, Verdict.ANSWERED)
    await asyncio.gather(*tasks)
    assert order == ["urgent", "greedy", "modest", "greedy", "greedy", "bulk"]


async def test_a_full_pool_spills_after_its_wait_and_the_reason_says_so() -> None:
    door = Door(policy_of(spill_ms=20))
    door.fleet.beat(report())
    assert (await door.ask(GREEDY)).candidate.reason == "eligible"
    spilled = door.ask(GREEDY)
    assert await door.waiting("text-mtp") == 1
    lease = await spilled
    assert (lease.candidate.pool, lease.candidate.reason) == ("vlm", "spilled")
    assert await door.waiting("text-mtp") == 0


async def test_without_spill_a_full_pool_is_waited_for() -> None:
    door = Door(policy_of(timeout_s=0.05))
    door.fleet.beat(report())
    await door.ask(GREEDY)
    with pytest.raises(QueueTimeout):
        await door.ask(GREEDY)


async def test_a_spill_after_no_wait_is_at_once() -> None:
    door = Door(policy_of(spill_ms=0))
    door.fleet.beat(report())
    reasons = [(await door.ask(GREEDY)).candidate.reason for _ in range(2)]
    assert reasons == ["eligible", "spilled"]


async def test_who_has_spilled_still_takes_the_preferred_pool_when_that_is_free_first() -> None:
    door = Door(policy_of(spill_ms=1))
    door.fleet.beat(report())
    preferred = await door.ask(GREEDY)
    await door.ask(SAMPLED)
    waiting = door.ask(GREEDY)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    door.dispatch.give_back(preferred, Verdict.ANSWERED)
    assert (await waiting).candidate.reason == "eligible"


async def test_a_worker_that_joins_serves_those_who_wait(door: Door) -> None:
    await door.ask()
    waiting = door.ask()
    await settled()
    door.fleet.beat(report("other"))
    door.dispatch.serve_waiting()
    assert (await waiting).candidate.worker_id == "other"


async def test_when_the_preferred_pool_is_gone_who_waits_for_it_takes_the_next() -> None:
    door = Door(policy_of())
    door.fleet.beat(report())
    await door.ask(GREEDY)
    waiting = [door.ask(GREEDY) for _ in range(3)]
    await settled()
    vlm_alone = [lane_report("vlm", slots=3).model_dump()]
    door.fleet.beat(report(lanes=vlm_alone))
    door.dispatch.serve_waiting()
    for each in waiting:
        lease = await each
        assert (lease.candidate.pool, lease.candidate.reason) == ("vlm", "no_mtp_worker")


async def test_a_request_of_another_model_holds_nobody_up(door: Door) -> None:
    door.fleet.beat(report("second", model="other"))
    demo = await door.ask()
    other = await door.ask(SAMPLED._replace(model="other"))
    blocked, waiting = door.ask(), door.ask(SAMPLED._replace(model="other"))
    await settled()
    door.dispatch.give_back(other, Verdict.ANSWERED)
    assert (await waiting).candidate.worker_id == "second"
    assert not blocked.done()
    door.dispatch.give_back(demo, Verdict.ANSWERED)
    await blocked


async def test_nobody_there_is_said_at_once_and_so_is_everybody_busy(door: Door) -> None:
    with pytest.raises(NoWorker):
        await door.ask(SAMPLED._replace(model="unknown"))
    with pytest.raises(NoWorker):
        await door.ask(tried=frozenset({"mac"}))
    door.dispatch.give_back(await door.ask(), Verdict.BUSY, 7.0)
    with pytest.raises(WorkerBusy) as busy:
        await door.ask()
    assert busy.value.retry_after_s == 7.0


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_every_slot_comes_back_and_none_is_given_twice(seed: int) -> None:
    rng = Random(seed)
    door = Door(policy_of(spill_ms=1, limit=8, timeout_s=0.05))
    for name in ("a", "b"):
        door.fleet.beat(report(name, slots=2))
    verdicts: list[Verdict] = list(Verdict)
    most = 0

    async def one() -> None:
        nonlocal most
        case = RoutingRequest(door.policy, rng.choice((SAMPLED, GREEDY)))
        decision = door.dispatch.decide(case, frozenset())
        caller = Caller(rng.choice("xyz"), rng.choice(list(Priority)))
        lease = await door.dispatch.lease(case, decision, caller)
        most = max(most, door.busy())
        try:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
        finally:
            door.dispatch.give_back(lease, rng.choice(verdicts), 0.001)

    tasks = [asyncio.create_task(one()) for _ in range(200)]
    moves: tuple[Callable[[], object], ...] = (
        lambda: rng.choice(tasks).cancel(),
        lambda: door.fleet.beat(report("a", slots=rng.choice((1, 2)))),
        door.dispatch.serve_waiting,
        lambda: setattr(door.clock, "now_s", door.clock.now_s + rng.random()),
        lambda: door.fleet.beat(report("b", slots=2)),
    )
    while not all(task.done() for task in tasks):
        rng.choice(moves)()
        await asyncio.sleep(0)
        most = max(most, door.busy())
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert most <= 8
    assert door.busy() == 0
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
    door = Door(bounded_pools(2))
    door.fleet.beat(report(slots=9))
    held = [await door.ask(STRICT) for _ in range(2)]
    waiting = door.ask(STRICT)
    assert await door.waiting("few") == 1
    assert door.dispatch.running("few") == 2
    others = [await door.ask(SAMPLED) for _ in range(3)]
    assert {lease.candidate.pool for lease in others} == {"many"}
    door.dispatch.give_back(others[0], Verdict.ANSWERED)
    await settled()
    assert not waiting.done(), "a slot of another pool is none of this one"
    door.dispatch.give_back(held[0], Verdict.ANSWERED)
    assert (await waiting).candidate.pool == "few"
    assert (door.dispatch.running("few"), door.dispatch.running("many")) == (2, 2)


async def test_a_pool_that_is_full_by_its_own_slots_spills_like_any_other() -> None:
    door = Door(bounded_pools(1))
    door.fleet.beat(report(slots=9))
    assert (await door.ask(GREEDY)).candidate.pool == "few"
    spilled = await door.ask(GREEDY)
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
    door = Door(policy)
    door.fleet.beat(report(slots=9))
    first = await door.ask(asker=Asker(team="a"))
    second = door.ask(asker=Asker(team="a"))
    assert await door.waiting("few") == 1
    door.dispatch.give_back(first, Verdict.ANSWERED)
    assert (await second).candidate.pool == "few"
    assert (await door.ask(asker=Asker(team="b"))).candidate.pool == "many"
