"""What the engine takes for granted about mlx-vlm: each test fails when that moves."""

import mlx.core as mx
import pytest
from mlx_vlm.models.base import LanguageModelOutput

from tests.engine.conftest import run
from workers.engine.row_cache import RowCache
from workers.engine.seam import ArraysCache, Checkpoint, KVCache
from workers.engine.verify import Verify, probe_native_verify

TOKENS = list(range(20, 60))


def positions(begin: int, end: int) -> mx.array:
    return mx.arange(begin, end)[None]


def test_row_cache_has_nothing_that_makes_the_model_split_the_batch() -> None:
    assert not hasattr(RowCache, "extract")
    assert not hasattr(RowCache, "merge")
    assert RowCache.left_padding is None


def test_a_hybrid_checkpoint_has_one_cache_a_layer_of_the_two_kinds(
    checkpoint: Checkpoint,
) -> None:
    kinds = {type(cache) for cache in checkpoint.target.new_caches()}

    assert kinds == {KVCache, ArraysCache}
    assert checkpoint.target.batches_rows


def test_recurrent_caches_offer_what_joins_leaves_and_rollbacks_need() -> None:
    for name in ("extend", "filter", "start_speculation", "commit_speculation", "batch_size"):
        assert hasattr(ArraysCache, name), name


def test_the_language_model_takes_positions_and_gives_hidden_states(
    checkpoint: Checkpoint,
) -> None:
    forward = checkpoint.target.forward(
        mx.array([TOKENS]), checkpoint.target.new_caches(), positions(0, len(TOKENS))
    )

    assert forward.hidden is not None
    assert forward.hidden.shape[:2] == (1, len(TOKENS))
    assert checkpoint.target.scores(forward, last=1).shape == (1, 1, checkpoint.vocabulary)


def test_hidden_states_give_the_models_own_scores(checkpoint: Checkpoint) -> None:
    target = checkpoint.target
    ours = target.scores(target.forward(mx.array([TOKENS]), target.new_caches(), positions(0, 40)))

    theirs: LanguageModelOutput = target.language(
        mx.array([TOKENS]),
        cache=target.new_caches(),
        position_ids=mx.broadcast_to(positions(0, 40)[None], (3, 1, 40)),
    )

    assert mx.array_equal(ours, theirs.logits)


@pytest.mark.parametrize("native", [True, False])
def test_a_rejected_token_leaves_no_trace_in_any_cache(
    checkpoint: Checkpoint, native: bool
) -> None:
    """Append three tokens, keep one, go on: the scores are those of never having seen the rest."""
    target = checkpoint.target

    def prefilled() -> list[object]:
        caches = target.new_caches()
        target.forward(mx.array([TOKENS]), caches, positions(0, 40))
        return [
            RowCache([c.offset], c.keys, c.values) if isinstance(c, KVCache) else c for c in caches
        ]

    clean, rolled = prefilled(), prefilled()
    verify = Verify(target, clean, native=True)
    verify.run(mx.array([[7]]), positions(40, 41))
    verify.keep([1])
    verify = Verify(target, rolled, native=native)
    verify.run(mx.array([[7, 8, 9]]), positions(40, 43))
    verify.keep([1])

    expected, got = (
        target.scores(target.forward(mx.array([[5]]), caches, positions(41, 42)))
        for caches in (clean, rolled)
    )

    assert mx.allclose(expected, got, atol=0.05).item()


def test_this_family_verifies_in_one_pass(checkpoint: Checkpoint) -> None:
    assert probe_native_verify(checkpoint.target)


def test_a_family_that_cannot_roll_back_is_found_out(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states that stay where the rejected tokens left them, without an error."""
    monkeypatch.setattr(ArraysCache, "commit_speculation", lambda *_: None)

    assert not probe_native_verify(checkpoint.target)


def test_the_head_has_the_modules_the_lane_drives(checkpoint: Checkpoint) -> None:
    head = checkpoint.head
    assert head is not None
    width = checkpoint.target.language.model.embed_tokens.weight.shape[1]

    state = head.forward(
        mx.array([[5]]), mx.zeros((1, 1, width)), head.new_caches(), positions(0, 1)
    )

    assert state.shape == (1, 1, width)
    assert head.draft(state).shape == (1,)


def test_no_call_depends_on_the_positions_the_model_remembers(
    checkpoint: Checkpoint, make_lane, ask
) -> None:
    """`language_model._rope_deltas` is shared state that a picture leaves behind."""
    lane = make_lane()
    before = ask(lane, TOKENS, max_tokens=12)
    run(lane)
    checkpoint.target.language._rope_deltas = mx.array([[-1000]])
    after = ask(lane, TOKENS, max_tokens=12)
    run(lane)

    assert before.row.answer == after.row.answer
