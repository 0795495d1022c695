"""A key-value cache in which every row of the batch has a cursor of its own.

Row r holds its keys at slots [0, offset[r]). A rejected draft is not moved away: the next append
overwrites it, so rolling back costs no data movement whatever the length of the context. All slots
are handed to the attention each time, with a mask that hides those behind a row's cursor: shapes
stay the same from round to round, and a round can be compiled once.

It is duck-typed to what mlx-vlm's models read (`offset`, `_idx`, `make_mask`, `update_and_fetch`).
It must not grow `extract` or `merge`: with them the Qwen3.5 model would run the batch row by row.
`tests/engine/test_seam.py` holds that contract.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

FEWEST_SLOTS = 256
STEPS_A_DOUBLING = 4
"""Capacities between a power of two and the next: few shapes, and never a quarter unused."""


class RowCache:
    """Keys and values of shape [rows, heads, slots, head width], one cursor a row."""

    left_padding = None  # rows start at slot 0: the models must not look for padding

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array) -> None:
        self.keys = keys
        self.values = values
        self.offset = offset
        """[rows]: the cursors."""

    # --- read by the models -------------------------------------------------------------------

    @property
    def _idx(self) -> int:
        return self.slots

    @property
    def batch_size(self) -> int:
        """Count the rows."""
        return int(self.keys.shape[0])

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Return the arrays that an evaluation has to cover."""
        return self.keys, self.values

    def size(self) -> int:
        """Return the slots that an attention looks at."""
        return self.slots

    def empty(self) -> bool:
        """Say that nothing is stored; never so for a joined row."""
        return False

    def make_mask(self, N: int, **_: object) -> mx.array:  # noqa: N803  # theirs
        """Let query i of a row see exactly that row's slots up to its own: [rows, 1, N, slots]."""
        queries = self.offset[:, None] + mx.arange(N)
        return mx.arange(self.slots)[None, None, None] <= queries[:, None, :, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [rows, heads, L, width] behind every row's cursor; return all slots.

        The slots must have been reserved: how many are needed is not known on the device.
        """
        length = keys.shape[2]
        at = (self.offset[:, None] + mx.arange(length))[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(at, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(
            self.values, mx.broadcast_to(at, values.shape), values, axis=2
        )
        self.offset = self.offset + length
        return self.keys, self.values

    # --- used by the engine ---------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Return the capacity of every row."""
        return int(self.keys.shape[2])

    def reserve(self, tokens: int) -> None:
        """Make room for rows of up to `tokens` tokens."""
        if tokens > self.slots:
            self.resize(capacity(tokens))

    def join(self, other: RowCache) -> None:
        """Add the rows of another cache behind these."""
        slots = max(self.slots, other.slots)
        self.resize(slots)
        other.resize(slots)
        self.keys = mx.concatenate([self.keys, other.keys])
        self.values = mx.concatenate([self.values, other.values])
        self.offset = mx.concatenate([self.offset, other.offset])

    def keep(self, rows: Sequence[int], tokens: int) -> None:
        """Drop all rows but these, of up to `tokens` tokens, and the slots only others used."""
        chosen = mx.array(rows, dtype=mx.int32)
        slots = min(capacity(tokens), self.slots)
        self.keys = self.keys[chosen][:, :, :slots]
        self.values = self.values[chosen][:, :, :slots]
        self.offset = self.offset[chosen]

    def resize(self, slots: int) -> None:
        """Have exactly so many slots a row, none of them behind a cursor lost."""
        missing = slots - self.slots
        if missing < 0:
            self.keys, self.values = self.keys[:, :, :slots], self.values[:, :, :slots]
        elif missing:
            more = [(0, 0), (0, 0), (0, missing), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, more), mx.pad(self.values, more)


def capacity(tokens: int) -> int:
    """Return the slots to hold so many tokens: one of few numbers, up to a quarter more."""
    step = _step(tokens)
    return -(-tokens // step) * step


def capacity_within(slots: int) -> int:
    """Return the largest capacity of at most so many slots."""
    return slots // _step(slots) * _step(slots)


def _step(tokens: int) -> int:
    step = FEWEST_SLOTS
    while tokens > step * 2 * STEPS_A_DOUBLING:
        step *= 2
    return step
