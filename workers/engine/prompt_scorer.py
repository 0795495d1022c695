"""A draft model that says which tokens of a prompt matter, in pieces as short as a prefill chunk.

It reads the prompt, goes on with a few tokens of its own, and looks back: a token matters as much
as the head that attends to it most, averaged over the tokens that looked (arXiv 2502.02789, 3.2).
All of it belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from workers.engine.draft_attention import read_and_look
from workers.engine.seam import Forward, Target
from workers.engine.spec_prefill import Scope, Scores, select

LOOK_AHEAD_TOKENS = 8
"""Tokens of the draft's own answer that look back, after the last one of the prompt has."""


class PromptScorer:
    """Scores prompts by one draft model."""

    def __init__(self, draft: Target, context_tokens: int) -> None:
        self._draft = draft
        self.context_tokens = context_tokens - LOOK_AHEAD_TOKENS

    def begin(self, prompt: Sequence[int], scope: Scope) -> Scoring:
        """Open the caches for the part of a prompt that is to be scored."""
        return Scoring(self._draft, prompt, scope)


class Scoring:
    """One prompt being scored."""

    def __init__(self, draft: Target, prompt: Sequence[int], scope: Scope) -> None:
        self.scope = scope
        self.reads: tuple[int, ...] | None = None
        """Which tokens of the prompt to read, once that is known: all before the scope, too."""
        self._draft = draft
        self._tokens = prompt[scope.begin : scope.end]
        self._caches = draft.new_caches()
        self._done = 0

    def advance(self, chunk_tokens: int) -> None:
        """Read the next `chunk_tokens` of the scope at most, or look back from its end."""
        last = len(self._tokens) - 1
        if self._done < last:
            self._read(self._done, min(self._done + chunk_tokens, last))
            return
        kept = select(self._look_back(), self.scope.keep_share)
        begin = self.scope.begin
        self.reads = (*range(begin), *(begin + at for at in kept))

    def _read(self, begin: int, end: int) -> None:
        self._draft.forward(
            mx.array([self._tokens[begin:end]], dtype=mx.int32),
            self._caches,
            mx.arange(begin, end, dtype=mx.int32)[None],
        )
        mx.eval([cache.state for cache in self._caches])
        self._done = end

    def _look_back(self) -> Scores:
        """Let the last token, and some greedy ones behind it, look back over all before them."""
        count = len(self._tokens)
        token = mx.array([[self._tokens[-1]]], dtype=mx.int32)
        looks = []
        for position in range(count - 1, count + LOOK_AHEAD_TOKENS):
            hidden, weights = read_and_look(
                self._draft, token, self._caches, mx.array([[position]], dtype=mx.int32)
            )
            looks.append(mx.concatenate([layer[:, 0, :count] for layer in weights]).max(axis=0))
            scores = self._draft.scores(Forward(hidden=hidden, scores=None))
            token = mx.argmax(scores[:, -1], axis=-1, keepdims=True).astype(mx.int32)
        return np.array(mx.stack(looks).mean(axis=0), dtype=np.float32)
