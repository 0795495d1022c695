"""A key-value cache in which every row of the batch has a cursor of its own.

Row r holds its keys at slots [0, lengths[r]). A rejected draft is not moved away: the next append
overwrites it, so rolling back costs no data movement whatever the length of the context.

It is duck-typed to what mlx-vlm's models and cache transactions read (`offset`, `_idx`,
`make_mask`, `update_and_fetch`, `*_speculation`). It must not grow `extract` or `merge`: with them
the Qwen3.5 model would run the batch row by row. `tests/engine/test_seam.py` holds that contract.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

SLOT_STEP = 256
"""Capacity grows in this many slots, so that an append rarely reallocates."""


class RowCache:
    """Keys and values of shape [rows, heads, slots, head width], one cursor a row."""

    left_padding = None  # rows start at slot 0: the models must not look for padding
    lengths: list[int]
    """Tokens kept, row by row."""
    offset: mx.array
    """[rows]: the cursors, ahead of `lengths` by what was appended and not kept yet."""

    def __init__(self, lengths: Sequence[int], keys: mx.array, values: mx.array) -> None:
        self.keys = keys
        self.values = values
        self._pending = 0
        self._generation = 0
        self._speculating = False
        self._set_lengths(list(lengths))

    # --- read by the models -------------------------------------------------------------------

    @property
    def _idx(self) -> int:
        return max(self.lengths) + self._pending

    @property
    def batch_size(self) -> int:
        """Count the rows."""
        return len(self.lengths)

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Return the arrays that an evaluation has to cover."""
        return self.keys, self.values

    def size(self) -> int:
        """Return the slots in use by the longest row."""
        return self._idx

    def empty(self) -> bool:
        """Say that nothing is stored; never so for a joined row."""
        return False

    def make_mask(self, N: int, **_: object) -> mx.array | str | None:  # noqa: N803  # theirs
        """Let query i of a row see exactly that row's slots up to its own.

        Rows of one length need no array for that: the kernels know "causal" by name.
        """
        if self._level:
            return None if N == 1 else "causal"
        queries = self.offset[:, None] + mx.arange(N)
        slots = mx.arange(self._idx + N)
        return slots[None, None, None] <= queries[:, None, :, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [rows, heads, L, width] behind every row's cursor; return all slots in use."""
        length = keys.shape[2]
        needed = self._idx + length
        self._reserve(needed)
        if self._level:
            self.keys[:, :, needed - length : needed] = keys
            self.values[:, :, needed - length : needed] = values
        else:
            slots = (self.offset[:, None] + mx.arange(length))[:, None, :, None]
            self.keys = mx.put_along_axis(
                self.keys, mx.broadcast_to(slots, keys.shape), keys, axis=2
            )
            self.values = mx.put_along_axis(
                self.values, mx.broadcast_to(slots, values.shape), values, axis=2
            )
        self.offset = self.offset + length
        self._pending += length
        return self.keys[:, :, :needed], self.values[:, :, :needed]

    # --- read by mlx-vlm's cache transactions ---------------------------------------------------

    @property
    def is_speculating(self) -> bool:
        """Say whether a transaction is open."""
        return self._speculating

    def start_speculation(self, length: int) -> int:
        """Open a transaction over at most `length` appended tokens."""
        self._generation += 1
        self._speculating = True
        return self._generation

    def validate_speculation(self, lengths: Sequence[int], generation: int | None = None) -> None:
        """Refuse to close a transaction that is not the open one."""
        if not self._speculating or generation != self._generation:
            raise RuntimeError("This cache transaction is not open.")

    def commit_speculation(self, lengths: Sequence[int], generation: int | None = None) -> None:
        """Keep `lengths[r]` of the tokens appended since the transaction was opened."""
        self.advance(lengths)

    def abort_speculation(self, generation: int | None = None) -> None:
        """Forget all that was appended since the transaction was opened."""
        self.rewind()

    # --- used by the engine ---------------------------------------------------------------------

    def advance(self, kept: Sequence[int]) -> None:
        """Move every cursor by the tokens it keeps of what was appended."""
        self._set_lengths([a + b for a, b in zip(self.lengths, kept, strict=True)])
        self._pending = 0
        self._speculating = False

    def rewind(self) -> None:
        """Move every cursor back to before what was appended."""
        self.advance([0] * len(self.lengths))

    def join(self, other: RowCache) -> None:
        """Add the rows of another cache behind these."""
        slots = max(self.keys.shape[2], other.keys.shape[2])
        self.keys = mx.concatenate([_padded(self.keys, slots), _padded(other.keys, slots)])
        self.values = mx.concatenate([_padded(self.values, slots), _padded(other.values, slots)])
        self._set_lengths(self.lengths + other.lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the slots that only dropped rows used."""
        chosen = mx.array(rows, dtype=mx.int32)
        self._set_lengths([self.lengths[row] for row in rows])
        slots = _rounded(max(self.lengths) + 1)
        self.keys = self.keys[chosen][:, :, :slots]
        self.values = self.values[chosen][:, :, :slots]

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._level = min(lengths) == max(lengths)
        self.offset = mx.array(lengths, dtype=mx.int32)

    def _reserve(self, needed: int) -> None:
        if needed > self.keys.shape[2]:
            slots = _rounded(needed) + SLOT_STEP
            self.keys = _padded(self.keys, slots)
            self.values = _padded(self.values, slots)


def _rounded(slots: int) -> int:
    return -(-slots // SLOT_STEP) * SLOT_STEP


def _padded(array: mx.array, slots: int) -> mx.array:
    missing = slots - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else array
