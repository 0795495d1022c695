"""Contract with mlx-vlm: a test fails if a part of it changes on which the engine relies."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.base import LanguageModelOutput
from mlx_vlm.models.qwen3_5.gated_delta import gated_delta_update

from workers.engine.decode.spec_prefill import attention_weights, draft_incompatibility
from workers.engine.decode.step_graph import State, StepGraph
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.kv_cache import (
    ArraysCache,
    KVCache,
    RecurrentCache,
    RowCache,
    capacity,
    state_after,
)
from workers.engine.model.target import Target
from workers.engine.startup.probes import probe_native_verify

TOKENS = list(range(20, 60))


def positions(begin: int, end: int) -> mx.array:
    return mx.arange(begin, end)[None]


def test_the_row_cache_has_no_attribute_at_which_the_model_splits_the_batch() -> None:
    assert not hasattr(RowCache, "extract")
    assert not hasattr(RowCache, "merge")
    assert RowCache.left_padding is None


def test_scores_of_hidden_states_equal_the_logits_of_the_model(checkpoint: Checkpoint) -> None:
    target = checkpoint.target
    actual = target.scores(
        target.forward(mx.array([TOKENS]), target.new_caches(), positions(0, 40))
    )

    expected: LanguageModelOutput = target.language(
        mx.array([TOKENS]),
        cache=target.new_caches(),
        position_ids=mx.broadcast_to(positions(0, 40)[None], (3, 1, 40)),
    )

    assert mx.array_equal(actual, expected.logits)


def read_state(target: Target) -> State:
    caches = target.new_caches()
    target.forward(mx.array([TOKENS]), caches, positions(0, len(TOKENS)))
    state: State = []
    for cache in caches:
        if isinstance(cache, KVCache):
            rows = RowCache(cache.keys, cache.values, mx.array([cache.offset]))
            rows.resize(capacity(len(TOKENS) + 4))
            state.append(rows.state)
        else:
            state.append(tuple(cache.state))
    return state


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_rejected_token_does_not_affect_any_cache(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, native: bool, accepted: int
) -> None:
    """After a rollback, the next scores are those of the accepted tokens only."""
    target = checkpoint.target
    monkeypatch.setattr(target, "native_verify", native)
    graph = StepGraph(target, head=None)
    offset, shift = mx.array([len(TOKENS)]), mx.array([0])

    expected_state = read_state(target)
    for at, token in enumerate([7, 8, 9][:accepted]):
        expected_state = graph.verify(mx.array([[token]]), expected_state, offset + at, shift).state
    verified = graph.verify(mx.array([[7, 8, 9]]), read_state(target), offset, shift)
    rolled_back = graph.roll_back(verified.layers, mx.array([accepted]), 3)

    expected, actual = (
        graph.verify(mx.array([[5]]), state, offset + accepted, shift).scores
        for state in (expected_state, rolled_back)
    )

    assert mx.allclose(expected, actual, atol=1e-3).item()


def test_a_rollback_repeats_accepted_tokens_to_the_bit(checkpoint: Checkpoint) -> None:
    """As if the operator of the recurrent layers had had one token after another."""
    layer = next(one for one in checkpoint.target.language.model.layers if one.is_linear)
    keys, values = mx.random.normal((2, 5, 2, 32)), mx.random.normal((2, 5, 4, 32))
    gates, before = mx.random.normal((2, 5, 4)), mx.random.normal((2, 4, 32, 32))

    def read(cache: RecurrentCache, tokens: slice) -> None:
        inputs = [array[:, tokens] for array in (keys, keys, values, gates, -gates)]
        attention = layer.linear_attn
        gated_delta_update(*inputs, attention.A_log, attention.dt_bias, cache=cache)

    verified, decoded = RecurrentCache([keys, before]), RecurrentCache([keys, before])
    verified.update_window(0, keys, 0)
    read(verified, slice(0, 5))
    history = verified.history()[1]
    for kept in range(1, 6):
        read(decoded, slice(kept - 1, kept))
        both = state_after(history, mx.array([kept, 6 - kept]), 5)
        assert mx.array_equal(both[0], decoded[1][0])
        assert kept != 3 or mx.array_equal(both[1], decoded[1][1])
    assert sum(array.nbytes for array in history[1:]) < before.nbytes / 2, "no state but the first"


def test_a_compiled_verify_returns_the_scores_of_the_forward_pass(checkpoint: Checkpoint) -> None:
    target = checkpoint.target
    graph = StepGraph(target, head=None)
    offset, shift = mx.array([len(TOKENS)]), mx.array([0])

    actual = graph.verify(mx.array([[7, 8, 9]]), read_state(target), offset, shift).scores
    tokens = [*TOKENS, 7, 8, 9]
    forward = target.forward(mx.array([tokens]), target.new_caches(), positions(0, len(tokens)))

    assert mx.allclose(actual, target.scores(forward, last=3), atol=1e-3).item()


def test_this_family_verifies_in_one_pass(checkpoint: Checkpoint) -> None:
    assert probe_native_verify(checkpoint.target)


def test_a_family_that_cannot_roll_back_is_detected(checkpoint, monkeypatch) -> None:
    """Its recurrent states retain the effect of rejected tokens, without an error."""

    def update_without_history(
        steps: RecurrentCache, index: int, length: int, update: Any
    ) -> tuple[Any, Any]:
        output, final, *between = update(steps[index], length - 1 if length > 1 else None)
        if between:
            steps._history[index] = (mx.repeat(final[:, None], length - 1, axis=1), final)
        steps[index] = final
        return output, final

    monkeypatch.setattr(RecurrentCache, "update_recurrent", update_without_history)

    assert not probe_native_verify(checkpoint.target)


def test_a_family_whose_layers_record_no_history_is_detected(checkpoint, monkeypatch) -> None:
    def window_without_history(
        steps: RecurrentCache, index: int, source: mx.array, width: int, **_: Any
    ) -> Any:
        steps[index] = source[:, source.shape[1] - width :]
        return steps[index]

    monkeypatch.setattr(RecurrentCache, "update_window", window_without_history)

    assert not probe_native_verify(checkpoint.target)


def test_no_call_depends_on_the_positions_that_the_model_stores(checkpoint, make_lane, ask) -> None:
    """A picture sets `language_model._rope_deltas`, which all rows share."""
    lane = make_lane()
    before = ask(lane, TOKENS, max_tokens=12)
    checkpoint.target.language._rope_deltas = mx.array([[-1000]])
    after = ask(lane, TOKENS, max_tokens=12)

    assert before.row.answer == after.row.answer


def test_a_draft_model_of_another_vocabulary_is_incompatible(checkpoint) -> None:
    class ShiftedTokenizer:
        def get_vocab(self) -> dict[str, int]:
            tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
            return {word: number + 1 for word, number in tokenizer.get_vocab().items()}

    assert draft_incompatibility(checkpoint, checkpoint) is None
    assert "vocabulary" in (
        draft_incompatibility(checkpoint, replace(checkpoint, processor=ShiftedTokenizer())) or ""
    )


def test_the_attention_weights_are_those_of_the_model(checkpoint: Checkpoint) -> None:
    """Weights times values, through gate and projection, give the output of the layer."""
    language = checkpoint.target.language
    at, layer = next(
        (at, layer) for at, layer in enumerate(language.model.layers) if at and not layer.is_linear
    )
    caches = checkpoint.target.new_caches()
    assert {type(cache) for cache in caches} == {KVCache, ArraysCache}
    tokens = mx.array([[20 + i % 40 for i in range(64)]])
    checkpoint.target.forward(tokens[:, :60], caches, mx.arange(60)[None])
    positions = mx.broadcast_to(mx.arange(60, 64)[None, None], (3, 1, 4))
    captured = language(
        tokens[:, 60:],
        cache=caches,
        position_ids=positions,
        capture_layer_ids=[at - 1, at],
        return_hidden=True,
        skip_logits=True,
    ).hidden_states

    inputs, outputs = captured[0], captured[1]
    weights = attention_weights(layer, inputs, caches[at], positions)
    attention = layer.self_attn
    values = caches[at].state[1][0].astype(mx.float32)
    values = mx.repeat(values, weights.shape[0] // values.shape[0], axis=0)
    mixed = (weights @ values).transpose(1, 0, 2).reshape(1, 4, -1).astype(inputs.dtype)
    projected = attention.q_proj(layer.input_layernorm(inputs))
    projected = projected.reshape(1, 4, attention.num_attention_heads, -1)
    gate = mx.split(projected, 2, axis=-1)[1].reshape(1, 4, -1)
    state = inputs + attention.o_proj(mixed * mx.sigmoid(gate))
    actual = state + layer.mlp(layer.post_attention_layernorm(state))

    assert mx.allclose(weights.sum(axis=-1), mx.ones(weights.shape[:2]), atol=1e-4)
    assert mx.allclose(actual, outputs, rtol=2e-2, atol=2e-2)
