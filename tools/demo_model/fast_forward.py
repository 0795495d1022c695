"""The model's forward pass for training: the library's modules, a differentiable fast path.

The kernels of mlx-vlm work token by token and have no gradient. This path computes the same
function with the chunked form of the gated delta rule (Yang, Kautz, Hatamizadeh: "Gated Delta
Networks", 2024; Yang et al.: "Parallelizing Linear Transformers with the Delta Rule", 2024).
"""

from typing import Any, Final

import mlx.core as mx
from mlx import nn

from tools.demo_model.fast_math import gelu, masked_softmax, sigmoid, silu

CHUNK: Final = 16
"""Tokens in a chunk of the delta rule; sequences must be a multiple of it."""
QUERIES_AT_ONCE: Final = 512
"""Scores of a long row are computed in blocks that a processor's cache can hold."""


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array
) -> mx.array:
    """Return the gated delta rule from an empty state.

    q, k: [B, T, H, Dk]; v: [B, T, H, Dv]; log_decay, beta: [B, T, H]. Returns [B, T, H, Dv].
    Within a chunk the triangular system is inverted exactly (its strict lower part to the 16th
    power is 0); between chunks only the state S [B, H, Dk, Dv] is carried on.
    """
    batch, length, heads, key_size = q.shape
    value_size, chunks = v.shape[-1], length // CHUNK

    def split(x: mx.array) -> mx.array:
        return x.reshape(batch, chunks, CHUNK, heads, -1).transpose(1, 0, 3, 2, 4)

    q, k, v, beta = split(q), split(k), split(v), split(beta[..., None])
    log_sum = mx.cumsum(split(log_decay[..., None])[..., 0], -1)
    decay = mx.exp(log_sum)[..., None]
    lower, strict = mx.tril(mx.ones((CHUNK, CHUNK))), mx.tril(mx.ones((CHUNK, CHUNK)), -1)
    between = log_sum[..., :, None] - log_sum[..., None, :]
    ratio = mx.exp(mx.where(lower > 0, between, -1e30))

    step = -(beta * ratio * (k @ mx.swapaxes(k, -1, -2)) * strict)
    inverse, power = mx.eye(CHUNK) + step, step
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    solved = inverse @ mx.concatenate([beta * v, beta * decay * k], -1)
    new_values, state_keys = solved[..., :value_size], solved[..., value_size:]
    scores = ratio * (q @ mx.swapaxes(k, -1, -2))
    mixed = scores @ solved
    own, state_queries = mixed[..., :value_size], decay * q - mixed[..., value_size:]
    to_end = mx.exp(log_sum[..., -1:] - log_sum)[..., None]
    writes, fading = mx.swapaxes(to_end * k, -1, -2), decay[..., -1:, :]

    state = mx.zeros((batch, heads, key_size, value_size))
    reading = mx.concatenate([state_keys, state_queries], -2)
    every = (mx.split(part, chunks) for part in (reading, fading, writes, new_values))
    outputs = []
    for queries, fade, write, new in zip(*every, strict=True):
        read, query = mx.split(queries[0] @ state, 2, -2)
        outputs.append(query)
        state = fade[0] * state + write[0] @ (new[0] - read)
    stacked = (mx.stack(outputs) + own).transpose(1, 0, 3, 2, 4)
    return stacked.reshape(batch, length, heads, value_size)


def _deltanet(mixer: Any, x: mx.array) -> mx.array:
    batch, length, _ = x.shape
    z = mixer.in_proj_z(x).reshape(batch, length, -1, mixer.head_v_dim)
    b, a = mixer._project_gates(x)  # noqa: SLF001 (the library's own split of the gates)
    width = mixer.conv_kernel_size
    padded = mx.pad(mixer.in_proj_qkv(x), [(0, 0), (width - 1, 0), (0, 0)])
    taps = mixer.conv1d.weight[..., 0]
    mixed = padded[:, :length] * taps[:, 0]
    for tap in range(1, width):
        mixed = mixed + padded[:, tap : tap + length] * taps[:, tap]
    q, k, v = mx.split(silu(mixed), [mixer.key_dim, 2 * mixer.key_dim], -1)
    keys = (batch, length, mixer.num_k_heads, mixer.head_k_dim)
    q, k = mixer._normalize_qk(q.reshape(keys), k.reshape(keys))  # noqa: SLF001 (same norm)
    share = mixer.num_v_heads // mixer.num_k_heads
    q, k = mx.repeat(q, share, -2), mx.repeat(k, share, -2)
    v = v.reshape(batch, length, mixer.num_v_heads, mixer.head_v_dim)
    log_decay = -mx.exp(mixer.A_log) * nn.softplus(a + mixer.dt_bias)
    out = gated_delta(q, k, v, log_decay, mx.sigmoid(b))
    out = mx.fast.rms_norm(out, mixer.norm.weight, mixer.norm.eps) * silu(z)
    return mixer.out_proj(out.reshape(batch, length, -1))


