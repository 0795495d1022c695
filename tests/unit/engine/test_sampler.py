import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from paceline.request.profile import Sampling
from workers.engine.decode.sampler import (
    NUCLEUS_TOKENS,
    SamplingContext,
    TokenCounts,
    choose,
    draw,
    filter_logits,
    reshape_logits,
    uniform,
)

LOGITS = mx.array([[2.0, 1.0, 0.0, -1.0]])


def context_of(sampling: Sampling, **changes: Any) -> SamplingContext:
    return SamplingContext(sampling=sampling, **{"seed": 1, "prompt": [], "answer": [], **changes})


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 4),
        (Sampling(top_k=2), 2),
        (Sampling(top_k=9), 4),
        (Sampling(top_p=0.6), 1),  # shares .64 .24 .09 .03
        (Sampling(top_p=0.7), 2),
        (Sampling(min_p=0.2), 2),
        (Sampling(top_k=3, min_p=0.05, top_p=0.99), 3),
    ],
)
def test_filters_keep_exactly_the_likeliest_tokens(sampling: Sampling, kept: int) -> None:
    filtered = filter_logits(LOGITS[None], [sampling])[0, 0].tolist()
    assert [score > -1e30 for score in filtered] == [at < kept for at in range(4)]


FILTERS = (
    Sampling(top_k=20, top_p=0.95),
    Sampling(top_k=3),
    Sampling(top_k=40, min_p=0.05, top_p=0.9),
    Sampling(top_p=0.5),
    Sampling(top_p=0.999, min_p=0.001),
    Sampling(min_p=0.1),
    Sampling(min_p=0.1, top_k=5000),
    Sampling(),
)


def logits_of(shape: tuple[int, ...], seed: int, spread: float, *, ties: bool) -> mx.array:
    logits = spread * mx.random.normal(shape, key=mx.random.key(seed))
    # Scores of bfloat16 layers have many ties.
    return logits.astype(mx.bfloat16).astype(mx.float32) if ties else logits


