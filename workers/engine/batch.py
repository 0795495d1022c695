"""The rows that decode together, and their caches: join at any round, leave at any round.

While a batch drafts nothing, its MTP head is left behind and the hidden states that it would have
read are kept instead: plain rounds then cost what they cost without a head, and drafting can be
taken up again by one pass over what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from workers.engine.row_cache import RowCache
from workers.engine.rows import Row
from workers.engine.seam import ArraysCache, KVCache, LayerCache, MtpHead

FARTHEST_BEHIND = 32
"""Tokens the head may be behind before it is brought up to date, drafting or not."""


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
        self.head_caches: list[LayerCache] = []
        self.last: mx.array = mx.zeros((0,), dtype=mx.int32)
        """[rows]: the last token of every answer, in no cache yet."""
        self.seed_hidden: mx.array | None = None
        """[rows, 1, width], None in a batch that never drafts."""
        self._behind: list[tuple[mx.array, mx.array]] = []
        """Tokens [rows, 1] and hidden states [rows, 1, width] that the head has not read."""

    def __len__(self) -> int:
        return len(self.rows)

    def positions(self, length: int) -> mx.array:
        """Return the text positions [rows, length] of the next tokens."""
        starts = [row.context + row.position_offset for row in self.rows]
        return mx.array(starts, dtype=mx.int32)[:, None] + mx.arange(length, dtype=mx.int32)

    def head_positions(self, length: int) -> mx.array:
        """Return the head's positions [rows, length]: plain slot numbers, pictures or not."""
        cursors = self.head_caches[0].offset
        return cursors[:, None] + mx.arange(length, dtype=mx.int32)

    def fall_behind(self, tokens: mx.array, hidden: mx.array, head: MtpHead) -> None:
        """Keep what the head would have read of a plain round."""
        self._behind.append((tokens, hidden))
        if len(self._behind) >= FARTHEST_BEHIND:
            self.catch_up(head)

    def catch_up(self, head: MtpHead) -> None:
        """Let the head read all it is behind, in one pass."""
        if not self._behind:
            return
        tokens = mx.concatenate([tokens for tokens, _ in self._behind], axis=1)
        hidden = mx.concatenate([hidden for _, hidden in self._behind], axis=1)
        length = tokens.shape[1]
        state = head.forward(tokens, hidden, self.head_caches, self.head_positions(length))
        self.seed_hidden = state[:, -1:]
        for cache in self.head_caches:
            cache.advance([length] * len(self.rows))
        self._behind.clear()

    def join(
        self,
        row: Row,
        caches: Sequence[LayerCache],
        head_caches: Sequence[LayerCache],
        last: int,
        seed_hidden: mx.array | None,
    ) -> None:
        """Add a prefilled row; its caches are taken over."""
        new_caches = [_rowwise(cache) for cache in caches] if self._shared else list(caches)
        new_head_caches = [_rowwise(cache) for cache in head_caches]
        token = mx.array([last], dtype=mx.int32)
        if not self.rows:
            self.caches, self.head_caches = new_caches, new_head_caches
            self.last, self.seed_hidden = token, seed_hidden
        else:
            for mine, new in zip(
                self.caches + self.head_caches, new_caches + new_head_caches, strict=True
            ):
                _extend(mine, new)
            self.last = mx.concatenate([self.last, token])
            if self.seed_hidden is not None and seed_hidden is not None:
                self.seed_hidden = mx.concatenate([self.seed_hidden, seed_hidden])
        self.rows.append(row)
        self.evaluate()

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(indices) == len(self.rows):
            return
        if not indices:
            self.clear()
            return
        chosen = mx.array(indices, dtype=mx.int32)
        self.rows = [self.rows[index] for index in indices]
        for cache in self.caches + self.head_caches:
            if isinstance(cache, RowCache):
                cache.keep(indices)
            else:
                cache.filter(chosen)
        self.last = self.last[chosen]
        if self.seed_hidden is not None:
            self.seed_hidden = self.seed_hidden[chosen]
        self._behind = [(tokens[chosen], hidden[chosen]) for tokens, hidden in self._behind]

    def evaluate(self) -> None:
        """Compute what the caches hold, layer by layer, so that no copy outlives its layer."""
        for cache in self.caches + self.head_caches:
            mx.eval(cache.state)


def _rowwise(cache: LayerCache) -> LayerCache:
    if isinstance(cache, KVCache):
        return RowCache([cache.offset], cache.keys, cache.values)
    return cache


def _extend(cache: LayerCache, other: LayerCache) -> None:
    if isinstance(cache, RowCache):
        assert isinstance(other, RowCache)
        cache.join(other)
    else:
        assert isinstance(cache, ArraysCache)
        cache.extend(other)
