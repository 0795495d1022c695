"""Memory estimate of rows, measured at load, and the maximum length of a row.

On Apple silicon the system ends a process that exceeds the working set by far, with all its
answers; `memory_pressure.py` watches for that. The engine rejects a prompt that cannot fit before
reading it, ends an answer at the length at which even a single row no longer fits, and queues rows
that do not fit beside others (`scheduler.py`). A sliding window stops growing when its ring is
whole. The estimate omits the draft model's caches during scoring, which fit into the share that is
left for activations.

Two activations grow with what rows hold, and are counted. A verify keeps the recurrent states
before it, and a rollback computes those after the accepted drafts, one after another; a plain step
stores those before it until the host has read the step before. Attention that no kernel fuses
stores the scores of a chunk over its whole context: chunks are cut to fit, down to one block.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from workers.engine.lane.prefill_budget import BLOCK_TOKENS
from workers.engine.model.device import memory_limit_bytes, on_cpu
from workers.engine.model.kv_cache import (
    STEP_TOKENS,
    ArraysCache,
    KVCache,
    capacity,
    capacity_within,
)
from workers.engine.model.mtp_head import MtpHead
from workers.engine.model.target import Target
from workers.engine.model.windows import FamilyWindow, recent_tokens, ring_slots, window_tokens

_PROBE_TOKENS = 16
_MAX_SLOTS = 1 << 31
_SHARE_FOR_CACHES = 0.9
"""Share of the memory beside the weights; the rest is for activations and pictures."""
_SHARE_FOR_SCORES = 0.5
"""Share of the memory for activations that attention scores may take."""
_VERIFY_STATES, _DRAFT_STATES = 2.5, 0.34
"""Recurrent states that a verify of a row takes at its peak, and more for each draft: measured on a
CPU, which holds the states between the operations of a transition; a GPU has them in registers."""
_FUSED_WIDTHS = frozenset((64, 80, 128))
"""Widths of attention heads for which Metal has a fused kernel that reads many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of one row, and the memory for all rows."""

    token_bytes: int
    """Bytes for each token: keys and values of every attention layer, the head's too."""
    row_bytes: int
    """Bytes at any length: recurrent states."""
    room_bytes: int
    """Limit for the caches of all rows."""
    draft_bytes: int = 0
    """Bytes that each drafting row needs in a verify: recurrent states before and after it."""
    score_bytes: int = 0
    """Bytes of attention scores for each token read and each token before it; 0 if fused."""
    max_score_bytes: int = 0
    """Share of the activations' memory that scores may take."""
    windows: tuple[tuple[int, int], ...] = ()
    """Bytes for each slot, and slots of a whole ring, of the windowed layers."""

    def max_chunk_tokens(self, context_tokens: int) -> int:
        """Return the maximum of a chunk that is read after so many tokens: one block at least."""
        if not self.score_bytes:
            return 1 << 30
        tokens = self.max_score_bytes // (self.score_bytes * max(context_tokens, 1))
        return max(tokens // BLOCK_TOKENS, 1) * BLOCK_TOKENS

    def reading_bytes(self, tokens: int) -> int:
        """Return what reading a row of so many tokens takes beyond the activations' share."""
        return max(BLOCK_TOKENS * self.score_bytes * tokens - self.max_score_bytes, 0)

    def batch_cache_bytes(self, batches: Iterable[Sequence[int]]) -> int:
        """Return the bytes of batches after one more step, given the tokens of their rows.

        A batch holds each of its rows at the length of the longest.
        """
        return sum(
            len(tokens) * self.row_cache_bytes(capacity(max(tokens) + STEP_TOKENS))
            for tokens in batches
        )

    def step_bytes(self, *, drafts: bool) -> int:
        """Return the bytes that a row needs in a step beside its caches: recurrent states."""
        return self.draft_bytes if drafts else self.row_bytes

    def row_cache_bytes(self, slots: int) -> int:
        """Return the bytes of a row of `slots` slots."""
        window_bytes = sum(size * min(slots, most) for size, most in self.windows)
        return self.row_bytes + self.token_bytes * slots + window_bytes

    def max_row_tokens(self) -> int:
        """Return the maximum tokens of a row without others, its answer included."""

        def needed_bytes(slots: int) -> int:
            step_bytes = max(self.draft_bytes, self.row_bytes)
            return self.row_cache_bytes(slots) + step_bytes + self.reading_bytes(slots)

        slots = bisect_right(range(_MAX_SLOTS), self.room_bytes, key=needed_bytes) - 1
        return max(capacity_within(max(slots, 0)) - STEP_TOKENS, 0)


def measure_memory(target: Target, head: MtpHead | None, draft_tokens: int = 0) -> MemoryEstimate:
    """Read a few tokens and measure the caches; runs on the engine thread.

    `draft_tokens` is the longest draft of a row.
    """
    caches = target.new_caches()
    tokens = mx.zeros((1, _PROBE_TOKENS), dtype=mx.int32)
    target.forward(tokens, caches, mx.arange(_PROBE_TOKENS)[None])
    mx.eval([cache.state for cache in caches])
    token_bytes = row_bytes = 0
    attention_bytes = score_bytes = 0
    windows: Counter[int] = Counter()
    for cache in caches:
        if isinstance(cache, FamilyWindow):
            held = recent_tokens(cache)
            slot_bytes = sum(array.nbytes // array.shape[2] for array in held)
            windows[ring_slots(window_tokens(cache))] += slot_bytes
        elif isinstance(cache, ArraysCache):
            row_bytes += sum(array.nbytes for array in cache.state if array is not None)
        elif isinstance(cache, KVCache):
            keys, values = cache.state
            attention_bytes = (keys.nbytes + values.nbytes) // _PROBE_TOKENS
            token_bytes += attention_bytes
            # A CPU has no fused kernel that reads several tokens.
            if on_cpu() or keys.shape[-1] not in _FUSED_WIDTHS:
                heads = target.configured("num_attention_heads")
                heads = heads if type(heads) is int else 0  # not every configuration has it
                score_bytes = 2 * heads * keys.itemsize  # the softmax is another
    if head is not None:
        token_bytes += attention_bytes * len(head.new_caches())
    free_bytes = max(memory_limit_bytes() - mx.get_active_memory(), 0)
    return MemoryEstimate(
        token_bytes=token_bytes,
        row_bytes=row_bytes,
        room_bytes=int(_SHARE_FOR_CACHES * free_bytes),
        draft_bytes=int((_VERIFY_STATES + _DRAFT_STATES * draft_tokens) * row_bytes)
        if draft_tokens
        else 0,
        score_bytes=score_bytes,
        max_score_bytes=int(_SHARE_FOR_SCORES * (1 - _SHARE_FOR_CACHES) * free_bytes),
        windows=tuple((size, slots) for slots, size in sorted(windows.items())),
    )
