"""Sliding windows: layers that see only the last tokens, and the ring that holds them in a batch.

Row r of a `WindowCache` holds token p at slot p modulo the number of slots. A step of L tokens
overwrites the tokens L to 1 places behind the ring's end, so a ring has L - 1 slots more than the
window: what a rejected draft overwrote was out of every later window, and a rollback moves no data.
A ring grows with its rows, and never beyond that. Where its cursor stands is an array, as in a
`RowCache`, so rows of any length share a pass, and a step can be compiled.

Llama 4 cuts the context into chunks instead: a token sees those of its own chunk before it. The
same ring holds them, behind a narrower mask.

While a prompt is read its window is in the family's own cache (mlx-vlm's `RotatingKVCache`,
`ChunkedKVCache`); `recent_tokens` and `restore_window` know how these order their tokens.
"""

from typing import Any, TypeAlias

import mlx.core as mx

from workers.engine.model.kv_cache import (
    STEP_TOKENS,
    ChunkedKVCache,
    RotatingKVCache,
    RowCache,
    capacity,
)

FamilyWindow: TypeAlias = RotatingKVCache | ChunkedKVCache
"""The cache of a windowed layer while one prompt is read."""


class WindowCache(RowCache):
    """The last `window` tokens of every row: [rows, heads, slots, width] used as rings."""

    def __init__(
        self, keys: mx.array, values: mx.array, offset: mx.array, window: int, *, chunked: bool
    ) -> None:
        super().__init__(keys, values, offset)
        self.window = window
        """Tokens that a query sees, itself included; with `chunked` the length of a chunk."""
        self.chunked = chunked

    def make_mask(
        self,
        N: int,  # noqa: N803  # mlx-vlm's name
        window_size: int | None = None,
        **_: object,
    ) -> mx.array:
        """Show each query the tokens of its window, itself included: [rows, 1, N, slots]."""
        window = self.window if window_size is None else min(window_size, self.window)
        queries = self.offset[:, None] + mx.arange(N)
        last = queries[:, -1:]
        # The token that each slot holds after the pass; before it is written, one of the last lap.
        behind = (last - mx.arange(self.slots) + self.slots) % self.slots
        tokens = (last - behind)[:, None, None, :]
        queries = queries[:, None, :, None]
        visible = (tokens >= 0) & (tokens <= queries) & (tokens > queries - window)
        if self.chunked:
            visible = visible & (tokens // self.window == queries // self.window)
        return visible

    def _slots_behind(self, length: int) -> mx.array:
        assert length <= STEP_TOKENS, "the ring has room for the tokens of one step"
        return super()._slots_behind(length) % self.slots

    def resize(self, slots: int) -> None:
        """Set the capacity of every row, at most that of a whole ring.

        Rows that have gone round the ring keep its size, which is then below any capacity asked
        for; in all others token p is at slot p, and slots are added and removed behind them.
        """
        super().resize(min(slots, ring_slots(self.window)))

    def recent_tokens(self, row: int, end: int) -> tuple[mx.array, mx.array]:
        """Return the window of a row after its first `end` tokens, the earliest token first."""
        tokens = mx.arange(max(end - self.window, 0), end) % self.slots
        return self.keys[row : row + 1][:, :, tokens], self.values[row : row + 1][:, :, tokens]


def ring_slots(window: int) -> int:
    """Return the slots of a whole ring."""
    return window + STEP_TOKENS - 1


def window_tokens(cache: FamilyWindow) -> int:
    """Return the tokens that a query of this layer may see, itself included."""
    return int(cache.max_size if isinstance(cache, RotatingKVCache) else cache.chunk_size)


def open_window(
    cache: FamilyWindow, keys: mx.array, values: mx.array, offset: mx.array
) -> WindowCache:
    """Return a batch's cache of the same layer as `cache`, with these rings and cursors."""
    chunked = isinstance(cache, ChunkedKVCache)
    return WindowCache(keys, values, offset, window_tokens(cache), chunked=chunked)


def to_ring(cache: FamilyWindow, room_tokens: int) -> WindowCache:
    """Return the cache of one row as a batch holds it, with room for `room_tokens` more tokens."""
    end, window = int(cache.offset), window_tokens(cache)
    slots = min(capacity(end + room_tokens), ring_slots(window))
    rings = [_ring(array, end, slots) for array in recent_tokens(cache)]
    return open_window(cache, rings[0], rings[1], mx.array([end], dtype=mx.int32))


def _ring(recent: mx.array, end: int, slots: int) -> mx.array:
    """Lay out the tokens before `end`, the earliest first, in a ring."""
    count = recent.shape[2]
    begin = (end - count) % slots
    before_wrap = min(count, slots - begin)
    wrapped = count - before_wrap
    shape = (*recent.shape[:2], slots - count, recent.shape[3])
    free = mx.zeros(shape, recent.dtype)
    head, tail = recent[:, :, before_wrap:], recent[:, :, :before_wrap]
    between = begin - wrapped
    return mx.concatenate([head, free[:, :, :between], tail, free[:, :, between:]], axis=2)


def recent_tokens(cache: FamilyWindow) -> tuple[mx.array, mx.array]:
    """Return keys and values of the last tokens that a layer may still see, the earliest first."""
    window = window_tokens(cache)
    arrays: list[Any]
    if isinstance(cache, ChunkedKVCache):
        held = cache.offset - cache.start_position
        arrays = [array[:, :, max(held - window, 0) : held] for array in (cache.keys, cache.values)]
    else:
        at = int(cache.meta_state[3])  # the slot that is overwritten next
        arrays = [
            mx.concatenate([array[:, :, at:], array[:, :, :at]], axis=2)[:, :, -window:]
            if at < array.shape[2]
            else array[:, :, -window:]
            for array in cache.state
        ]
    return arrays[0], arrays[1]


def restore_window(cache: FamilyWindow, keys: mx.array, values: mx.array, end: int) -> None:
    """Fill an empty cache with the result of `recent_tokens` after `end` tokens."""
    count = keys.shape[2]
    # A copy: the family's cache writes into its arrays.
    cache.state = (mx.contiguous(keys), mx.contiguous(values))
    if isinstance(cache, ChunkedKVCache):
        cache.meta_state = (cache.chunk_size, end - count)
    else:
        cache.meta_state = (0, cache.max_size, end, count)
    cache.offset = end
