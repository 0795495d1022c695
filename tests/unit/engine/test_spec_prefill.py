"""Selection of tokens by their scores, without a model."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.decode.spec_prefill import (
    CHUNK_TOKENS,
    SINK_TOKENS,
    TAIL_TOKENS,
    TokenScores,
    select,
)

SHARES = st.floats(min_value=0.01, max_value=1.0)


def random_scores(count: int, seed: int) -> TokenScores:
    return np.random.default_rng(seed).random(count, dtype=np.float32)


@given(st.integers(64, 3000), st.integers(0, 99), SHARES)
def test_a_selection_contains_both_ends_and_the_share_to_within_one_chunk(
    count: int, seed: int, share: float
) -> None:
    selected = select(random_scores(count, seed), share)
    assert list(selected) == sorted(set(selected))
    assert set(range(SINK_TOKENS)) | set(range(count - TAIL_TOKENS, count)) <= set(selected)
    ends = SINK_TOKENS + TAIL_TOKENS
    assert min(round(count * share), count) <= len(selected)
    assert len(selected) <= max(round(count * share), ends) + CHUNK_TOKENS


@given(st.integers(0, 1900), st.integers(0, 99))
def test_a_token_with_a_high_score_is_selected_with_adjacent_tokens(at: int, seed: int) -> None:
    scores = random_scores(2000, seed) * np.float32(0.01)
    scores[at] = 1.0
    assert {max(at - 2, 0), at, at + 2} <= set(select(scores, 0.1))


def test_a_score_at_the_beginning_is_averaged_over_fewer_tokens() -> None:
    scores = np.zeros(200, dtype=np.float32)
    scores[1], scores[100] = 1.0, 1.1
    selected = set(select(scores, 0.2))
    assert set(range(CHUNK_TOKENS)) <= selected
    assert 100 not in selected


@given(st.integers(64, 3000), st.integers(0, 99), SHARES, SHARES)
def test_a_larger_share_contains_the_smaller_selection(count, seed, first, second) -> None:
    scores = random_scores(count, seed)
    assert set(select(scores, min(first, second))) <= set(select(scores, max(first, second)))
    assert select(scores, 1.0) == tuple(range(count))
