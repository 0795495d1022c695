"""How much of a prompt to read at a time: all the machine likes alone, a time budget beside others.

Rows that decode stand still while a chunk is read, so the chunk is bounded in seconds, not tokens:
what 512 tokens cost differs a hundredfold between a small model and a large one. Pure: durations
come in, no clock is read.
"""

from __future__ import annotations

from collections import deque

STEP_TOKENS = (64, 16)
"""Chunks are whole steps: recurrent layers that scan in blocks of 64 pad up to them."""
SAMPLES = 3
"""Chunks remembered; the dearest counts, since each looks at a longer context than the last."""
AIM = 0.75
"""Of the budget: it is a bound, and the next chunk may cost a third more than the last ones."""
FIRST_CHUNK_TOKENS = 64
"""Read beside others while the cost of a token is not known."""


class PrefillPace:
    """Chooses chunk sizes for one lane."""

    def __init__(self, longest_tokens: int, budget_s: float) -> None:
        self._longest_tokens = longest_tokens
        self._budget_s = budget_s
        self._token_costs_s: deque[float] = deque(maxlen=SAMPLES)

    def chunk_tokens(self, *, beside_others: bool) -> int:
        """Return how many tokens to read next, at most."""
        if not beside_others:
            return self._longest_tokens
        affordable = FIRST_CHUNK_TOKENS
        if self._token_costs_s:
            affordable = int(AIM * self._budget_s / max(self._token_costs_s))
        step = next((step for step in STEP_TOKENS if step <= affordable), STEP_TOKENS[-1])
        return min(max(affordable // step, 1) * step, self._longest_tokens)

    def observe(self, tokens: int, duration_s: float) -> None:
        """Learn what a chunk cost."""
        self._token_costs_s.append(duration_s / tokens)
