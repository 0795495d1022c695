"""Heads in eight bits, where a device drafts faster so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from bench.families.checkpoints import write_checkpoint
from bench.families.configs import family
from bench.families.heads import ASSISTED, write_head
from tests.support.reference_decoder import assert_matches_reference
from workers.demo import CHECKPOINT
from workers.engine import engine as assembly
from workers.engine.engine import load_engine
from workers.engine.model.checkpoint import load_checkpoint
from workers.engine.model.mtp_head import MtpHead
from workers.engine.startup.head_precision import quantise_if_faster
from workers.engine.types import EngineSettings, LaneName


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
    engine = load_engine(
        EngineSettings(model=CHECKPOINT, served_name="demo", lanes=(LaneName.TEXT_MTP,))
    )
    assert engine.checkpoint.head is not None
    assert not is_quantised(engine.checkpoint.head)
    assert engine.card.mtp
