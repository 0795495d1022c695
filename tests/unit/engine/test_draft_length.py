"""The length of drafts whose tokens a grammar forces, by the measured costs."""

from __future__ import annotations

from collections.abc import Mapping

from workers.engine.draft_length import MIN_SAMPLES, DraftLength


def measured(rows: int, costs_s: Mapping[int, float], *, draft_tokens: int) -> DraftLength:
    lengths = DraftLength(draft_tokens)
    for length, cost_s in costs_s.items():
        for _ in range(MIN_SAMPLES):
            lengths.observe_cost(rows, length, cost_s)
    return lengths


def test_a_forced_draft_is_as_long_as_it_pays() -> None:
    """Each longer length is tried, and then the one with the most tokens a second is used."""
    lengths = measured(1, {0: 1.0, 1: 1.2, 2: 1.4}, draft_tokens=2)
    assert lengths.choose_forced(1, 2, [3]) == 2
    assert lengths.choose_forced(1, 0, [2]) == 2
    for length, cost_s in ((4, 1.6), (8, 4.0)):
        for _ in range(MIN_SAMPLES):
            assert lengths.choose_forced(1, 2, [9]) == length
            lengths.observe_cost(1, length, cost_s)
    assert lengths.choose_forced(1, 2, [9]) == 4
    assert lengths.choose_forced(1, 0, [9]) == 4
    assert lengths.choose_forced(1, 2, []) == 2


def test_a_forced_draft_counts_what_the_other_rows_lose() -> None:
    """A wide verify for one of eight rows costs all of them; for all of them it pays."""
    lengths = measured(8, {0: 1.0, 4: 3.0}, draft_tokens=0)
    assert lengths.choose_forced(8, 0, [4, *[0] * 7]) == 0
    assert lengths.choose_forced(8, 0, [4] * 8) == 4
