"""Prefill budget: the size of prompt chunks, bounded by time while other rows decode.

Rows do not decode while a chunk is read. The bound is in seconds, since the cost of 512 tokens
differs a hundredfold between a small model and a large one. Pure: the caller passes durations, no
clock is read.
"""

from __future__ import annotations

from collections import deque
from math import inf

BLOCK_TOKENS = 64
"""Chunks are whole blocks: recurrent layers scan in blocks, and a part of a block costs as much as
a whole one. Reading the weights, too, costs the same for 64 tokens as for 16."""
SAMPLES = 3
"""Chunks whose costs are stored; the highest counts, since the context grows with each chunk."""
TARGET_SHARE = 0.75
"""Share of the budget to aim for: the next chunk may cost a third more than the last ones."""


class PrefillBudget:
    """Chunk sizes of one lane."""

    def __init__(self, max_chunk_tokens: int, budget_s: float) -> None:
        self._max_chunk_tokens = max_chunk_tokens
        self._budget_s = budget_s
        self._block_costs_s: deque[float] = deque(maxlen=SAMPLES)
        self._best_block_s = inf

    def chunk_tokens(self, *, others_decode: bool) -> int:
        """Return the size of the next chunk; one block beside other rows if no cost is known."""
        if not others_decode:
            return self._max_chunk_tokens
        blocks = 1
        if self._block_costs_s:
            blocks = max(1, int(TARGET_SHARE * self._budget_s / max(self._block_costs_s)))
        return min(blocks * BLOCK_TOKENS, self._max_chunk_tokens)

    def observe(self, tokens: int, duration_s: float) -> None:
        """Record the duration of a chunk."""
        block_s = duration_s / _blocks(tokens)
        self._block_costs_s.append(block_s)
        self._best_block_s = min(self._best_block_s, block_s)

    def best_case_s(self, tokens: int) -> float:
        """Return how long `tokens` tokens take at the best speed so far; 0 if none is known."""
        return self._best_block_s * _blocks(tokens) if self._block_costs_s else 0.0


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
