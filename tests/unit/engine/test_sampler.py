import mlx.core as mx
import pytest

from policies.request.profile import Sampling
from workers.engine.sampler import (
    SamplingContext,
    choose,
    filter_logits,
    position_key,
    reshape_logits,
)

LOGITS = mx.array([[2.0, 1.0, 0.0, -1.0]])


def chooser(sampling: Sampling, **known: object) -> SamplingContext:
    facts: dict[str, object] = {"seed": 1, "position": 0, "prompt": [], "answer": []}
    return SamplingContext(sampling=sampling, **{**facts, **known})  # type: ignore[arg-type]


def kept(sampling: Sampling) -> list[bool]:
    return [value > -1e30 for value in filter_logits(LOGITS, sampling)[0].tolist()]


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
def test_filters_keep_exactly_the_tokens_they_name(
    sampling: Sampling, expected: list[bool]
) -> None:
    assert kept(sampling) == expected


def test_penalties_and_biases_move_only_the_scores_they_name() -> None:
    sampling = Sampling(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((2, 10.0),),
    )

    moved = reshape_logits(LOGITS + 0, chooser(sampling, prompt=[3], answer=[0, 0]))

    assert moved[0].tolist() == pytest.approx([2 / 2 - 0.5 - 2 * 0.25, 1.0, 10.0, -2.0])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repetition_penalty=3.0),
        Sampling(temperature=0, presence_penalty=1.5),
        Sampling(temperature=0, frequency_penalty=1.5),
        Sampling(temperature=0.7, frequency_penalty=1.5, logit_bias=((2, 1.0),)),
    ],
)
def test_a_position_behind_drafts_is_chosen_as_if_they_stood_in_the_answer(sampling) -> None:
    scores = mx.broadcast_to(mx.array([2.0, 1.9, 1.8, 1.7]), (1, 4, 4))
    drafts = mx.array([[0, 1, 0]])
    together = choose(scores, [chooser(sampling, position=1, answer=[3])], drafts)[0].tolist()
    alone = []
    for at in range(4):
        answer = [3, *drafts[0, :at].tolist()]
        row = chooser(sampling, position=1 + at, answer=answer)
        alone.append(choose(scores[:, :1], [row])[0, 0].item())

    assert together == alone
    assert len(set(together)) > 1, "the penalties decide something"


def test_penalties_leave_the_callers_scores_alone() -> None:
    scores = mx.array([[[2.0, 1.0]]])

    choose(scores, [chooser(Sampling(temperature=0, logit_bias=((1, 50.0),)))])

    assert scores.tolist() == [[[2.0, 1.0]]]


def test_a_bias_decides_a_greedy_choice() -> None:
    biased = chooser(Sampling(temperature=0, logit_bias=((3, 50.0),)))
    plain = chooser(Sampling(temperature=0))

    tokens = choose(mx.stack([LOGITS, LOGITS]), [biased, plain])

    assert tokens.tolist() == [[3], [0]]


def test_a_seeded_row_draws_the_same_alone_and_among_others() -> None:
    scores = mx.zeros((1, 3, 50))
    row = chooser(Sampling(), seed=7, position=4)
    other = chooser(Sampling(temperature=0.5, top_k=3), seed=8)

    alone = choose(scores, [row])[0].tolist()
    among = choose(mx.zeros((3, 3, 50)), [other, row, other])[1].tolist()

    assert alone == among


def test_a_draw_depends_on_its_position_not_on_its_step() -> None:
    scores = mx.zeros((1, 4, 1000))
    together = choose(scores, [chooser(Sampling(), position=10)])[0].tolist()

    one_by_one = [
        choose(scores[:, :1], [chooser(Sampling(), position=10 + at)])[0, 0].item()
        for at in range(4)
    ]

    assert together == one_by_one


def test_neighbouring_seeds_and_positions_share_no_draws() -> None:
    keys = {
        tuple(position_key(seed, position).tolist())
        for seed in (-1, 0, 1, 2, 2**63 - 1)
        for position in range(50)
    }

    assert len(keys) == 250
