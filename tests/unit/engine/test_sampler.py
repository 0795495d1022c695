from collections.abc import Sequence

import mlx.core as mx
import pytest

from policies.request.profile import Sampling
from workers.engine.sampler import (
    NUCLEUS_TOKENS,
    SamplingContext,
    TokenCounts,
    choose,
    filter_logits,
    position_key,
    reshape_logits,
)

LOGITS = mx.array([[2.0, 1.0, 0.0, -1.0]])


def context_of(sampling: Sampling, **changes: object) -> SamplingContext:
    values: dict[str, object] = {"seed": 1, "prompt": [], "answer": []}
    return SamplingContext(sampling=sampling, **{**values, **changes})  # type: ignore[arg-type]


def allowed_tokens(sampling: Sampling) -> list[bool]:
    return [value > -1e30 for value in filter_logits(LOGITS[None], [sampling])[0, 0].tolist()]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [True, True, True, True]),
        (Sampling(top_k=2), [True, True, False, False]),
        (Sampling(top_k=9), [True, True, True, True]),
        (Sampling(top_p=0.6), [True, False, False, False]),  # shares .64 .24 .09 .03
        (Sampling(top_p=0.7), [True, True, False, False]),
        (Sampling(min_p=0.2), [True, True, False, False]),
        (Sampling(top_k=3, min_p=0.05, top_p=0.99), [True, True, True, False]),
    ],
)
def test_filters_keep_exactly_the_expected_tokens(sampling: Sampling, expected: list[bool]) -> None:
    assert allowed_tokens(sampling) == expected


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
    "samplings",
    [FILTERS, FILTERS[:3], FILTERS[3:5], FILTERS[5:], *((one,) for one in FILTERS)],
)
@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_rows_filtered_together_keep_what_the_definitions_keep(
    samplings: Sequence[Sampling], spread: float, ties: bool
) -> None:
    for seed in range(4):
        shape = (len(samplings), 3, 2000)
        logits = spread * mx.random.normal(shape, key=mx.random.key(seed))
        if ties:  # scores of bfloat16 layers have many
            logits = logits.astype(mx.bfloat16).astype(mx.float32)
        expected = mx.stack(
            [filter_by_sorting(*each) for each in zip(logits, samplings, strict=True)]
        )
        assert mx.array_equal(filter_logits(logits, samplings), expected)


@pytest.mark.parametrize("ties", [False, True])
def test_a_nucleus_in_a_large_vocabulary_is_the_one_that_sorting_finds(ties: bool) -> None:
    """Where the likeliest tokens have its probability, and where only a sort finds it."""
    vocabulary = 5 * NUCLEUS_TOKENS
    samplings = (
        Sampling(top_p=0.9),
        Sampling(top_p=0.999),
        Sampling(top_p=0.95, min_p=0.02),
        Sampling(min_p=0.1),
        Sampling(top_p=0.95, min_p=1e-9),
        Sampling(top_p=0.5),
    )
    kept = set()
    for seed, spread in enumerate((0.3, 3.0, 9.0) * 4):
        shape = (len(samplings), 2, vocabulary)
        logits = spread * mx.random.normal(shape, key=mx.random.key(seed))
        logits[:, 1] = 0.5 * logits[:, 1]  # positions of one row may differ
        if ties:
            logits = logits.astype(mx.bfloat16).astype(mx.float32)
        filtered = filter_logits(logits, samplings)
        expected = mx.stack(
            [filter_by_sorting(*each) for each in zip(logits, samplings, strict=True)]
        )
        assert mx.array_equal(filtered, expected)
        counts = (filtered[:2] > -mx.inf).sum(-1).flatten().tolist()
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
    sampling = Sampling(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((2, 10.0),),
    )

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
        Sampling(temperature=0.7, frequency_penalty=1.5, logit_bias=((2, 1.0),)),
    ],
)
def test_tokens_after_drafts_are_chosen_as_after_the_same_answer(sampling) -> None:
    scores = mx.broadcast_to(mx.array([2.0, 1.9, 1.8, 1.7]), (1, 4, 4))
    drafts = mx.array([[0, 1, 0]])
    with_drafts = choose(scores, [context_of(sampling, answer=[3])], drafts)[0].tolist()
    one_by_one = []
    for at in range(4):
        answer = [3, *drafts[0, :at].tolist()]
        row = context_of(sampling, answer=answer)
        one_by_one.append(choose(scores[:, :1], [row])[0, 0].item())

    assert with_drafts == one_by_one
    assert len(set(with_drafts)) > 1, "the penalties change the choice"


def test_penalties_do_not_change_the_scores_of_the_caller() -> None:
    scores = mx.array([[[2.0, 1.0]]])

    choose(scores, [context_of(Sampling(temperature=0, logit_bias=((1, 50.0),)))])

    assert scores.tolist() == [[[2.0, 1.0]]]


def test_a_bias_decides_a_greedy_choice() -> None:
    biased = context_of(Sampling(temperature=0, logit_bias=((3, 50.0),)))
    plain = context_of(Sampling(temperature=0))

    tokens = choose(mx.stack([LOGITS, LOGITS]), [biased, plain])

    assert tokens.tolist() == [[3], [0]]


def test_a_seeded_row_draws_the_same_tokens_in_any_batch() -> None:
    scores = mx.zeros((1, 3, 50))
    row = context_of(Sampling(), seed=7, answer=[0] * 4)
    other = context_of(Sampling(temperature=0.5, top_k=3), seed=8)

    single = choose(scores, [row])[0].tolist()
    batched = choose(mx.zeros((3, 3, 50)), [other, row, other])[1].tolist()

    assert single == batched


def test_a_draw_depends_on_its_position_not_on_its_step() -> None:
    scores = mx.zeros((1, 4, 1000))
    in_one_step = choose(scores, [context_of(Sampling(), answer=[0] * 10)])[0].tolist()

    one_by_one = [
        choose(scores[:, :1], [context_of(Sampling(), answer=[0] * (10 + at))])[0, 0].item()
        for at in range(4)
    ]

    assert in_one_step == one_by_one


def test_adjacent_seeds_and_positions_share_no_draws() -> None:
    keys = {
        tuple(position_key(seed, position).tolist())
        for seed in (-1, 0, 1, 2, 2**63 - 1)
        for position in range(50)
    }

    assert len(keys) == 250
