"""Draft model that scores how much each token of a prompt matters, one prefill chunk at a time.

It reads the prompt, generates a few tokens of its own, and looks back: the score of a token is the
highest attention that any head of any looking token pays to it. (The paper, arXiv 2502.02789,
averages over the looking tokens, which hid what a single word of a question asks for.) Used by the
engine thread only.

Duck-typed to mlx-vlm's Qwen3.5 language model: the model runs unchanged and returns the inputs of
its attention layers (`capture_layer_ids`), from which the attention of its queries over the caches
is computed. Nothing is patched, so the same weights can serve rows at the same time.
`tests/model/test_mlx_vlm_contract.py` fails when mlx-vlm changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from workers.engine.decode.spec_prefill import ScoringRange, TokenScores, select
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.kv_cache import KVCache, LayerCache
from workers.engine.model.target import Target

QUESTION_TOKENS = 24
"""Last tokens of the prompt, which look back too: a question shows what it asks for before any
answer.

The paper uses the look-ahead alone. SnapKV (Li et al. 2024, arXiv 2404.14469) shows that the end of
a prompt attends to what the answer needs, which the answer of a weak draft model may not.
"""
LOOK_AHEAD_TOKENS = 8
"""Greedy tokens of the draft model's own answer that look back."""


def draft_incompatibility(target: Checkpoint, draft: Checkpoint) -> str | None:
    """Return why a draft model cannot select tokens for the target; None if it can."""
    if not target.target.explicit_positions:
        return "this model family takes no explicit positions"
    if not draft.target.explicit_positions:
        return "the draft model's family does not expose its attention"
    if not _vocabulary(target).items() <= _vocabulary(draft).items():
        return "the draft model has another vocabulary"
    return None


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    processor = checkpoint.processor
    return dict(getattr(processor, "tokenizer", processor).get_vocab())


class PromptScoring:
    """Scoring of one prompt."""

    def __init__(self, draft: Target, prompt: Sequence[int], scope: ScoringRange) -> None:
        self.scope = scope
        self.selected: tuple[int, ...] | None = None
        """Indices of the tokens to read once all are scored, including all before the scope."""
        self._draft = draft
        self._tokens = prompt[scope.begin : scope.end]
        self._caches = draft.new_caches()
        self._read_count = 0

    def advance(self, chunk_tokens: int) -> None:
        """Read up to `chunk_tokens` more tokens of the scope, or look back from its end."""
        question = len(self._tokens) - QUESTION_TOKENS
        if self._read_count < question:
            begin, end = self._read_count, min(self._read_count + chunk_tokens, question)
            self._draft.forward(
                mx.array([self._tokens[begin:end]], dtype=mx.int32),
                self._caches,
                mx.arange(begin, end, dtype=mx.int32)[None],
            )
            mx.eval([cache.state for cache in self._caches])
            self._read_count = end
            return
        selected = select(self._look_back(), self.scope.keep_share)
        begin = self.scope.begin
        self.selected = (*range(begin), *(begin + at for at in selected))

    def _look_back(self) -> TokenScores:
        """Score the scope by the attention of its last tokens and of the draft's own answer."""
        count = len(self._tokens)
        begin = count - QUESTION_TOKENS
        tokens = mx.array([self._tokens[begin:]], dtype=mx.int32)
        attention = []
        while begin < count + LOOK_AHEAD_TOKENS:
            end = begin + tokens.shape[1]
            hidden, weights = forward_with_attention(
                self._draft, tokens, self._caches, mx.arange(begin, end, dtype=mx.int32)[None]
            )
            attention.append(weights[:, :count])
            scores = self._draft.scores(hidden)
            tokens = mx.argmax(scores[:, -1], axis=-1, keepdims=True).astype(mx.int32)
            begin = end
        return np.array(mx.concatenate(attention).max(axis=0), dtype=np.float32)


def forward_with_attention(
    model: Target, tokens: mx.array, caches: Sequence[LayerCache], positions: mx.array
) -> tuple[mx.array, mx.array]:
    """Append tokens [1, L] to the caches; return the last hidden state and the attention.

    The hidden state is [1, 1, width]. The attention [L, slots] of a token to a slot is its maximum
    over the heads of all full-attention layers but the first layer.
    """
    layers = model.language.model.layers
    captured = [at for at, layer in enumerate(layers) if at and not layer.is_linear]
    positions = mx.broadcast_to(positions[None], (3, *positions.shape))
    output = model.language(
        tokens,
        cache=list(caches),
        position_ids=positions,
        capture_layer_ids=[at - 1 for at in captured],
        return_hidden=True,
        skip_logits=True,
    )
    *inputs, final = output.hidden_states
    weights = [
        attention_weights(layers[at], hidden, caches[at], positions).max(axis=0)
        for at, hidden in zip(captured, inputs, strict=True)
    ]
    return final[:, -1:], mx.stack(weights).max(axis=0)


def attention_weights(
    layer: Any, inputs: mx.array, cache: LayerCache, positions: mx.array
) -> mx.array:
    """Return the softmax [heads, L, slots] of a layer's queries over its cache.

    The inputs [1, L, width] are the layer's own; their keys are the last ones in the cache.
    """
    assert isinstance(cache, KVCache)
    attention = layer.self_attn
    keys = cache.state[0][0].astype(mx.float32)
    queries = _queries(attention, layer.input_layernorm(inputs), positions)
    heads, length, width = queries.shape
    grouped = queries.astype(mx.float32).reshape(keys.shape[0], -1, length, width)
    scores = attention.scale * (grouped @ keys[:, None].swapaxes(-1, -2))
    slots = keys.shape[1]
    visible = mx.arange(slots)[None] <= mx.arange(slots - length, slots)[:, None]
    scores = mx.where(visible, scores, -mx.inf)
    return mx.softmax(scores, axis=-1).reshape(heads, length, slots)


def _queries(attention: Any, inputs: mx.array, positions: mx.array) -> mx.array:
    """Return the rotated queries [heads, L, width]; each head's projection includes its gate."""
    projected = attention.q_proj(inputs)
    projected = projected.reshape(*projected.shape[:2], attention.num_attention_heads, -1)
    queries, _ = mx.split(projected, 2, axis=-1)
    queries = attention.q_norm(queries).transpose(0, 2, 1, 3)
    rotated, _ = attention.rotary_emb.apply_rotary(queries, queries, positions, unsqueeze_dim=1)
    return rotated[0]