def assert_filtered(logits: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Check the filters by their definitions; return the filtered logits."""
    filtered = filter_logits(logits, samplings)
    expected = [filter_by_sorting(*each) for each in zip(logits, samplings, strict=True)]
    assert mx.array_equal(filtered, mx.stack(expected))
    return filtered


def filter_by_sorting(logits: mx.array, sampling: Sampling) -> mx.array:
    """Apply the filters one after another to [L, vocabulary], each by its definition."""
    vocabulary = logits.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        kth = mx.sort(logits, axis=-1)[:, vocabulary - sampling.top_k]
        logits = mx.where(logits >= kth[:, None], logits, -mx.inf)
    if sampling.min_p > 0:
        floor = logits.max(axis=-1, keepdims=True) + mx.log(mx.array(sampling.min_p))
        logits = mx.where(logits >= floor, logits, -mx.inf)
    if sampling.top_p < 1:
        ordered = mx.sort(logits, axis=-1)[:, ::-1]
        shares = mx.softmax(ordered, axis=-1)
        count = (mx.cumsum(shares, axis=-1) - shares < sampling.top_p).sum(-1, keepdims=True)
        least = mx.take_along_axis(ordered, count - 1, axis=-1)
        logits = mx.where(logits >= least, logits, -mx.inf)
    return logits


@pytest.mark.parametrize(
    "samplings", [FILTERS, FILTERS[:3], FILTERS[3:5], FILTERS[5:], *((one,) for one in FILTERS)]
)
@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_rows_filtered_together_keep_what_the_definitions_keep(samplings, spread, ties) -> None:
    for seed in range(4):
        assert_filtered(logits_of((len(samplings), 3, 2000), seed, spread, ties=ties), samplings)


@pytest.mark.parametrize("ties", [False, True])
def test_a_nucleus_in_a_large_vocabulary_is_the_one_that_sorting_finds(ties: bool) -> None:
    """Where the likeliest tokens have its probability, and where only a sort finds it."""
    samplings = (
        *(Sampling(top_p=0.9), Sampling(top_p=0.999), Sampling(top_p=0.95, min_p=0.02)),
        *(Sampling(min_p=0.1), Sampling(top_p=0.95, min_p=1e-9), Sampling(top_p=0.5)),
    )
    kept = set()
    for seed, spread in enumerate((0.3, 3.0, 9.0) * 4):
        logits = logits_of((len(samplings), 2, 5 * NUCLEUS_TOKENS), seed, spread, ties=ties)
        logits[:, 1] = 0.5 * logits[:, 1]  # positions of one row may differ
        counts = (assert_filtered(logits, samplings)[:2] > -mx.inf).sum(-1).flatten().tolist()
        kept |= {count > NUCLEUS_TOKENS for count in counts}
    assert kept == {False, True}


def test_excluded_tokens_stay_excluded_where_fewer_than_top_k_are_allowed() -> None:
    logits = mx.where(mx.arange(100) < 3, mx.zeros((2, 1, 100)), -mx.inf)
    filtered = filter_logits(logits, [Sampling(top_k=20, top_p=0.9), Sampling(top_k=2)])
    assert ((filtered > -mx.inf).sum(-1) == 3).all()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repetition_penalty=1.7),
        Sampling(temperature=0.9, top_k=30, presence_penalty=0.7, frequency_penalty=0.3),
    ],
)
def test_counts_of_former_steps_choose_as_counts_of_the_whole_answer(sampling: Sampling) -> None:
    counts, answer, prompt = TokenCounts(), [7], [1, 2, 3, 3]
    for step in range(12):
        scores = mx.random.normal((1, 3, 40), key=mx.random.key(step))
        drafts = mx.array([[step % 5, 6]])
        kept = context_of(sampling, prompt=prompt, answer=answer, counts=counts)
        new = context_of(sampling, prompt=prompt, answer=list(answer))
        tokens = choose(scores, [kept], drafts).tolist()
        assert tokens == choose(scores, [new], drafts).tolist()
        answer += tokens[0][: 1 + step % 3]


def test_penalties_and_biases_change_only_the_scores_of_their_tokens() -> None:
    penalties = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampling = penalties._replace(logit_bias=((2, 10.0),))
    changed = reshape_logits(LOGITS + 0, context_of(sampling, prompt=[3], answer=[0, 0]))
    assert changed[0].tolist() == pytest.approx([2 / 2 - 0.5 - 2 * 0.25, 1.0, 10.0, -2.0])
    once = reshape_logits(LOGITS + 0, context_of(Sampling(presence_penalty=0.5), answer=[1]))
    assert (LOGITS - once)[0].tolist() == pytest.approx([0.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repetition_penalty=3.0),
        Sampling(temperature=0, presence_penalty=1.5),
        Sampling(temperature=0, frequency_penalty=1.5),
        Sampling(temperature=1.7, frequency_penalty=1.5, logit_bias=((2, 1.0),)),
    ],
)
def test_tokens_after_drafts_are_chosen_as_after_the_same_answer(sampling: Sampling) -> None:
    scores = mx.broadcast_to(mx.array([2.0, 1.9, 1.8, 1.7]), (1, 4, 4))
    drafts = [0, 1, 0]
    with_drafts = choose(scores, [context_of(sampling, answer=[3])], mx.array([drafts]))[0].tolist()
    rows = [context_of(sampling, answer=[3, *drafts[:at]]) for at in range(4)]
    assert with_drafts == [choose(scores[:, :1], [row])[0, 0].item() for row in rows]
    assert len(set(with_drafts)) > 1, "the penalties change the choice"


def test_a_bias_decides_a_greedy_choice_and_changes_no_score_of_the_caller() -> None:
    biased = context_of(Sampling(temperature=0, logit_bias=((3, 50.0),)))
    plain = context_of(Sampling(temperature=0))
    scores = mx.stack([LOGITS, LOGITS])
    assert choose(scores, [biased, plain]).tolist() == [[3], [0]]
    assert scores.tolist() == [LOGITS.tolist()] * 2


def test_a_seeded_row_draws_the_same_tokens_in_any_batch_and_step() -> None:
    row = context_of(Sampling(), seed=7, answer=[0] * 4)
    other = context_of(Sampling(temperature=0.5, top_k=3), seed=8)
    single = choose(mx.zeros((1, 4, 1000)), [row])[0].tolist()
    assert choose(mx.zeros((3, 4, 1000)), [other, row, other])[1].tolist() == single
    rows = [context_of(Sampling(), seed=7, answer=[0] * (4 + at)) for at in range(4)]
    assert [choose(mx.zeros((1, 1, 1000)), [one])[0, 0].item() for one in rows] == single
    places = itertools.product((-1, 0, 1, 2, 2**63 - 1), range(50))
    assert len({uniform(*place) for place in places}) == 250, "no shared draw"


def test_a_draw_follows_the_probabilities_and_never_takes_an_excluded_token() -> None:
    """By seed and by position; also at the ends of the interval, and of tiny probabilities."""
    shares = (0.5, 0.0, 0.3, 0.2, 0.0)
    scores = mx.broadcast_to(mx.log(mx.array(shares)), (1, 20_000, 5))
    for numbers in ((1, at) for at in range(20_000)), ((at, 5) for at in range(20_000)):
        tokens = draw(scores, mx.array([[uniform(*one) for one in numbers]]))[0].tolist()
        for token, share in enumerate(shares):
            found = tokens.count(token) / len(tokens)
            assert found == pytest.approx(share, abs=0.02) if share else found == 0
    ends = mx.array([[0.0, 1 - 2**-24]])
    assert draw(scores[:, :2], ends).tolist() == [[0, 3]]
    flat = mx.concatenate([mx.full((1, 1, 9), -mx.inf), mx.zeros((1, 1, 100_000))], axis=-1)
    for number in (0.0, 1e-9, 0.5, 1 - 2**-24):
        assert 9 <= draw(flat, mx.array([[number]])).item() < 100_009
