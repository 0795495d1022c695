"""What rows cost in memory, measured at load, and how long a row can become at all.

On Apple silicon a process that asks for more than the working set is not refused, it is aborted,
and takes every other answer with it. So a prompt that cannot fit is refused before it is read, an
answer ends where even a row alone would not fit any more, and what does not fit beside others waits
(`lane.py`). Not counted: caches of sliding windows, which stop growing, and what a draft model
holds while it reads; both come out of the share that is left for activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from workers.engine.kv_cache import capacity, capacity_within
from workers.engine.model import ArraysCache, KVCache, MtpHead, Target

_PROBE_TOKENS = 16
GROWTH_TOKENS = 256
"""What each row should be able to grow by when another one joins, so that it may stay a while."""
_ROUND_TOKENS = 16
"""What one round may write at most: a draft, and the token behind it."""
_SHARE_FOR_CACHES = 0.9
"""Of what the weights leave; the rest is for activations and for pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one row, and bytes that all rows may have together."""

    token_bytes: int
    """Grows with the context: keys and values of every attention layer, the head's too."""
    row_bytes: int
    """Whatever the length: recurrent states."""
    room_bytes: int
    limit_bytes: int = 0
    """What the process may use in all."""

    def batch_cache_bytes(self, batches: Iterable[Sequence[int]]) -> int:
        """Count the bytes of batches, given the tokens of their rows, after one more round.

        A batch holds each of its rows at the length of the longest.
        """
        return sum(
            len(tokens) * self.row_cache_bytes(capacity(max(tokens) + _ROUND_TOKENS))
            for tokens in batches
        )

    def row_cache_bytes(self, slots: int) -> int:
        """Count the bytes of a row that holds so many slots."""
        return self.row_bytes + self.token_bytes * slots

    def max_row_tokens(self) -> int:
        """Return how many tokens a row alone on the machine can come to, its answer included."""
        slots = max(self.room_bytes - self.row_bytes, 0) // max(self.token_bytes, 1)
        return max(capacity_within(slots) - _ROUND_TOKENS, 0)


def measure_memory(target: Target, head: MtpHead | None) -> MemoryEstimate:
    """Read a few tokens and look at what the caches hold; must run on the engine thread."""
    caches = target.new_caches()
    tokens = mx.zeros((1, _PROBE_TOKENS), dtype=mx.int32)
    target.forward(tokens, caches, mx.arange(_PROBE_TOKENS)[None])
    mx.eval([cache.state for cache in caches])
    token_bytes = row_bytes = 0
    attention_bytes = 0
    for cache in caches:
        if isinstance(cache, ArraysCache):
            row_bytes += sum(array.nbytes for array in cache.state if array is not None)
        elif isinstance(cache, KVCache):
            keys, values = cache.state
            attention_bytes = (keys.nbytes + values.nbytes) // _PROBE_TOKENS
            token_bytes += attention_bytes
    if head is not None:
        token_bytes += attention_bytes * len(head.new_caches())
    limit_bytes = _limit_bytes()
    free_bytes = limit_bytes - mx.get_active_memory()
    return MemoryEstimate(
        token_bytes=token_bytes,
        row_bytes=row_bytes,
        room_bytes=int(_SHARE_FOR_CACHES * max(free_bytes, 0)),
        limit_bytes=limit_bytes,
    )


def _limit_bytes() -> int:
    working_set = mx.device_info().get("max_recommended_working_set_size")
    return int(working_set or mx.get_memory_limit())