Projected = tuple[mx.array, mx.array, mx.array, mx.array]


def project(attention: Any, x: mx.array, positions: mx.array) -> Projected:
    """Rotated queries and keys, values, and the output gate of an attention layer."""
    projected = attention._prepare_projected_qkv(  # noqa: SLF001 (same norms, same rotation)
        attention.q_proj(x), attention.k_proj(x), attention.v_proj(x), None, positions, None, None
    )
    q, k, v, gate = projected[:4]
    return q, k, v, gate


def attend(attention: Any, projected: Projected, mask: mx.array) -> mx.array:
    """Return grouped attention; `mask` [T, keys] is 1 where a query sees a key.

    q and k are RMS-normed, so what the mask hides is not far above the rest.
    With as many keys as queries the mask is causal, and keys after a block of queries are left out.
    """
    q, k, v, gate = projected
    batch, heads, length, size = q.shape
    groups = k.shape[1]
    q = (q * attention.scale).reshape(batch, groups, heads // groups, length, size)
    keys, values = mx.swapaxes(k, -1, -2)[:, :, None], v[:, :, None]
    blocks = []
    for start in range(0, length, QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, length)
        seen = end if mask.shape[1] == length else mask.shape[1]
        scores = q[..., start:end, :] @ keys[..., :seen]
        shares = masked_softmax(scores, mask[start:end, :seen])
        blocks.append(shares @ values[..., :seen, :])
    out = mx.concatenate(blocks, -2).reshape(batch, heads, length, size)
    return gated_output(attention, out.transpose(0, 2, 1, 3).reshape(batch, length, -1), gate)


def gated_output(attention: Any, mixed: mx.array, gate: mx.array) -> mx.array:
    """Return the end of an attention layer: gate and output projection."""
    return attention.o_proj(mixed * sigmoid(gate))


def feed_forward(mlp: Any, x: mx.array) -> mx.array:
    """Return the SwiGLU block."""
    return mlp.down_proj(silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def text_forward(language: Any, embeddings: mx.array, positions: mx.array) -> mx.array:
    """Hidden states [B, T, D] after the final norm; positions [3, B, T]; T a multiple of CHUNK."""
    length = embeddings.shape[1]
    mask = mx.tril(mx.ones((length, length)))
    hidden = embeddings
    for layer in language.layers:
        x = layer.input_layernorm(hidden)
        if layer.is_linear:
            hidden = hidden + _deltanet(layer.linear_attn, x)
        else:
            projected = project(layer.self_attn, x, positions)
            hidden = hidden + attend(layer.self_attn, projected, mask)
        hidden = hidden + feed_forward(layer.mlp, layer.post_attention_layernorm(hidden))
    return language.norm(hidden)


def vision_forward(tower: Any, patches: mx.array, grid: tuple[int, int]) -> mx.array:
    """Features of pictures that share one grid: patches [B, P, 768] -> [B, P / 4, D].

    A picture is a film of two frames that are the same, so one is multiplied by the sum of the
    kernels of both.
    """
    batch, count, _ = patches.shape
    thw = mx.array([[1, *grid]])
    kernel = tower.patch_embed.proj.weight.sum(1).transpose(0, 3, 1, 2)
    hidden = patches @ kernel.reshape(kernel.shape[0], -1).T + tower.patch_embed.proj.bias
    hidden = hidden + tower.fast_pos_embed_interpolate(thw)[None]
    angles = tower.rot_pos_emb(thw)
    cosine, sine = (mx.tile(f(angles), (1, 2))[None, None] for f in (mx.cos, mx.sin))

    def rotate(x: mx.array) -> mx.array:
        half = x.shape[-1] // 2
        return x * cosine + mx.concatenate([-x[..., half:], x[..., :half]], -1) * sine

    everything = mx.ones((count, count))
    for block in tower.blocks:
        attention, mlp = block.attn, block.mlp
        qkv = attention.qkv(block.norm1(hidden))
        q, k, v = qkv.reshape(batch, count, 3, attention.num_heads, -1).transpose(2, 0, 3, 1, 4)
        scores = (rotate(q) * attention.scale) @ mx.swapaxes(rotate(k), -1, -2)
        out = (
            (masked_softmax(scores, everything) @ v).transpose(0, 2, 1, 3).reshape(batch, count, -1)
        )
        hidden = hidden + attention.proj(out)
        hidden = hidden + mlp.linear_fc2(gelu(mlp.linear_fc1(block.norm2(hidden))))
    return tower.merger(hidden.reshape(batch * count, -1)).reshape(batch, count // 4, -1)
