"""The retry budget, and the quarantine of bodies that crash workers."""

from __future__ import annotations

from gateway.proxy.quarantine import KEPT_S, Quarantine
from gateway.proxy.retry_budget import RetryBudget
from policies.sections import Retries


def test_a_fifth_of_the_active_requests_or_three_may_retry_at_once() -> None:
    budget = RetryBudget()
    for active, allowed in ((0, 3), (10, 3), (15, 3), (20, 4), (100, 20)):
        budget.active, budget.retrying = active, allowed - 1
        assert budget.allows(Retries())
        budget.retrying = allowed
        assert not budget.allows(Retries())
    assert budget.denied == 5


def test_a_policy_may_allow_fewer_retries_or_none() -> None:
    budget = RetryBudget()
    budget.active = 100
    assert not budget.allows(Retries(share=0, at_least=0))
    budget.retrying = 9
    assert budget.allows(Retries(share=0.1))
    budget.retrying = 10
    assert not budget.allows(Retries(share=0.1))


def test_a_retry_counts_until_its_context_ends_even_by_an_exception() -> None:
    budget = RetryBudget()
    try:
        with budget.retry():
            assert budget.retrying == 1
            raise RuntimeError
    except RuntimeError:
        pass
    assert budget.retrying == 0


def test_a_body_is_quarantined_after_it_crashed_two_workers() -> None:
    quarantine = Quarantine()
    quarantine.lost(b"poison", "boot-1", 0.0)
    assert not quarantine.holds(b"poison", 0.0)
    quarantine.lost(b"poison", "boot-1", 1.0)
    assert not quarantine.holds(b"poison", 1.0), "two crashes of one boot count once"
    quarantine.lost(b"poison", "boot-2", 2.0)
    assert quarantine.holds(b"poison", 2.0)
    assert not quarantine.holds(b"other", 2.0)
    assert len(quarantine) == 1


def test_a_quarantine_ends_after_ten_minutes() -> None:
    quarantine = Quarantine()
    for boot in ("1", "2"):
        quarantine.lost(b"poison", boot, 0.0)
    assert quarantine.holds(b"poison", KEPT_S - 1)
    assert not quarantine.holds(b"poison", KEPT_S)
    quarantine.lost(b"poison", "3", KEPT_S)
    assert not quarantine.holds(b"poison", KEPT_S)
    for boot, at_s in (("1", 0.0), ("2", KEPT_S)):
        quarantine.lost(b"late", boot, at_s)
    assert not quarantine.holds(b"late", KEPT_S), "the first crash is forgotten at the second"


def test_a_successful_answer_resets_the_crash_count_of_a_body() -> None:
    quarantine = Quarantine()
    quarantine.lost(b"innocent", "1", 0.0)
    quarantine.answered(b"innocent")
    quarantine.lost(b"innocent", "2", 1.0)
    assert not quarantine.holds(b"innocent", 1.0)


def test_the_quarantine_is_bounded() -> None:
    quarantine = Quarantine()
    for number in range(3000):
        for boot in ("1", "2"):
            quarantine.lost(b"%d" % number, boot, 0.0)
    assert len(quarantine) == 1024
    assert not quarantine.holds(b"0", 0.0), "the oldest entry is evicted first"
    assert quarantine.holds(b"2999", 0.0)
