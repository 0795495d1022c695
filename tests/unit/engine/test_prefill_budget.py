"""The prefill budget and the draft length of a lane."""

import itertools
import random

import pytest

from workers.engine.decode.draft_length import (
    EXPLORATION_STEPS,
    PROBE_EVERY,
    PROBE_STEPS,
    Accepted,
    DraftLength,
)
from workers.engine.lane.prefill_budget import BLOCK_TOKENS, PrefillBudget


def test_without_other_rows_a_chunk_takes_more_budgets_and_not_more() -> None:
    budget = PrefillBudget(4096, budget_s=0.1)
    assert budget.chunk_tokens(others_decode=False) == 256, "its cost is unknown"
    budget.observe(256, 0.256)  # a millisecond a token
    assert budget.chunk_tokens(others_decode=False) == 128
    assert budget.chunk_tokens(others_decode=False, spent_s=0.1) == 64
    assert PrefillBudget(192, budget_s=0.1).chunk_tokens(others_decode=False) == 192


@pytest.mark.parametrize(
    ("read", "chunk_tokens"),
    [
        ([], BLOCK_TOKENS),
        ([(64, 0.064)], 64),  # a millisecond a token
        ([(64, 60.0)], BLOCK_TOKENS),  # the machine is too slow for the budget
        # A short prompt costs the block that it is padded to, and shrinks no chunk of a long one.
        ([(3, 0.036), (19, 0.036), (40, 0.036)], 128),
        ([(640, 0.064), (12, 0.02)] * 3, 704),
    ],
)
def test_with_other_rows_a_chunk_costs_less_than_the_budget(read, chunk_tokens) -> None:
    budget = PrefillBudget(4096, budget_s=0.1)
    for tokens, cost_s in read:
        budget.observe(tokens, cost_s, whole=tokens >= BLOCK_TOKENS)
    assert budget.chunk_tokens(others_decode=True) == chunk_tokens


def test_an_unknown_context_costs_at_most_what_attention_over_it_would() -> None:
    budget = PrefillBudget(4096, budget_s=0.1)
    budget.observe(640, 0.064, context_tokens=3000)
    for context_tokens, expected in ((2048, 704), (7000, 320), (100, 704)):
        tokens = budget.chunk_tokens(others_decode=True, context_tokens=context_tokens)
        assert tokens == expected


def chunk_costs_s(budget: PrefillBudget, tokens: int, fixed_s: float) -> list[float]:
    """Read so many tokens on a simulated machine, on which each pass costs a fixed time too."""
    read, costs_s = 0, []
    while read < tokens:
        size = budget.chunk_tokens(others_decode=True, context_tokens=read)
        costs_s.append(fixed_s + size * (150e-6 + read * 0.1e-6))
        budget.observe(size, costs_s[-1], context_tokens=read)
        read += size
    return costs_s


@pytest.mark.parametrize(("tokens", "fixed_s", "most"), [(4096, 0.0, 40), (40_000, 0.016, 1600)])
def test_chunks_stay_within_the_budget_as_tokens_cost_more_in_long_contexts(
    tokens, fixed_s, most
) -> None:
    """In parts of a block too, where its cost is that of the context and no longer fits."""
    costs_s = chunk_costs_s(PrefillBudget(512, budget_s=0.1), tokens, fixed_s)
    assert max(costs_s) <= 0.102
    assert len(costs_s) < most


def test_a_machine_on_which_a_pass_costs_the_budget_reads_whole_blocks() -> None:
    """A part would cost as much: the pass reads all weights."""
    assert len(chunk_costs_s(PrefillBudget(512, budget_s=0.1), 6400, fixed_s=0.09)) == 100


def test_no_further_chunk_begins_in_the_rest_of_a_budget_that_it_exceeds() -> None:
    budget = PrefillBudget(512, budget_s=0.1)
    budget.observe(64, 0.05)
    spent_s = [0.02, 0.03, 0.2]
    assert [budget.chunk_tokens(others_decode=True, spent_s=s) for s in spent_s] == [64, 0, 0]


def run_policy(
    policy: DraftLength, steps: int, cost_s: dict[int, float], share: float, rows: int = 1
) -> list[int]:
    """Run a policy on a simulated machine; return the k of every step."""
    rng = random.Random(1)
    chosen = []
    row: Accepted = []
    for _ in range(steps):
        k = policy.choose([row] * rows)
        chosen.append(k)
        policy.observe_cost(rows, k, cost_s[k] * rng.uniform(0.9, 1.1))
        accepted = 0
        while accepted < k and rng.random() < share:
            accepted += 1
        policy.observe_acceptance(k, accepted, row)
    return chosen


@pytest.mark.parametrize(
    ("cost_s", "share", "best"),
    [
        # At most k + 1 tokens per step; a verify costs little more than a plain step.
        ({0: 1.0, 1: 1.1, 2: 1.2, 3: 1.9}, 0.9, 2),
        ({0: 1.0, 1: 1.8, 2: 2.6}, 0.7, 0),
    ],
)
def test_drafting_uses_its_best_length_and_stops_where_it_does_not_pay(cost_s, share, best) -> None:
    policy = DraftLength(len(cost_s) - 1)
    chosen = run_policy(policy, 600, cost_s, share)
    assert sum(k == best for k in chosen[100:]) > 0.9 * 500
    assert policy.best(1) == best


def test_batch_sizes_are_measured_separately() -> None:
    policy = DraftLength(2)
    run_policy(policy, 200, {0: 1.0, 1: 1.1, 2: 1.2}, share=0.9, rows=1)
    run_policy(policy, 200, {0: 1.0, 1: 2.2, 2: 3.3}, share=0.9, rows=8)
    assert (policy.best(1), policy.best(8)) == (2, 0)


def test_drafting_that_stopped_is_probed_again_for_a_few_steps() -> None:
    chosen = run_policy(DraftLength(1), 2 * PROBE_EVERY + 9, {0: 1.0, 1: 2.5}, share=0.5)
    drafting_steps = [at for at, k in enumerate(chosen, 1) if at > PROBE_EVERY and k == 1]
    assert drafting_steps == [start + at for start in (128, 256) for at in range(PROBE_STEPS)][1:]


def test_every_answer_in_a_small_batch_begins_with_drafts() -> None:
    policy = DraftLength(2)
    run_policy(policy, 600, {0: 1.0, 1: 1.8, 2: 2.6}, share=0.7)
    run_policy(policy, 600, {0: 1.0, 1: 1.8, 2: 2.6}, share=0.7, rows=8)

    assert [policy.choose([[]], fewest_steps=steps) for steps in (0, EXPLORATION_STEPS - 1)] == [
        2,
        2,
    ]
    assert policy.choose([[]], fewest_steps=EXPLORATION_STEPS) == 0
    assert policy.choose([[]] * 8, fewest_steps=0) == 0


def test_a_small_difference_does_not_change_the_length() -> None:
    policy = DraftLength(1)
    chosen = run_policy(policy, 1000, {0: 1.0, 1: 1.9}, share=0.9)
    changes = sum(a != b for a, b in itertools.pairwise(chosen[50:]))

    assert changes <= 4 * (1000 // PROBE_EVERY)


def test_the_best_case_counts_whole_blocks_at_the_best_speed() -> None:
    budget = PrefillBudget(512, budget_s=0.1)
    assert budget.best_case_s(64) == 0, "no chunk is measured yet"
    budget.observe(128, 0.4)
    budget.observe(3, 0.1)  # the block that it is padded to
    budget.observe(64, 0.3)

    assert [budget.best_case_s(tokens) for tokens in (0, 1, 129)] == [0, 0.1, 0.1 * 3]
