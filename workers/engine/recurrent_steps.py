"""A recurrent cache that remembers, for one forward pass, the state behind every token of it.

It speaks the protocol of mlx-vlm's cache-aware operators (`update_window` for causal windows,
`update_recurrent` for state transitions): the operator knows how to produce states, the cache says
how many it wants and holds them. An operator that replaces a state without that protocol leaves no
history, which `history` refuses, and the family is then verified token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

History: TypeAlias = tuple[mx.array, ...]
"""What one slot went through over L > 1 tokens: `(source,)` [rows, width + L, ...] of a window, or
`(between, final)` of a state: [rows, L - 1, ...] behind all tokens but the last, and [rows, ...]"""


class RecurrentSteps:
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
        self, index: int, source: mx.array, width: int, *, lengths: object = None
    ) -> mx.array:
        """Take the tokens that a causal window moves over, those before it included."""
        self._history[index] = (source,)
        self._slots[index] = source[:, source.shape[1] - width :]
        return self._slots[index]

    def update_recurrent(
        self, index: int, length: int, update: Callable[[mx.array, int | None], Any]
    ) -> tuple[mx.array, mx.array]:
        """Run a state transition over `length` tokens; return its output and the last state."""
        output, final, *between = update(self._slots[index], length - 1 if length > 1 else None)
        if between:
            self._history[index] = (between[0], final)
        self._slots[index] = final
        return output, final

    def advance(self, steps: int) -> None:
        """Hear that tokens were read: rows here have no padding that would care."""

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Return the state behind the last token."""
        return tuple(self._slots)

    def history(self) -> list[History]:
        """Return the history of every slot; raise `KeyError` where an operator left none."""
        return [self._history[index] for index in range(len(self._slots))]


def history_of(steps: Sequence[tuple[mx.array, ...]]) -> list[History]:
    """Make histories of the slots as they were behind one token after another."""
    return [
        (mx.stack(states[:-1], axis=1), states[-1])
        for states in (list(slot) for slot in zip(*steps, strict=True))
    ]


def state_after(history: History, tokens: mx.array, length: int) -> mx.array:
    """Take, for every row, the state behind its first `tokens[row]` of the `length` tokens."""
    if len(history) == 1:
        (source,) = history
        at = tokens[:, None] + mx.arange(source.shape[1] - length)
        return mx.take_along_axis(source, _spread(at, source.ndim), axis=1)
    between, final = history
    at = mx.minimum(tokens, length - 1)[:, None] - 1
    picked = mx.take_along_axis(between, _spread(at, between.ndim), axis=1).squeeze(1)
    return mx.where(_spread(tokens == length, final.ndim), final, picked)


def _spread(array: mx.array, dimensions: int) -> mx.array:
    return array.reshape(*array.shape, *([1] * (dimensions - array.ndim)))
