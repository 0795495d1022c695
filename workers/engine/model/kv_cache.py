"""Caches of a batch: keys and values with one cursor a row, recurrent states with their history.

Row r of a `RowCache` holds its keys at slots [0, offset[r]). The next append overwrites a rejected
draft, so that a rollback moves no data whatever the length of the context. The attention gets all
slots each time, with a mask that hides those at or after a row's cursor: shapes stay the same from
step to step, and a step can be compiled once.

A `RecurrentCache` records, for one forward pass, what a rollback needs, through the protocol of
mlx-vlm's cache-aware operators: `update_window` for causal windows, `update_recurrent` for state
transitions. Of a transition by the gated delta rule it keeps the state before the pass and the
inputs of its tokens, so that a rollback repeats the accepted ones: a state is eighty times as large
as the inputs of a token. An operator that replaces a state otherwise leaves no history;
`history` then raises, and the family is verified token by token.

Both are duck-typed to the attributes that mlx-vlm's models read (`offset`, `_idx`, `make_mask`,
`update_and_fetch`), and must not grow `extract` or `merge`: with them the Qwen3.5 model would run
the batch row by row. `tests/model/test_mlx_vlm_contract.py` tests that contract.
"""

from collections.abc import Callable, Sequence
from inspect import getclosurevars
from typing import Any, Self, TypeAlias

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache
from mlx_vlm.models.gated_delta import compute_g, gated_delta_kernel, gated_delta_ops

# Other modules import mlx-vlm's caches from here.
__all__ = ["ArraysCache", "ChunkedKVCache", "KVCache", "RotatingKVCache"]

MIN_SLOTS = 256
STEP_TOKENS = 16
"""Maximum tokens of one step: a draft and the token after it."""
CAPACITIES_PER_DOUBLING = 4
"""Capacities between a power of two and the next: few shapes, and less than a quarter unused."""
_KERNEL_WIDTH = 32
"""Metal's kernel of the gated delta rule takes keys whose width is a multiple of this."""


