"""How much of a prompt to read at a time: all the machine likes alone, a time budget beside others.

Rows that decode stand still while a chunk is read, so the chunk is bounded in seconds, not tokens:
what 512 tokens cost differs a hundredfold between a small model and a large one. Pure: durations
come in, no clock is read.
"""

from __future__ import annotations

from collections import deque

BLOCK_TOKENS = 64
"""Chunks are whole blocks: recurrent layers scan in blocks, and a part of one costs all of it. The
weights, too, are read once for 64 tokens as for 16."""
SAMPLES = 3
"""Chunks remembered; the dearest counts, since each looks at a longer context than the last."""
TARGET_SHARE = 0.75
"""Of the budget: it is a bound, and the next chunk may cost a third more than the last ones."""


class PrefillBudget:
    """Chooses chunk sizes for one lane."""

    def __init__(self, max_chunk_tokens: int, budget_s: float) -> None:
        self._max_chunk_tokens = max_chunk_tokens
        self._budget_s = budget_s
        self._block_costs_s: deque[float] = deque(maxlen=SAMPLES)
        self._best_block_s: float | None = None

    def chunk_tokens(self, *, others_decode: bool) -> int:
        """Return how many tokens to read next, at most; one block where the cost is not known."""
        if not others_decode:
            return self._max_chunk_tokens
        blocks = 1
        if self._block_costs_s:
            blocks = max(1, int(TARGET_SHARE * self._budget_s / max(self._block_costs_s)))
        return min(blocks * BLOCK_TOKENS, self._max_chunk_tokens)

    def observe(self, tokens: int, duration_s: float) -> None:
        """Learn what a chunk cost."""
        block_s = duration_s / _blocks(tokens)
        self._block_costs_s.append(block_s)
        if self._best_block_s is None or block_s < self._best_block_s:
            self._best_block_s = block_s

    def best_case_s(self, tokens: int) -> float:
        """Say how long reading so many would take at the best speed so far; 0 if there is none."""
        return (self._best_block_s or 0.0) * _blocks(tokens)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
