"""The retry budget, and the quarantine of bodies that crash workers."""

import asyncio

from gateway.proxy.quarantine import KEPT_S, Quarantine
from gateway.proxy.retry_budget import RetryBudget
from policies.sections import Retries


async def test_a_fifth_of_the_active_requests_or_three_retry_at_once_and_the_others_wait() -> None:
    for active, at_once in ((0, 3), (10, 3), (15, 3), (20, 4), (100, 20)):
        budget = RetryBudget()
        budget.active = active
        turns = [await budget.begin(Retries()) for _ in range(at_once)]
        assert (budget.retrying, budget.delayed) == (at_once, 0)
        waiting = [asyncio.create_task(budget.begin(Retries())) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        assert budget.delayed == 3
        turns[0].close()
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), budget.retrying) == (1, at_once)
        for turn in (*turns, *(task.result() for task in done)):
            turn.close()
        await asyncio.gather(*waiting)


async def test_a_waiting_retry_that_is_cancelled_takes_no_turn() -> None:
    budget = RetryBudget()
    one = Retries(share=0, at_least=1)
    turn = await budget.begin(one)
    waiting = [asyncio.create_task(budget.begin(one)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    turn.close()
    (await waiting[1]).close()
    assert waiting[0].cancelled()
    assert budget.retrying == 0


async def test_a_turn_ends_once_and_a_policy_may_allow_none() -> None:
    budget = RetryBudget()
    one, other = await budget.begin(Retries()), await budget.begin(Retries())
    for _ in range(2):
        one.close()
    assert budget.retrying == 1
    other.close()
    assert budget.retrying == 0
    budget.active = 100
    assert budget.allows(Retries(share=0.1, at_least=0))
    assert not budget.allows(Retries(share=0, at_least=0))


def test_a_body_is_quarantined_for_ten_minutes_after_it_crashed_two_workers() -> None:
    quarantine = Quarantine()
    for at_s in (0.0, 1.0):
        quarantine.lost((b"poison",), "boot-1", at_s)
        assert not quarantine.holds((b"poison",), at_s), "two crashes of one boot count once"
    quarantine.lost((b"poison",), "boot-2", 2.0)
    assert quarantine.holds((b"poison",), 2.0)
    assert not quarantine.holds((b"other",), 2.0)
    assert len(quarantine) == 1
    assert quarantine.holds((b"poison",), 601.0)
    assert not quarantine.holds((b"poison",), 602.0)
    quarantine.lost((b"poison",), "3", KEPT_S + 2.0)
    assert not quarantine.holds((b"poison",), KEPT_S + 2.0)


def test_a_crash_is_forgotten_after_ten_minutes_or_a_successful_answer() -> None:
    quarantine = Quarantine()
    for boot, at_s in (("1", 0.0), ("2", KEPT_S)):
        quarantine.lost((b"late",), boot, at_s)
    assert not quarantine.holds((b"late",), KEPT_S)
    quarantine.lost((b"innocent",), "1", 0.0)
    quarantine.answered((b"innocent",))
    quarantine.lost((b"innocent",), "2", 1.0)
    assert not quarantine.holds((b"innocent",), 1.0)


def test_the_quarantine_is_bounded() -> None:
    quarantine = Quarantine()
    for number in range(3000):
        for boot in ("1", "2"):
            quarantine.lost((b"%d" % number,), boot, 0.0)
    assert len(quarantine) == 1024
    assert not quarantine.holds((b"0",), 0.0), "the oldest entry is evicted first"
    assert quarantine.holds((b"2999",), 0.0)
