"""A draft model that says which tokens of a prompt matter, in pieces as short as a prefill chunk.

It reads the prompt, goes on with a few tokens of its own, and looks back: a token matters as much
as the head that attends to it most, averaged over the tokens that looked (arXiv 2502.02789, 3.2).
All of it belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from workers.engine.draft_attention import read_and_look
from workers.engine.seam import Target
from workers.engine.spec_prefill import Scores

LOOK_AHEAD_TOKENS = 8
"""Tokens of the draft's own answer that look back, after the last one of the prompt has."""


class PromptScorer:
    """Scores prompts by one draft model."""

    def __init__(self, draft: Target, context_tokens: int) -> None:
        self.draft = draft
        self.context_tokens = context_tokens - LOOK_AHEAD_TOKENS

    def begin(self, tokens: Sequence[int]) -> Scoring:
        """Open the caches for a prompt of at least two tokens."""
        return Scoring(self.draft, tokens)


class Scoring:
    """One prompt being scored."""

    def __init__(self, draft: Target, tokens: Sequence[int]) -> None:
        self._draft = draft
        self._tokens = tokens
        self._caches = draft.new_caches()
        self.done = 0
        """Tokens the draft has read."""
        self.importance: Scores | None = None
        """How much each token matters, once all have been read."""

    def advance(self, chunk_tokens: int) -> None:
        """Read the next `chunk_tokens` of the prompt at most, or look ahead from its end."""
        last = len(self._tokens) - 1
        if self.done == last:
            self.importance = self._look_ahead()
            return
        end = min(self.done + chunk_tokens, last)
        self._draft.forward(
            mx.array([self._tokens[self.done : end]], dtype=mx.int32),
            self._caches,
            mx.arange(self.done, end, dtype=mx.int32)[None],
        )
        mx.eval([cache.state for cache in self._caches])
        self.done = end

    def _look_ahead(self) -> Scores:
        """Let the last token and some greedy ones behind it look back over the prompt."""
        count = len(self._tokens)
        token = mx.array([[self._tokens[-1]]], dtype=mx.int32)
        looks = []
        for position in range(count - 1, count + LOOK_AHEAD_TOKENS):
            hidden, weights = read_and_look(
                self._draft, token, self._caches, mx.array([[position]], dtype=mx.int32)
            )
            looks.append(mx.concatenate([layer[:, 0, :count] for layer in weights]).max(axis=0))
            scores = self._draft.language.speculative_logits_from_hidden(hidden)
            token = mx.argmax(scores[:, -1:], axis=-1).astype(mx.int32)
        return np.array(mx.stack(looks).mean(axis=0), dtype=np.float32)
