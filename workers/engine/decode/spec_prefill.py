"""SpecPrefill (Liu et al. 2025, arXiv 2502.02789): which tokens of a long prompt are read.

A small draft model reads the prompt, a chunk at a time, generates a few tokens of its own, and
looks back: the score of a token is the highest attention that any head of any looking token pays to
it. (The paper averages over the looking tokens, which hid what a single word of a question asks
for.) The target reads the chunks with the highest scores, at their true positions, and never the
others.

Duck-typed to mlx-vlm's Qwen3.5 language model: the draft model runs unchanged and returns the
inputs of its attention layers (`capture_layer_ids`), from which the attention of its queries over
the caches is computed. Nothing is patched, so the same weights can serve rows at the same time.
`tests/model/test_mlx_vlm_contract.py` fails when mlx-vlm changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.kv_cache import KVCache, LayerCache
from workers.engine.model.target import Target
from workers.engine.types import SpecPrefillOptions, SpecPrefillSettings

TokenScores: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"

CHUNK_TOKENS = 16
"""Tokens that are selected or skipped together: about a sentence."""
SMOOTHING_TOKENS = 5
"""Window over which scores are averaged: a word is more than one token."""
SINK_TOKENS = 4
"""Always read: the first tokens of a text attract attention (Xiao et al. 2023, 2309.17453)."""
TAIL_TOKENS = 32
"""Always read: the end of the prompt is the question, and the template's call to answer."""
MIN_SCORED_TOKENS = 256
"""Fewer tokens cost more to score than to read, even for a request that asks for it."""
QUESTION_TOKENS = 24
"""Last tokens of the prompt, which look back too: a question shows what it asks for before any
answer.

The paper uses the look-ahead alone. SnapKV (Li et al. 2024, arXiv 2404.14469) shows that the end of
a prompt attends to what the answer needs, which the answer of a weak draft model may not.
"""
LOOK_AHEAD_TOKENS = 8
"""Greedy tokens of the draft model's own answer that look back."""


class FullPrefillReason(StrEnum):
    """Why a prompt is read in full although the worker could read it sparsely."""

    SWITCHED_OFF = "switched_off"
    NO_DRAFT = "no_draft"
    PICTURES = "pictures"
    TOO_SHORT = "too_short"
    TOO_LONG_FOR_DRAFT = "too_long_for_draft"
    KEEPS_ALL = "keeps_all"
    DRAFT_FAILED = "draft_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRange:
    """Range [begin, end) of the prompt tokens to score, and the share of them to read."""

    begin: int
    end: int
    keep_share: float


def choose_scoring_range(
    settings: SpecPrefillSettings,
    options: SpecPrefillOptions,
    *,
    draft_context_tokens: int,
    prompt_tokens: int,
    cached_tokens: int,
    prefix_tokens: int,
    pictures: bool,
) -> ScoringRange | FullPrefillReason:
    """Return the part of a prompt to score, or the reason to read it in full.

    The prefix cache already holds `cached_tokens`. A shared prefix of `prefix_tokens` that it does
    not hold yet is read in full, since other requests use its cache entry; only a request that asks
    for sparse prefill reads the prefix sparsely too.
    """
    keep_share = settings.keep_share if options.keep_share is None else options.keep_share
    begin = cached_tokens if options.sparse else max(cached_tokens, prefix_tokens)
    tokens = prompt_tokens - begin
    least = max(MIN_SCORED_TOKENS, 0 if options.sparse else settings.threshold_tokens)
    reasons = (
        (options.sparse is False, FullPrefillReason.SWITCHED_OFF),
        (pictures, FullPrefillReason.PICTURES),
        (tokens < least, FullPrefillReason.TOO_SHORT),
        (tokens > draft_context_tokens, FullPrefillReason.TOO_LONG_FOR_DRAFT),
        (keep_share >= 1, FullPrefillReason.KEEPS_ALL),
    )
    scope = ScoringRange(begin=begin, end=prompt_tokens, keep_share=keep_share)
    return next((reason for applies, reason in reasons if applies), scope)


def select(scores: TokenScores, keep_share: float) -> tuple[int, ...]:
    """Return the sorted indices of the tokens to read: the chunks with the highest scores.

    They are about `keep_share` of all tokens, and at least the beginning and end of the prompt. The
    score of a chunk is that of its best token: an average would hide one fact among plain words.
    """
    count = len(scores)
    selected = np.zeros(count, dtype=bool)
    selected[:SINK_TOKENS] = True
    selected[-TAIL_TOKENS:] = True
    window = np.ones(SMOOTHING_TOKENS, dtype=np.float32)  # it ends at the ends of the prompt
    smooth = np.convolve(scores, window, mode="same")
    smooth /= np.convolve(np.ones_like(scores), window, mode="same")
    starts = range(0, count, CHUNK_TOKENS)
    best = [float(smooth[start : start + CHUNK_TOKENS].max()) for start in starts]
    budget = round(count * keep_share)
    for chunk in sorted(range(len(best)), key=lambda chunk: -best[chunk]):
        if selected.sum() >= budget:
            break
        selected[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS] = True
    return tuple(np.flatnonzero(selected).tolist())


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
    """Scoring of one prompt by a draft model, a chunk at a time; used by the engine thread only."""

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
        selected, begin = select(self._look_back(), self.scope.keep_share), self.scope.begin
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
    projected = attention.q_proj(layer.input_layernorm(inputs))
    projected = projected.reshape(*projected.shape[:2], attention.num_attention_heads, -1)
    queries, _ = mx.split(projected, 2, axis=-1)  # each head's projection includes its gate
    queries = attention.q_norm(queries).transpose(0, 2, 1, 3)
    rotated, _ = attention.rotary_emb.apply_rotary(queries, queries, positions, unsqueeze_dim=1)
    heads, length, width = rotated[0].shape
    grouped = rotated[0].astype(mx.float32).reshape(keys.shape[0], -1, length, width)
    scores = attention.scale * (grouped @ keys[:, None].swapaxes(-1, -2))
    slots = keys.shape[1]
    visible = mx.arange(slots)[None] <= mx.arange(slots - length, slots)[:, None]
    scores = mx.where(visible, scores, -mx.inf)
    return mx.softmax(scores, axis=-1).reshape(heads, length, slots)
