"""Device side of a step as pure functions of arrays, compiled once for each shape.

The host that launches the operations limits a small model on a fast machine, not the device:
compiled, a verify of three tokens costs as much as an uncompiled plain step. Compilation needs
shapes that do not change from step to step: caches return all their slots (`kv_cache.py`), cursors
and counts stay on the device, and the device rolls back rejected tokens itself. The host reads the
accepted tokens while the device already computes the next state.

States are lists of layers: `(keys, values)` of an attention, the slots of a recurrent layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import mlx.core as mx

from workers.engine.kv_cache import History, RecurrentCache, RowCache, stack_history, state_after
from workers.engine.model import KVCache, LayerCache, MtpHead, Target
from workers.engine.windows import FamilyWindow, open_window

F = TypeVar("F")
LayerState: TypeAlias = tuple[mx.array, ...]
State: TypeAlias = list[LayerState]
Layers: TypeAlias = list[LayerState | list[History]]
"""A state after L more tokens; where L > 1 recurrent layers have their histories instead."""


class VerifyResult(NamedTuple):
    """Output of the target for L tokens of every row."""

    scores: mx.array
    """[rows, L, vocabulary]."""
    hidden: mx.array | None
    """[rows, L, width]; None if the target returns none."""
    layers: Layers

    @property
    def state(self) -> State:
        """Return the state after a verify of one token, which needs no rollback."""
        return cast("State", self.layers)


class StepGraph:
    """Draft, verify and commit of a target, with or without its head."""

    def __init__(self, target: Target, head: MtpHead | None, *, compiled: bool = True) -> None:
        """Create the graph of a target whose forward pass reads no value on the host.

        One that does is not compiled, and has no head.
        """
        self.head = head
        self._target = target
        self._layers = target.new_caches()
        self._attends = [isinstance(cache, KVCache | FamilyWindow) for cache in self._layers]
        self.draft = _compile(self._trace_draft)
        self._verify = _compile(self._trace_verify) if compiled else self._trace_verify
        self.commit = _compile(self._trace_commit)
        self.settle = _compile(self._trace_settle) if compiled else self._trace_settle

    def verify(
        self, tokens: mx.array, state: State, offset: mx.array, position_shift: mx.array
    ) -> VerifyResult:
        """Run tokens [rows, L] through the target, at every row's cursor."""
        scores, hidden, layers = self._verify(tokens, state, offset, position_shift)
        return VerifyResult(scores, hidden if self._target.explicit_positions else None, layers)

    def attention_state(self, layers: Layers, caches: Sequence[LayerCache]) -> State:
        """Return the new states of the attention layers, and the old ones of the others."""
        return [
            tuple(layer) if attends else tuple(cache.state)
            for attends, layer, cache in zip(self._attends, layers, caches, strict=True)
        ]

    def roll_back(self, layers: Layers, kept: mx.array, length: int) -> State:
        """Return the state after the first `kept[row]` of `length` verified tokens."""
        return [
            tuple(layer) if attends else tuple(state_after(slot, kept, length) for slot in layer)
            for attends, layer in zip(self._attends, layers, strict=True)
        ]

    # --- compiled: these read no value, and return nothing but arrays -----------------------

    def _trace_draft(
        self, seed_hidden: mx.array, head_state: State, offset: mx.array, length: int
    ) -> tuple[mx.array, State]:
        """Draft the next `length` tokens: [rows, length]; return the head's new caches too."""
        assert self.head is not None
        caches = [RowCache(keys, values, offset) for keys, values in head_state]
        hidden, drafts = seed_hidden, [self.head.draft(seed_hidden)]
        while len(drafts) < length:
            position = caches[0].offset[:, None]
            hidden = self.head.forward(drafts[-1][:, None], hidden, caches, position)
            drafts.append(self.head.draft(hidden))
        return mx.stack(drafts, axis=1), [cache.state for cache in caches]

    def _trace_verify(
        self, tokens: mx.array, state: State, offset: mx.array, position_shift: mx.array
    ) -> tuple[mx.array, mx.array, Layers]:
        length = tokens.shape[1]
        positions = (offset + position_shift)[:, None] + mx.arange(length, dtype=mx.int32)
        if length == 1 or self._target.native_verify:
            caches = self._open(state, offset)
            hidden = self._target.forward(tokens, caches, positions)
            layers = [
                cache.history() if isinstance(cache, RecurrentCache) and length > 1 else cache.state
                for cache in caches
            ]
            return self._target.scores(hidden), hidden, layers
        return self._trace_one_by_one(tokens, state, offset, positions)

    def _trace_one_by_one(
        self, tokens: mx.array, state: State, offset: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array, Layers]:
        """Verify with one pass per token, where the layers record no history within a pass."""
        steps: list[State] = []
        hidden, scores = [], []
        for at in range(tokens.shape[1]):
            caches = self._open(steps[-1] if steps else state, offset + at)
            one = slice(at, at + 1)
            hidden.append(self._target.forward(tokens[:, one], caches, positions[:, one]))
            scores.append(self._target.scores(hidden[-1]))
            steps.append([cache.state for cache in caches])
        layers = [
            after[-1] if attends else stack_history(after)
            for attends, after in zip(self._attends, zip(*steps, strict=True), strict=True)
        ]
        return mx.concatenate(scores, axis=1), mx.concatenate(hidden, axis=1), layers

    def _trace_commit(
        self,
        layers: Layers,
        hidden: mx.array,
        chosen: mx.array,
        drafted: tuple[mx.array, mx.array],
        head: tuple[State, mx.array],
    ) -> tuple[mx.array, mx.array, State, State, mx.array]:
        """Accept the matching draft tokens row by row, and roll back the others.

        `chosen` is [rows, k + 1]; `drafted` the drafts [rows, k] and their lengths [rows]; `head`
        the head's caches and their cursors [rows]. Returns the number of accepted tokens [rows],
        the token after them [rows], which is in no cache yet, the states of the target and of the
        head, and the head's hidden state [rows, 1, width] that drafts the next token.
        """
        assert self.head is not None
        accepted, last_tokens, state = self._trace_settle(layers, chosen, drafted)
        head_state, offset = head
        length = chosen.shape[1]
        # The head's states for its own drafts are replaced by those for the target's choices. It
        # also reads the choices after a row's last token, which the row's cursor then excludes: one
        # pass for all rows costs less than one per row.
        caches = [RowCache(keys, values, offset) for keys, values in head_state]
        positions = offset[:, None] + mx.arange(length, dtype=mx.int32)
        read = self.head.forward(chosen, hidden, caches, positions)
        seed_hidden = mx.take_along_axis(read, accepted[:, None, None], axis=1)
        return accepted, last_tokens, state, [cache.state for cache in caches], seed_hidden

    def _trace_settle(
        self, layers: Layers, chosen: mx.array, drafted: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array, State]:
        """Accept and roll back as `_trace_commit` does, for a batch that has no head."""
        drafts, limits = drafted
        length = chosen.shape[1]
        within_limit = mx.arange(length - 1)[None] < limits[:, None]
        matches = mx.logical_and(drafts == chosen[:, :-1], within_limit)
        accepted = mx.cumprod(matches.astype(mx.int32), axis=1).sum(axis=1)
        last_tokens = mx.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
        return accepted, last_tokens, self.roll_back(layers, accepted + 1, length)

    def _open(self, state: State, offset: mx.array) -> list[RowCache | RecurrentCache]:
        return [
            _open_layer(cache, layer, offset)
            for cache, layer in zip(self._layers, state, strict=True)
        ]


def _open_layer(
    cache: LayerCache, state: LayerState, offset: mx.array
) -> RowCache | RecurrentCache:
    if isinstance(cache, FamilyWindow):
        return open_window(cache, state[0], state[1], offset)
    if isinstance(cache, KVCache):
        return RowCache(state[0], state[1], offset)
    return RecurrentCache(state)


def _compile(function: F) -> F:
    """Compile a function; mypy cannot read the type that MLX gives the result."""
    return mx.compile(function)
