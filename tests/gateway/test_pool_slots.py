"""Pools with slots of their own, beside those of their workers."""

from __future__ import annotations

from gateway.fleet.circuit_breaker import Verdict
from policies.compiler import Asker
from policies.document import PolicyDocument, read_policy
from tests.support.request_profiles import GREEDY, SAMPLED
from tests.support.scheduler_harness import Door, report, settled


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
