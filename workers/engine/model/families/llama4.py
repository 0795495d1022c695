"""Forward pass of Llama 4 for rows of different lengths, on mlx-vlm's modules.

mlx-vlm's own pass reads one cursor on the host: all rows of a batch would get the mask of the
longest, and the attention temperature of its position (Llama 4 scales the queries of its layers
without rotary positions by the length of the context). This one takes both from each row's cursor.
Duck-typed to mlx-vlm's Llama 4; `tests/model/test_windows.py` compares both.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from workers.engine.model.families.family import Family
from workers.engine.model.kv_cache import RowCache


def _own_pass(language: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    model = language.model
    state = model.embed_tokens(tokens)
    length = state.shape[1]
    masks: dict[type, mx.array] = {}
    for layer, cache in zip(model.layers, caches, strict=True):
        mask = masks.get(type(cache))
        if mask is None:
            mask = masks[type(cache)] = cache.make_mask(length)
        if layer.self_attn.use_rope or not layer.self_attn.attn_temperature_tuning:
            state = layer(state, mask, cache)
            continue
        state = state + _attend(layer.self_attn, layer.input_layernorm(state), mask, cache)
        state = state + layer.feed_forward(layer.post_attention_layernorm(state))
    return language.lm_head(model.norm(state))


def _attend(attention: Any, inputs: mx.array, mask: mx.array, cache: RowCache) -> mx.array:
    """Return the output of a layer without rotary positions, whose queries have a temperature."""
    rows, length, _ = inputs.shape

    def heads(projected: mx.array, count: int) -> mx.array:
        return projected.reshape(rows, length, count, -1).transpose(0, 2, 1, 3)

    queries = heads(attention.q_proj(inputs), attention.n_heads)
    positions = cache.offset[:, None] + mx.arange(1, length + 1)
    laps = mx.floor(positions / attention.floor_scale)
    temperature = mx.log(laps + 1.0) * attention.attn_scale + 1.0
    queries = (queries * temperature[:, None, :, None]).astype(queries.dtype)
    keys, values = cache.update_and_fetch(
        heads(attention.k_proj(inputs), attention.n_kv_heads),
        heads(attention.v_proj(inputs), attention.n_kv_heads),
    )
    output = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=attention.scale, mask=mask
    )
    return attention.o_proj(output.transpose(0, 2, 1, 3).reshape(rows, length, -1))


FAMILIES = {"llama4": Family(own_pass=_own_pass)}
