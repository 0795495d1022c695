"""Heads in eight bits and drafts over the frequent tokens, where a device drafts faster so."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from bench.families.checkpoints import write_checkpoint
from bench.families.configs import family
from bench.families.heads import ASSISTED, write_head
from paceline.request.profile import Sampling
from tests.support.engine_lane import GREEDY, run_until_idle
from tests.support.reference_decoder import assert_matches_reference
from workers.demo import CHECKPOINT
from workers.engine import engine as assembly
from workers.engine.decode.step_graph import StepGraph
from workers.engine.engine import load_engine
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.draft_shortlist import DraftShortlist
from workers.engine.model.mtp_head import MtpHead
from workers.engine.startup.head_speed import quantise_if_faster, use_shortlist_if_faster
from workers.engine.types import EngineSettings, LaneName

TOKENS = 400
"""Of the 1,536 tokens of the demo."""
QUESTIONS = ("Count from 1 to 20.", "Tell me a story about a fox.", "Hello")
SAMPLED = Sampling(temperature=1.0, top_p=0.95)
SETTINGS = EngineSettings(model=CHECKPOINT, served_name="demo", lanes=(LaneName.TEXT_MTP,))


def durations(*seconds: float) -> Callable[[Callable[[], mx.array]], float]:
    """Return a clock of passes; each pass is computed too."""
    times = iter(seconds)

    def measure(draft: Callable[[], mx.array]) -> float:
        mx.eval(draft())
        return next(times)

    return measure


def is_quantised(head: MtpHead) -> bool:
    modules = tree_flatten(head.drafter.leaf_modules(), is_leaf=nn.Module.is_module)
    return any(isinstance(module, nn.QuantizedLinear) for _, module in modules)


def arrays(head: MtpHead) -> dict[str, mx.array]:
    return dict(tree_flatten(head.parameters()))


def test_a_head_that_drafts_faster_in_eight_bits_does_so_and_answers_are_the_same(
    make_lane: Any, ask: Any
) -> None:
    checkpoint = load_checkpoint(CHECKPOINT)
    head = checkpoint.head
    assert head is not None
    own = arrays(head)
    restore = quantise_if_faster(head, checkpoint.target, durations(1.2, 1.0))
    assert restore is not None
    assert is_quantised(head)
    lane = make_lane(target=checkpoint.target, head=head)
    result = ask(lane, "Count from 1 to 20.", max_tokens=40)
    assert_matches_reference(checkpoint, result)
    assert result.end.speculation.acceptance_rate > 0.5

    restore()
    assert not is_quantised(head)
    assert all(mx.array_equal(own[name], array).item() for name, array in arrays(head).items())


def test_a_head_that_drafts_no_faster_in_eight_bits_keeps_its_weights() -> None:
    checkpoint = load_checkpoint(CHECKPOINT)
    head = checkpoint.head
    assert head is not None
    own = arrays(head)
    assert quantise_if_faster(head, checkpoint.target, durations(1.0, 1.0)) is None
    assert arrays(head).keys() == own.keys()


def test_an_assistant_is_quantised_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", family(ASSISTED))
    write_head(tmp_path / "head", family(ASSISTED))
    checkpoint = load_checkpoint(tmp_path / "model", mtp=tmp_path / "head")
    head = checkpoint.head
    assert head is not None
    assert quantise_if_faster(head, checkpoint.target, durations(2.0, 1.0)) is not None
    assert is_quantised(head)


def test_a_head_that_fails_its_test_in_eight_bits_gets_its_own_weights_back(monkeypatch) -> None:
    def spoil(head: MtpHead, target: Any) -> Any:
        restore = quantise_if_faster(head, target, durations(2.0, 1.0))
        head.drafter.fc.scales = mx.zeros_like(head.drafter.fc.scales)
        return restore

    monkeypatch.setattr(assembly, "quantise_if_faster", spoil)
    engine = load_engine(SETTINGS)
    assert engine.checkpoint.head is not None
    assert not is_quantised(engine.checkpoint.head)
    assert engine.card.mtp


def shortened(checkpoint: Checkpoint, *seconds: float) -> DraftShortlist | None:
    """Try a shortlist; a draft, one over the shortlist, and a step take these times."""
    graph = StepGraph(checkpoint.target, checkpoint.head)
    return use_shortlist_if_faster(
        checkpoint, graph, tokens=TOKENS, measure=durations(*seconds or (9.0, 1.0, 1.0))
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_same_with_a_shortlist(make_lane, submit, sampling) -> None:
    """With one it drafts other tokens, so that the target accepts fewer; the answers stay.

    In the last case every row has too many rare tokens for it.
    """
    answers, accepted = [], []
    for max_outside in (None, 1.0, -1.0):
        checkpoint = load_checkpoint(CHECKPOINT)
        if max_outside is not None:
            shortlist = shortened(checkpoint)
            assert shortlist is not None
            shortlist.max_outside = max_outside
        lane = make_lane(target=checkpoint.target, head=checkpoint.head)
        results = [
            submit(lane, question, sampling=sampling, seed=seed, max_tokens=40)
            for seed, question in enumerate(QUESTIONS)
        ]
        run_until_idle(lane)
        if sampling is GREEDY:
            assert_matches_reference(checkpoint, *results)
        answers.append([result.row.answer for result in results])
        accepted.append(sum(result.end.speculation.accepted for result in results))
    assert answers[0] == answers[1] == answers[2]
    assert 0 < accepted[1] < accepted[0], "the shortlist was in force"
    assert accepted[2] == accepted[0]


@pytest.mark.parametrize("kind", ["linear", "embedding", "4 bits", "mxfp4"])
def test_a_draft_is_the_likeliest_token_of_the_shortlist_and_of_the_further_ones(kind) -> None:
    mx.random.seed(3)
    layer: Any = nn.Embedding(500, 64) if kind == "embedding" else nn.Linear(64, 500, bias=False)
    if kind == "4 bits":
        layer = layer.to_quantized(group_size=64, bits=4)
    elif kind == "mxfp4":
        layer = layer.to_quantized(group_size=32, bits=4, mode="mxfp4")
    shortlist = DraftShortlist(layer, 100, ())
    hidden = mx.random.normal((40, 1, 64))
    further = mx.random.randint(100, 500, (40, 50))
    whole = layer.as_linear(hidden) if kind == "embedding" else layer(hidden)
    scores = np.array(whole[:, 0])
    known = np.zeros_like(scores, dtype=bool)
    known[:, :100] = True
    np.put_along_axis(known, np.array(further), values=True, axis=1)
    expected = np.where(known, scores, -np.inf).argmax(axis=1)
    assert shortlist.draft(hidden, further).tolist() == expected.tolist()
    assert (expected >= 100).any()


def test_a_row_adds_the_ends_of_answers_and_the_rare_tokens_of_its_prompt(checkpoint) -> None:
    fresh = load_checkpoint(CHECKPOINT)
    shortlist = shortened(fresh)
    assert shortlist is not None
    prompt = [5, 1200, 6, 1201, 1200, 7]
    further = shortlist.further(prompt)
    assert {token for token in checkpoint.eos if token >= TOKENS} <= {*further}
    assert {1200, 1201} <= {*further}
    assert set(further) & {5, 6, 7} == set()


def test_a_row_of_rare_tokens_drafts_over_the_whole_vocabulary() -> None:
    shortlist = shortened(load_checkpoint(CHECKPOINT))
    assert shortlist is not None
    shortlist.max_outside = 0.1
    frequent, rare = [50] * 70, [1200] * 70
    assert shortlist.covers(frequent, (), ())
    assert not shortlist.covers(rare, (), ())
    answer, further = [1200] * 64, shortlist.further(rare)
    assert shortlist.covers(rare, answer, further), "its prompt has added the token"
    assert not shortlist.covers(rare, [*answer, *[1300] * 7], further)


def test_the_marks_of_a_tokenizer_count_as_frequent(checkpoint: Checkpoint) -> None:
    layer = checkpoint.target.language.model.embed_tokens
    shortlist = DraftShortlist(layer, TOKENS, marks=[1400])
    shortlist.saving = 0.05
    assert shortlist.settle(acceptance=0.9, answers=[50, 1400] * 10)
    assert not shortlist.settle(acceptance=0.9, answers=[50, 1300] * 10)


def test_a_head_that_drafts_no_faster_over_a_shortlist_has_none() -> None:
    checkpoint = load_checkpoint(CHECKPOINT)
    assert checkpoint.head is not None
    assert shortened(checkpoint, 1.0, 1.0) is None
    assert checkpoint.head.shortlist is None


def test_a_small_vocabulary_has_no_shortlist() -> None:
    checkpoint = load_checkpoint(CHECKPOINT)
    graph = StepGraph(checkpoint.target, checkpoint.head)
    assert use_shortlist_if_faster(checkpoint, graph, measure=durations()) is None


@pytest.mark.parametrize(
    ("seconds", "pays"), [((9.0, 1.0, 1.0), True), ((1.2, 1.0, 1000.0), False)]
)
def test_the_self_test_drops_a_shortlist_that_saves_less_than_it_misses(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], pays: bool
) -> None:
    shorten = partial(use_shortlist_if_faster, tokens=TOKENS, measure=durations(*seconds))
    monkeypatch.setattr(assembly, "use_shortlist_if_faster", shorten)
    engine = load_engine(SETTINGS)
    assert engine.checkpoint.head is not None
    assert (engine.checkpoint.head.shortlist is not None) is pays
    assert engine.card.mtp
