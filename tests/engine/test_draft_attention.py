"""Whether a model can choose what another reads, and where it looks: the contract with mlx-vlm."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from workers.engine.model import ArraysCache, Checkpoint, KVCache
from workers.engine.prompt_scorer import attention_weights, why_unfit


def test_a_draft_model_of_another_vocabulary_is_told_of_and_left_out(checkpoint) -> None:
    class Shifted:
        def get_vocab(self) -> dict[str, int]:
            tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
            return {word: number + 1 for word, number in tokenizer.get_vocab().items()}

    assert why_unfit(checkpoint, checkpoint) is None
    assert "vocabulary" in (why_unfit(checkpoint, replace(checkpoint, processor=Shifted())) or "")


def test_the_attention_looked_at_is_the_models_own(checkpoint: Checkpoint) -> None:
    """Weights times values, through gate and projection, is what the layer gave (seam contract)."""
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
    ours = state + layer.mlp(layer.post_attention_layernorm(state))

    assert mx.allclose(weights.sum(axis=-1), mx.ones(weights.shape[:2]), atol=1e-4)
    assert mx.allclose(ours, outputs, rtol=2e-2, atol=2e-2)
