"""A draft model that says which tokens of a prompt matter, in pieces as short as a prefill chunk.

It reads the prompt, goes on with a few tokens of its own, and looks back: a token matters as much
as any head of any token that looks attends to it. (The paper, arXiv 2502.02789, averages over the
tokens that look, which buried what one word of a question asks for.) All of it belongs to the
engine thread.

Where a model looks: the attention of some tokens over everything it has read.

Duck-typed to mlx-vlm's Qwen3.5 language model, beside `seam.py` and in its manner: the model runs
as it is, gives the inputs of its attention layers (`capture_layer_ids`), and what its queries would
have seen in the caches is worked out from them. Nothing is patched, so the same weights may serve
rows at the same time. `tests/model/test_mlx_vlm_contract.py` fails when mlx-vlm moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from workers.engine.model import Checkpoint, Forward, KVCache, LayerCache, Target
from workers.engine.spec_prefill import ScoringRange, TokenScores, select


def forward_with_attention(
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


QUESTION_TOKENS = 24
"""The last tokens of the prompt look back too: a question knows what it asks for before any answer.

The paper has the look-ahead alone; SnapKV (Li et al. 2024, arXiv 2404.14469) shows that the end of
a prompt sees what the answer will need, which a weak draft's own answer may not.
"""
LOOK_AHEAD_TOKENS = 8
"""Greedy tokens of the draft's own answer that look back."""


def draft_incompatibility(target: Checkpoint, draft: Checkpoint) -> str | None:
    """Say why one model cannot choose what the other reads; None if it can."""
    if not target.target.explicit_positions:
        return "this model family takes no explicit positions"
    if not draft.target.explicit_positions:
        return "the attention of the draft model's family cannot be looked at"
    if not _vocabulary(target).items() <= _vocabulary(draft).items():
        return "the draft model has another vocabulary"
    return None


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    processor = checkpoint.processor
    return dict(getattr(processor, "tokenizer", processor).get_vocab())


class PromptScorer:
    """TokenScores prompts by one draft model."""

    def __init__(self, draft: Target, context_tokens: int) -> None:
        self._draft = draft
        self.context_tokens = context_tokens - LOOK_AHEAD_TOKENS

    def begin(self, prompt: Sequence[int], scope: ScoringRange) -> PromptScoring:
        """Open the caches for the part of a prompt that is to be scored."""
        return PromptScoring(self._draft, prompt, scope)


class PromptScoring:
    """One prompt being scored."""

    def __init__(self, draft: Target, prompt: Sequence[int], scope: ScoringRange) -> None:
        self.scope = scope
        self.read_indices: tuple[int, ...] | None = None
        """Which tokens of the prompt to read, once that is known: all before the scope, too."""
        self._draft = draft
        self._tokens = prompt[scope.begin : scope.end]
        self._caches = draft.new_caches()
        self._done = 0

    def advance(self, chunk_tokens: int) -> None:
        """Read the next `chunk_tokens` of the scope at most, or look back from its end."""
        question = len(self._tokens) - QUESTION_TOKENS
        if self._done < question:
            self._read(self._done, min(self._done + chunk_tokens, question))
            return
        kept = select(self._look_back(), self.scope.keep_share)
        begin = self.scope.begin
        self.read_indices = (*range(begin), *(begin + at for at in kept))

    def _read(self, begin: int, end: int) -> None:
        self._draft.forward(
            mx.array([self._tokens[begin:end]], dtype=mx.int32),
            self._caches,
            mx.arange(begin, end, dtype=mx.int32)[None],
        )
        mx.eval([cache.state for cache in self._caches])
        self._done = end

    def _look_back(self) -> TokenScores:
        """Let the question, and what the draft begins to answer, look back over the scope."""
        count = len(self._tokens)
        begin = count - QUESTION_TOKENS
        tokens = mx.array([self._tokens[begin:]], dtype=mx.int32)
        looks = []
        while begin < count + LOOK_AHEAD_TOKENS:
            end = begin + tokens.shape[1]
            hidden, look = forward_with_attention(
                self._draft, tokens, self._caches, mx.arange(begin, end, dtype=mx.int32)[None]
            )
            looks.append(look[:, :count])
            scores = self._draft.scores(Forward(hidden=hidden, scores=None))
            tokens = mx.argmax(scores[:, -1], axis=-1, keepdims=True).astype(mx.int32)
            begin = end
        return np.array(mx.concatenate(looks).max(axis=0), dtype=np.float32)
