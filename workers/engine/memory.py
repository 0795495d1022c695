"""Memory estimate of rows, measured at load, and the maximum length of a row.

On Apple silicon the system aborts a process that exceeds the working set, with all its answers. The
engine therefore rejects a prompt that cannot fit before reading it, ends an answer at the length at
which even a single row no longer fits, and queues rows that do not fit beside others
(`scheduler.py`). The estimate omits caches of sliding windows, which stop growing, and the draft
model's caches during scoring; both fit into the share that is left for activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from workers.engine.kv_cache import capacity, capacity_within
from workers.engine.model import ArraysCache, KVCache, MtpHead, Target

_PROBE_TOKENS = 16
GROWTH_TOKENS = 256
"""Growth reserved for each row when another one joins, to avoid an early preemption."""
_STEP_TOKENS = 16
"""Maximum tokens of one step: a draft and the token after it."""
_SHARE_FOR_CACHES = 0.9
"""Share of the memory beside the weights; the rest is for activations and pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of one row, and the memory for all rows."""

    token_bytes: int
    """Bytes for each token: keys and values of every attention layer, the head's too."""
    row_bytes: int
    """Bytes at any length: recurrent states."""
    room_bytes: int
    """Limit for the caches of all rows."""
    limit_bytes: int = 0
    """Limit of the process."""

    def batch_cache_bytes(self, batches: Iterable[Sequence[int]]) -> int:
        """Return the bytes of batches after one more step, given the tokens of their rows.

        A batch holds each of its rows at the length of the longest.
        """
        return sum(
            len(tokens) * self.row_cache_bytes(capacity(max(tokens) + _STEP_TOKENS))
            for tokens in batches
        )

    def row_cache_bytes(self, slots: int) -> int:
        """Return the bytes of a row of `slots` slots."""
        return self.row_bytes + self.token_bytes * slots

    def max_row_tokens(self) -> int:
        """Return the maximum tokens of a row without others, its answer included."""
        slots = max(self.room_bytes - self.row_bytes, 0) // max(self.token_bytes, 1)
        return max(capacity_within(slots) - _STEP_TOKENS, 0)


def measure_memory(target: Target, head: MtpHead | None) -> MemoryEstimate:
    """Read a few tokens and measure the caches; runs on the engine thread."""
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
    working_set = mx.device_info().get("max_recommended_working_set_size")
    limit_bytes = int(working_set or mx.get_memory_limit())
    free_bytes = limit_bytes - mx.get_active_memory()
    return MemoryEstimate(
        token_bytes=token_bytes,
        row_bytes=row_bytes,
        room_bytes=int(_SHARE_FOR_CACHES * max(free_bytes, 0)),
        limit_bytes=limit_bytes,
    )
