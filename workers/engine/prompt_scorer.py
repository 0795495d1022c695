"""A draft model that says which tokens of a prompt matter, in pieces as short as a prefill chunk.

It reads the prompt, goes on with a few tokens of its own, and looks back: a token matters as much
as any head of any token that looks attends to it. (The paper, arXiv 2502.02789, averages over the
tokens that look, which buried what one word of a question asks for.) All of it belongs to the
engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from workers.engine.draft_attention import read_and_look
from workers.engine.model import Checkpoint, Forward, Target
from workers.engine.spec_prefill import Scope, Scores, select

QUESTION_TOKENS = 24
"""The last tokens of the prompt look back too: a question knows what it asks for before any answer.

The paper has the look-ahead alone; SnapKV (Li et al. 2024, arXiv 2404.14469) shows that the end of
a prompt sees what the answer will need, which a weak draft's own answer may not.
"""
LOOK_AHEAD_TOKENS = 8
"""Greedy tokens of the draft's own answer that look back."""


def why_unfit(target: Checkpoint, draft: Checkpoint) -> str | None:
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
        question = len(self._tokens) - QUESTION_TOKENS
        if self._done < question:
            self._read(self._done, min(self._done + chunk_tokens, question))
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
        """Let the question, and what the draft begins to answer, look back over the scope."""
        count = len(self._tokens)
        begin = count - QUESTION_TOKENS
        tokens = mx.array([self._tokens[begin:]], dtype=mx.int32)
        looks = []
        while begin < count + LOOK_AHEAD_TOKENS:
            end = begin + tokens.shape[1]
            hidden, look = read_and_look(
                self._draft, tokens, self._caches, mx.arange(begin, end, dtype=mx.int32)[None]
            )
            looks.append(look[:, :count])
            scores = self._draft.scores(Forward(hidden=hidden, scores=None))
            tokens = mx.argmax(scores[:, -1], axis=-1, keepdims=True).astype(mx.int32)
            begin = end
        return np.array(mx.concatenate(looks).max(axis=0), dtype=np.float32)