class RowCache:
    """Keys and values of shape [rows, heads, slots, head width], with one cursor a row."""

    left_padding = None  # rows start at slot 0: the models must not look for padding

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array) -> None:
        self.keys = keys
        self.values = values
        self.offset = offset
        """[rows]: the cursors."""

    # What the models read.

    @property
    def _idx(self) -> int:
        return self.slots

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Return the arrays that an evaluation has to cover."""
        return self.keys, self.values

    @state.setter
    def state(self, arrays: Sequence[mx.array]) -> None:
        self.keys, self.values = arrays

    def empty(self) -> bool:
        """Return False: a joined row always holds tokens."""
        return False

    def make_mask(
        self,
        N: int,  # noqa: N803  # mlx-vlm's name
        window_size: int | None = None,
        **_: object,
    ) -> mx.array:
        """Mask all but a row's own slots up to query i, for each query: [rows, 1, N, slots].

        With `window_size`, the query sees that many tokens, itself included.
        """
        queries = self._slots_behind(N)[:, None, :, None]
        slots = mx.arange(self.slots)[None, None, None]
        visible = slots <= queries
        return visible if window_size is None else visible & (slots > queries - window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [rows, heads, L, width] at every row's cursor; return all slots.

        The caller must have reserved the slots: the device does not know how many are needed.
        """
        length = keys.shape[2]
        at = self._slots_behind(length)[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(at, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(
            self.values, mx.broadcast_to(at, values.shape), values, axis=2
        )
        self.offset = self.offset + length
        return self.keys, self.values

    def _slots_behind(self, length: int) -> mx.array:
        """Return the next slots [rows, length] of every row."""
        return self.offset[:, None] + mx.arange(length)

    # What the engine uses.

    @property
    def slots(self) -> int:
        """Return the capacity of every row."""
        return int(self.keys.shape[2])

    def reserve(self, tokens: int) -> None:
        """Grow to hold rows of up to `tokens` tokens."""
        if tokens > self.slots:
            self.resize(capacity(tokens))

    def extend(self, other: Self) -> None:
        """Append the rows of another cache."""
        slots = max(self.slots, other.slots)
        self.resize(slots)
        other.resize(slots)
        self.keys = mx.concatenate([self.keys, other.keys])
        self.values = mx.concatenate([self.values, other.values])
        self.offset = mx.concatenate([self.offset, other.offset])

    def filter(self, rows: mx.array) -> None:
        """Keep only the rows of these indices."""
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.offset = self.offset[rows]

    def shrink(self, tokens: int) -> None:
        """Give back the slots that rows of up to `tokens` tokens do not need."""
        self.resize(min(capacity(tokens), self.slots))

    def resize(self, slots: int) -> None:
        """Set the capacity of every row; it must not be below any cursor."""
        missing = slots - self.slots
        if missing < 0:
            self.keys, self.values = self.keys[:, :, :slots], self.values[:, :, :slots]
        elif missing:
            more = [(0, 0), (0, 0), (0, missing), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, more), mx.pad(self.values, more)


def capacity(tokens: int) -> int:
    """Return the number of slots to reserve for `tokens` tokens: up to a quarter more."""
    step = _step(tokens)
    return -(-tokens // step) * step


def capacity_within(slots: int) -> int:
    """Return the largest capacity of at most `slots` slots."""
    return slots // _step(slots) * _step(slots)


def _step(tokens: int) -> int:
    step = MIN_SLOTS
    while tokens > step * 2 * CAPACITIES_PER_DOUBLING:
        step *= 2
    return step


History: TypeAlias = tuple[mx.array, ...]
"""What is known of one slot over L > 1 tokens: `(source,)` [rows, width + L, ...] of a window, the
`(between, final)` states [rows, L - 1, ...] after all tokens but the last, and [rows, ...], or the
state before them [rows, ...] with the keys, values, decays and rates [rows, L, ...] of each."""


class NoHistory(Exception):
    """A pass over several tokens has left no states to roll back to."""


class RecurrentCache:
    """The slots of one recurrent layer, [rows, ...] each, during one pass over L tokens."""

    lengths = None
    left_padding = None

    def __init__(self, slots: Sequence[mx.array]) -> None:
        self._slots = list(slots)
        self._history: dict[int, History] = {}

    def __getitem__(self, index: int) -> mx.array:
        return self._slots[index]

    def __setitem__(self, index: int, state: mx.array) -> None:
        self._slots[index] = state

    def update_window(
        self,
        index: int,
        source: mx.array,
        width: int,
        *,
        lengths: object = None,  # noqa: ARG002
    ) -> mx.array:
        """Store the tokens that a causal window passes over, including those before the pass."""
        self._history[index] = (source,)
        self._slots[index] = source[:, source.shape[1] - width :]
        return self._slots[index]

    def update_recurrent(
        self, index: int, length: int, update: Callable[[mx.array, int | None], Any]
    ) -> tuple[mx.array, mx.array]:
        """Run a state transition over `length` tokens; return its output and the last state.

        mlx-vlm's gated delta rule is a closure over its inputs.
        """
        before = self._slots[index]
        # Where no kernel computes the tokens in their order, one that is asked for a state does.
        output, final, *_ = update(before, 1 if length > 1 and not _on_metal() else None)
        self._slots[index] = final
        if length > 1:
            inputs = getclosurevars(update).nonlocals
            decays = compute_g(inputs["A_log"], inputs["a"], inputs["dt_bias"])
            rates = mx.sigmoid(inputs["b"])
            self._history[index] = (before, inputs["k"], inputs["v"], decays, rates)
        return output, final

    def advance(self, steps: int) -> None:
        """Do nothing: rows without padding need no advance."""

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Return the state after the last token."""
        return tuple(self._slots)

    def history(self) -> list[History]:
        """Return the history of every slot; raise `NoHistory` where an operator left none."""
        if len(self._history) < len(self._slots):
            raise NoHistory("a recurrent layer of the family keeps no history of its states")
        return [self._history[index] for index in range(len(self._slots))]


def stack_history(steps: Sequence[tuple[mx.array, ...]]) -> list[History]:
    """Return the history of every slot, given all slots after one token and the next."""
    slots = map(list, zip(*steps, strict=True))
    return [(mx.stack(states[:-1], axis=1), states[-1]) for states in slots]


def state_after(history: History, tokens: mx.array, length: int) -> mx.array:
    """Return, for every row, the state after its first `tokens[row]` of the `length` tokens."""
    if len(history) == 1:
        (source,) = history
        at = tokens[:, None] + mx.arange(source.shape[1] - length)
        return mx.take_along_axis(source, _spread(at, source.ndim), axis=1)
    if len(history) > 2:
        before, keys, values, decays, rates = history
        fused = _on_metal() and keys.shape[-1] % _KERNEL_WIDTH == 0
        replay = gated_delta_kernel if fused else gated_delta_ops
        kept = mx.arange(length) < tokens[:, None]
        # Keys stand for queries: the output is of no use.
        return replay(keys, keys, values, decays, rates, before, kept)[1]
    between, final = history
    at = mx.minimum(tokens, length - 1)[:, None] - 1
    picked = mx.take_along_axis(between, _spread(at, between.ndim), axis=1).squeeze(1)
    return mx.where(_spread(tokens == length, final.ndim), final, picked)


def _on_metal() -> bool:
    return bool(mx.metal.is_available() and mx.default_device() == mx.gpu)


def _spread(array: mx.array, dimensions: int) -> mx.array:
    return array.reshape(*array.shape, *([1] * (dimensions - array.ndim)))


LayerCache: TypeAlias = RowCache | KVCache | RotatingKVCache | ChunkedKVCache | ArraysCache
"""The cache of one layer: that of a batch, or the family's own while a prompt is read."""
