"""Forward pass of Qwen3-Next that records the states of its recurrent layers, on mlx-vlm's modules.

mlx-vlm's own pass replaces a recurrent state and keeps no history, so that no rejected draft could
be rolled back. This one goes through the protocol of Qwen3.5 (`kv_cache.py`), whose recurrent
layers are the same but for the order of the outputs of their projections. It also adds the epsilon
of the norm of queries and keys to their sum of squares, as Transformers and mlx-lm do, where
mlx-vlm adds it to the mean. Duck-typed to mlx-vlm's Qwen3-Next; `tests/model/test_families.py`
compares with mlx-lm's.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.gated_delta import gated_delta_update

from workers.engine.model.families.family import Family, score
from workers.engine.model.head_formats import LayerHead
from workers.engine.model.known_heads import MTP_PREFIX

_EPSILON = 1e-6


def _own_pass(language: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    model = language.model
    state = model.embed_tokens(tokens)
    mask = create_attention_mask(state, caches[model.fa_idx])
    for layer, cache in zip(model.layers, caches, strict=True):
        inputs = layer.input_layernorm(state)
        if layer.is_linear:
            state = state + _mix(layer.linear_attn, inputs, cache)
        else:
            state = state + layer.self_attn(inputs, mask, cache)
        state = state + layer.mlp(layer.post_attention_layernorm(state))
    return model.norm(state)


def _mix(layer: Any, inputs: mx.array, cache: Any) -> mx.array:
    """Return the output of a recurrent layer (Gated DeltaNet, arXiv 2412.06464)."""
    rows, length, _ = inputs.shape
    *parts, gate, b, a = layer.fix_query_key_value_ordering(
        layer.in_proj_qkvz(inputs), layer.in_proj_ba(inputs)
    )
    width = layer.conv_kernel_size - 1
    before = cache[0]
    if before is None:
        before = mx.zeros((rows, width, layer.conv_dim), inputs.dtype)
    mixed = mx.concatenate([part.reshape(rows, length, -1) for part in parts], axis=-1)
    source = mx.concatenate([before, mixed], axis=1)
    cache.update_window(0, source, width)
    ends = [layer.key_dim, 2 * layer.key_dim]
    queries, keys, values = (
        part.reshape(rows, length, heads, -1)
        for part, heads in zip(
            mx.split(nn.silu(layer.conv1d(source)), ends, axis=-1),
            (layer.num_k_heads, layer.num_k_heads, layer.num_v_heads),
            strict=True,
        )
    )
    scale, epsilon = layer.head_k_dim**-0.5, _EPSILON / layer.head_k_dim
    queries = scale**2 * mx.fast.rms_norm(queries, None, epsilon)
    keys = scale * mx.fast.rms_norm(keys, None, epsilon)
    output, _ = gated_delta_update(
        queries, keys, values, a, b, layer.A_log, layer.dt_bias, cache=cache
    )
    cache.advance(length)
    return layer.out_proj(layer.norm(output, gate).reshape(rows, length, -1))


_HEAD = LayerHead(
    prefix=MTP_PREFIX,
    # mlx_vlm.speculative.drafters.qwen3_5_mtp.split writes such folders.
    apart={"qwen3_5_mtp": ()},
    parts={name: name for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")},
    options={
        "num_hidden_layers": 1,
        "full_attention_interval": 1,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    norms_less_one=True,
)
FAMILIES = {
    "qwen3_next": Family(
        own_pass=_own_pass, own_prefill=True, score=score, compiles=True, head=_HEAD
    )
}
