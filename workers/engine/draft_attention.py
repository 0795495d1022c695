"""Where a model looks: the attention of some tokens over everything it has read.

Duck-typed to mlx-vlm's Qwen3.5 language model, beside `seam.py` and in its manner: the model runs
as it is, gives the inputs of its attention layers (`capture_layer_ids`), and what its queries would
have seen in the caches is worked out from them. Nothing is patched, so the same weights may serve
rows at the same time. `tests/engine/test_draft_attention.py` fails when mlx-vlm moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from workers.engine.model import KVCache, LayerCache, Target


def read_and_look(
    model: Target, tokens: mx.array, caches: Sequence[LayerCache], positions: mx.array
) -> tuple[mx.array, mx.array]:
    """Append tokens [1, L] to the caches; return the last hidden state [1, 1, width] and looks.

    The looks [L, slots] say how much each token attends to each slot: the share that the head gives
    it that looks there most, over the heads of all full-attention layers behind the first.
    """
    layers = model.language.model.layers
    looking = [at for at, layer in enumerate(layers) if at and not layer.is_linear]
    positions = mx.broadcast_to(positions[None], (3, *positions.shape))
    output = model.language(
        tokens,
        cache=list(caches),
        position_ids=positions,
        capture_layer_ids=[at - 1 for at in looking],
        return_hidden=True,
        skip_logits=True,
    )
    *inputs, final = output.hidden_states
    looks = [
        attention_weights(layers[at], hidden, caches[at], positions).max(axis=0)
        for at, hidden in zip(looking, inputs, strict=True)
    ]
    return final[:, -1:], mx.stack(looks).max(axis=0)


def attention_weights(
    layer: Any, inputs: mx.array, cache: LayerCache, positions: mx.array
) -> mx.array:
    """Return the softmax [heads, L, slots] that a layer's queries had over its cache.

    The inputs [1, L, width] are the layer's own, and their keys are the last ones in the cache.
    """
    assert isinstance(cache, KVCache)
    attention = layer.self_attn
    keys = cache.state[0][0].astype(mx.float32)
    queries = _queries(attention, layer.input_layernorm(inputs), positions)
    heads, length, width = queries.shape
    grouped = queries.astype(mx.float32).reshape(keys.shape[0], -1, length, width)
    scores = attention.scale * (grouped @ keys[:, None].swapaxes(-1, -2))
    slots = keys.shape[1]
    seen = mx.arange(slots)[None] <= mx.arange(slots - length, slots)[:, None]
    scores = mx.where(seen, scores, -mx.inf)
    return mx.softmax(scores, axis=-1).reshape(heads, length, slots)


def _queries(attention: Any, inputs: mx.array, positions: mx.array) -> mx.array:
    """Return the rotated queries [heads, L, width]; each head's projection holds its gate too."""
    projected = attention.q_proj(inputs)
    projected = projected.reshape(*projected.shape[:2], attention.num_attention_heads, -1)
    queries, _ = mx.split(projected, 2, axis=-1)
    queries = attention.q_norm(queries).transpose(0, 2, 1, 3)
    rotated, _ = attention.rotary_emb.apply_rotary(queries, queries, positions, unsqueeze_dim=1)
    return rotated[0]
