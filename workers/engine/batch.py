"""The rows that decode together, and their caches: join at any round, leave at any round.

While a batch drafts nothing, its MTP head is left behind and the hidden states that it would have
read are kept instead: plain rounds then cost what they cost without a head, and drafting can be
taken up again by one pass over what was kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from workers.engine.kv_cache import RowCache, capacity
from workers.engine.model import ArraysCache, KVCache, LayerCache, MtpHead
from workers.engine.row import Row

MAX_BACKLOG_STEPS = 32
"""Tokens the head may be behind at most."""


class Batch:
    """Live rows and, row by row, their caches, the head's caches and the last chosen token.

    Between rounds the target's caches hold exactly prompt + answer[:-1]. The head's hold the same
    less what it is behind, and when it is not, `seed_hidden` is its state that drafts the first
    token behind the answer.
    """

    def __init__(self, *, shared: bool) -> None:
        """Make an empty batch; one that is not shared never holds more than one row."""
        self._shared = shared
        self.clear()

    def clear(self) -> None:
        """Drop all rows and free what they held."""
        self.rows: list[Row] = []
        self.caches: list[LayerCache] = []
        self.head_caches: list[RowCache] = []
        self.last_tokens: mx.array = mx.zeros((0,), dtype=mx.int32)
        """[rows]: the last token of every answer, in no cache yet."""
        self.position_shift: mx.array = self.last_tokens
        """[rows]: from the slot of a token to its position."""
        self.seed_hidden: mx.array | None = None
        """[rows, 1, width], None in a batch that never drafts."""
        self._backlog: list[tuple[mx.array, mx.array]] = []
        """Tokens [rows, 1] and hidden states [rows, 1, width] that the head has not read."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def offset(self) -> mx.array:
        """[rows]: the cursors of the target's caches."""
        return next(cache.offset for cache in self.caches if isinstance(cache, RowCache))

    def set_offset(self, offset: mx.array) -> None:
        """Move all cursors, those of the head along with the target's."""
        for cache in self._row_caches():
            cache.offset = offset

    @property
    def state(self) -> list[tuple[mx.array, ...]]:
        """Return the arrays of the target's caches, layer by layer."""
        return [tuple(cache.state) for cache in self.caches]

    @state.setter
    def state(self, state: Sequence[tuple[mx.array, ...]]) -> None:
        for cache, arrays in zip(self.caches, state, strict=True):
            if isinstance(cache, RowCache):
                cache.keys, cache.values = arrays
            else:
                cache.state = list(arrays)

    @property
    def head_state(self) -> list[tuple[mx.array, ...]]:
        """Return the arrays of the head's caches."""
        return [cache.state for cache in self.head_caches]

    @head_state.setter
    def head_state(self, state: Sequence[tuple[mx.array, ...]]) -> None:
        for cache, (keys, values) in zip(self.head_caches, state, strict=True):
            cache.keys, cache.values = keys, values

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens in every row."""
        needed = max(row.slots_used for row in self.rows) + tokens
        for cache in self._row_caches():
            cache.reserve(needed)

    @property
    def has_head_caches(self) -> bool:
        """Say whether the head follows these rows."""
        return bool(self.head_caches)

    @property
    def has_backlog(self) -> bool:
        """Say whether the head has tokens to read before it can draft."""
        return bool(self._backlog)

    @property
    def backlog_full(self) -> bool:
        """Say whether the head is to be brought up to date, drafting or not."""
        return len(self._backlog) >= MAX_BACKLOG_STEPS

    def append_backlog(self, tokens: mx.array, hidden: mx.array) -> None:
        """Keep what the head would have read of a plain round."""
        self._backlog.append((tokens, hidden))

    def read_backlog(self, head: MtpHead) -> None:
        """Let the head read all it is behind, in one pass."""
        if not self._backlog:
            return
        tokens = mx.concatenate([tokens for tokens, _ in self._backlog], axis=1)
        hidden = mx.concatenate([hidden for _, hidden in self._backlog], axis=1)
        length = tokens.shape[1]
        start = self.offset - length
        for cache in self.head_caches:
            cache.offset = start
        positions = start[:, None] + mx.arange(length, dtype=mx.int32)
        state = head.forward(tokens, hidden, self.head_caches, positions)
        self.seed_hidden = state[:, -1:]
        self._backlog.clear()

    def join(
        self,
        row: Row,
        caches: Sequence[LayerCache],
        head_caches: Sequence[KVCache],
        last: int,
        seed_hidden: mx.array | None,
    ) -> None:
        """Add a prefilled row; its caches are taken over."""
        new_caches = [_opened(cache, row) for cache in caches] if self._shared else list(caches)
        new_head_caches = [_row_cache(cache, row) for cache in head_caches]
        token = mx.array([last], dtype=mx.int32)
        shift = mx.array(
            [row.context_tokens + row.position_offset - row.slots_used], dtype=mx.int32
        )
        if not self.rows:
            self.caches, self.head_caches = new_caches, new_head_caches
            self.last_tokens, self.position_shift, self.seed_hidden = token, shift, seed_hidden
        else:
            for mine, new in zip(self.caches, new_caches, strict=True):
                _extend(mine, new)
            for head_cache, new_head_cache in zip(self.head_caches, new_head_caches, strict=True):
                head_cache.join(new_head_cache)
            self.last_tokens = mx.concatenate([self.last_tokens, token])
            self.position_shift = mx.concatenate([self.position_shift, shift])
            if self.seed_hidden is not None and seed_hidden is not None:
                self.seed_hidden = mx.concatenate([self.seed_hidden, seed_hidden])
        self.rows.append(row)
        self.evaluate()

    def select(self, indices: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(indices) == len(self.rows):
            return
        if not indices:
            self.clear()
            return
        chosen = mx.array(indices, dtype=mx.int32)
        self.rows = [self.rows[index] for index in indices]
        longest = max(row.slots_used for row in self.rows)
        for cache in (*self.caches, *self.head_caches):
            if isinstance(cache, RowCache):
                cache.select(indices, longest)
            else:
                cache.filter(chosen)
        self.last_tokens = self.last_tokens[chosen]
        self.position_shift = self.position_shift[chosen]
        if self.seed_hidden is not None:
            self.seed_hidden = self.seed_hidden[chosen]
        self._backlog = [(tokens[chosen], hidden[chosen]) for tokens, hidden in self._backlog]

    def evaluate(self) -> None:
        """Compute what the caches hold, layer by layer, so that no copy outlives its layer."""
        for cache in (*self.caches, *self.head_caches):
            mx.eval(cache.state)

    def evaluate_async(self) -> None:
        """Hand to the device all that the next round starts from, without waiting for it."""
        mx.async_eval(
            self.last_tokens, self.seed_hidden, self._backlog,
            [cache.state for cache in self.caches], [cache.state for cache in self.head_caches],
            [cache.offset for cache in self._row_caches()],
        )  # fmt: skip

    def _row_caches(self) -> Iterator[RowCache]:
        yield from (cache for cache in self.caches if isinstance(cache, RowCache))
        yield from self.head_caches


def _opened(cache: LayerCache, row: Row) -> LayerCache:
    return _row_cache(cache, row) if isinstance(cache, KVCache) else cache


def _row_cache(cache: KVCache, row: Row) -> RowCache:
    joined = RowCache(cache.keys, cache.values, mx.array([row.slots_used], dtype=mx.int32))
    joined.resize(capacity(row.slots_used + 1))
    return joined


def _extend(cache: LayerCache, other: LayerCache) -> None:
    if isinstance(cache, RowCache):
        assert isinstance(other, RowCache)
        cache.join(other)
    else:
        assert isinstance(cache, ArraysCache)
        cache.extend(other)
