"""Prefill budget: the size of prompt chunks, bounded by measured time.

Rows do not decode while a chunk is read, and no other prompt is. The bound is in seconds, since the
cost of 512 tokens differs a hundredfold between a small model and a large one, and grows with the
tokens before them. Pure: the caller passes durations, no clock is read.
"""

from collections import deque
from collections.abc import Mapping
from math import inf

BLOCK_TOKENS = 64
"""Chunks are whole blocks: recurrent layers scan in blocks, and a part of a block costs as much as
a whole one. Reading the weights, too, costs the same for 64 tokens as for 16."""
PARTS_TOKENS = (32, 16)
"""Chunks where a block exceeds the budget only because of the context that its tokens attend to."""
SAMPLES = 3
"""Chunks whose costs are stored for each class of contexts; the highest counts."""
TARGET_SHARE = 0.75
"""Share of the budget to aim for: the next chunk may cost a third more than the last ones."""
ALONE_FACTOR = 2.5
"""Budgets that a chunk may take while no row decodes; a new request still waits for its end."""
FIRST_BLOCKS = 4
"""Size of a chunk while no row decodes and no cost is known."""
_CLASS_TOKENS = 1024
"""Contexts of fewer tokens cost the same; each further class is twice as long."""


class PrefillBudget:
    """Chunk sizes of one lane."""

    def __init__(self, max_chunk_tokens: int, budget_s: float) -> None:
        self._max_chunk_tokens = max_chunk_tokens
        self._budget_s = budget_s
        self._costs_s: dict[int, deque[float]] = {}
        """Costs of a block in whole chunks, by class of the context before them."""
        self._part_costs_s: dict[int, deque[float]] = {}
        """The same in chunks that a prompt or a boundary has cut short: they may be too high."""
        self._best_block_s = inf

    def chunk_tokens(
        self, *, others_decode: bool, context_tokens: int = 0, spent_s: float = 0.0
    ) -> int:
        """Return the size of the next chunk of a prompt after `context_tokens`.

        The step has spent `spent_s` already; 0 if that leaves no time for a further chunk.
        """
        wanted = _class(context_tokens)
        block_s = _cost_s(self._costs_s, wanted)
        if block_s is None:
            block_s = _cost_s(self._part_costs_s, wanted)
        if block_s is None:
            blocks = 1 if others_decode else FIRST_BLOCKS
        else:
            budget_s = self._budget_s * (1 if others_decode else ALONE_FACTOR)
            if others_decode and not spent_s and block_s > budget_s:
                return self._part_tokens(block_s, budget_s)
            rest_s = TARGET_SHARE * budget_s - spent_s
            blocks = int(rest_s / block_s) if block_s else self._max_chunk_tokens
            if blocks < 1 and spent_s:
                return 0
            blocks = max(blocks, 1)
            if not others_decode:  # few sizes, so that a repeated request is rounded alike
                blocks = 1 << (blocks.bit_length() - 1)
        return min(blocks * BLOCK_TOKENS, self._max_chunk_tokens)

    def observe(
        self, tokens: int, duration_s: float, *, context_tokens: int = 0, whole: bool = True
    ) -> None:
        """Record the duration of a chunk; `whole` unless the prompt has cut it short."""
        block_s = duration_s / _blocks(tokens)
        if whole and tokens < BLOCK_TOKENS:  # the context costs each token the same
            fixed_s = min(self._best_block_s, duration_s)
            block_s = fixed_s + (duration_s - fixed_s) * BLOCK_TOKENS / tokens
        costs_s = self._costs_s if whole else self._part_costs_s
        costs_s.setdefault(_class(context_tokens), deque(maxlen=SAMPLES)).append(block_s)
        self._best_block_s = min(self._best_block_s, block_s)

    def _part_tokens(self, block_s: float, budget_s: float) -> int:
        """Return the largest part of a block that the budget allows; the block if no part pays."""
        fixed_s = self._best_block_s
        if fixed_s > budget_s / 2:
            return BLOCK_TOKENS
        context_s = (block_s - fixed_s) / BLOCK_TOKENS
        fitting = (part for part in PARTS_TOKENS if fixed_s + part * context_s <= budget_s)
        return next(fitting, PARTS_TOKENS[-1])

    def best_case_s(self, tokens: int) -> float:
        """Return how long `tokens` tokens take at the best speed so far; 0 if none is known."""
        return self._best_block_s * _blocks(tokens) if self._best_block_s < inf else 0.0


def _cost_s(costs_s: Mapping[int, deque[float]], wanted: int) -> float | None:
    """Return the cost of a block in a class, or a bound of it by a shorter or a longer one.

    None if no cost is known. Attention over twice the context costs at most twice as much.
    """
    shorter = max((known for known in costs_s if known <= wanted), default=None)
    if shorter is not None:
        return max(costs_s[shorter]) * 2 ** (wanted - shorter)
    return max(costs_s[min(costs_s)]) if costs_s else None


def _class(context_tokens: int) -> int:
    return (context_tokens // _CLASS_TOKENS).bit_length()


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
