"""The device side of a round as pure functions of arrays, compiled once for each shape.

A small model on a fast machine is bound by the host that launches its operations, not by the
device: compiled, a verify of three tokens costs what an ordinary step costs uncompiled. It takes
shapes that do not change from round to round: caches hand out all their slots (`kv_cache.py`),
cursors and counts stay on the device, and what a row rejects is undone there too. So the host
learns what was accepted while the device already works on what follows from it.

States are lists of layers: `(keys, values)` of an attention, the slots of a recurrent layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

import mlx.core as mx

from workers.engine.kv_cache import History, RecurrentCache, RowCache, stack_history, state_after
from workers.engine.model import KVCache, MtpHead, Target

LayerState: TypeAlias = tuple[mx.array, ...]
State: TypeAlias = list[LayerState]
Layers: TypeAlias = list[LayerState | list[History]]
"""A state with L tokens appended; where L > 1 recurrent layers have their histories instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What the target made of L tokens a row."""

    scores: mx.array
    """[rows, L, vocabulary]."""
    hidden: mx.array
    """[rows, L, width]."""
    layers: Layers

    @property
    def state(self) -> State:
        """Return the state behind a single token: nothing of it can be undone."""
        return cast("State", self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """Where a round that drafted leaves the batch."""

    accepted: mx.array
    """[rows]: the drafts that the target would have chosen too, from the first on."""
    last: mx.array
    """[rows]: the token behind them, in no cache yet."""
    state: State
    head_state: State
    seed_hidden: mx.array
    """[rows, 1, width]: the head's state that drafts the next token."""


class StepGraph:
    """Drafts, verifies and settles for a Qwen3.5-like target, with its head or without one."""

    def __init__(self, target: Target, head: MtpHead | None) -> None:
        self.head = head
        self._target = target
        self._attends = [isinstance(cache, KVCache) for cache in target.new_caches()]
        self._draft = mx.compile(self._trace_draft)
        self._verify = mx.compile(self._trace_verify)
        self._commit = mx.compile(self._trace_commit)

    def draft(
        self, seed_hidden: mx.array, head_state: State, offset: mx.array, length: int
    ) -> tuple[mx.array, State]:
        """Let the head guess the next `length` tokens: [rows, length], and its caches with them."""
        drafts, state = self._draft(seed_hidden, head_state, offset, length)
        return drafts, state

    def verify(
        self, tokens: mx.array, state: State, offset: mx.array, position_shift: mx.array
    ) -> VerifyResult:
        """Run tokens [rows, L] through the target, behind every row's cursor."""
        scores, hidden, layers = self._verify(tokens, state, offset, position_shift)
        return VerifyResult(scores=scores, hidden=hidden, layers=layers)

    def commit(
        self,
        verified: VerifyResult,
        chosen: mx.array,
        drafted: tuple[mx.array, mx.array],
        head: tuple[State, mx.array],
    ) -> CommitResult:
        """Keep the drafts that were chosen, row by row; undo the others.

        `chosen` is [rows, k + 1]; `drafted` the drafts [rows, k] and how many of them count [rows];
        `head` the head's caches and their cursors [rows].
        """
        accepted, last, state, kept_head_state, seed_hidden = self._commit(
            verified.layers, verified.hidden, chosen, drafted, head
        )
        return CommitResult(
            accepted=accepted,
            last=last,
            state=state,
            head_state=kept_head_state,
            seed_hidden=seed_hidden,
        )

    def roll_back(self, layers: Layers, kept: mx.array, length: int) -> State:
        """Return the state behind the first `kept[row]` of `length` verified tokens."""
        return [
            tuple(layer) if attends else tuple(state_after(slot, kept, length) for slot in layer)
            for attends, layer in zip(self._attends, layers, strict=True)
        ]

    # --- what is compiled: no value is read, and nothing but arrays comes out ----------------

    def _trace_draft(
        self, seed_hidden: mx.array, head_state: State, offset: mx.array, length: int
    ) -> tuple[mx.array, State]:
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
            forward = self._target.forward(tokens, caches, positions)
            assert forward.hidden is not None
            layers = [
                cache.history() if isinstance(cache, RecurrentCache) and length > 1 else cache.state
                for cache in caches
            ]
            return self._target.scores(forward), forward.hidden, layers
        return self._trace_one_by_one(tokens, state, offset, positions)

    def _trace_one_by_one(
        self, tokens: mx.array, state: State, offset: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array, Layers]:
        """Verify where states behind each token of a pass are not to be had: a pass a token."""
        steps: list[State] = []
        hidden, scores = [], []
        for at in range(tokens.shape[1]):
            caches = self._open(steps[-1] if steps else state, offset + at)
            one = slice(at, at + 1)
            forward = self._target.forward(tokens[:, one], caches, positions[:, one])
            assert forward.hidden is not None
            hidden.append(forward.hidden)
            scores.append(self._target.scores(forward))
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
        assert self.head is not None
        drafts, limits = drafted
        head_state, head_offset = head
        length = chosen.shape[1]
        asked = mx.arange(length - 1)[None] < limits[:, None]
        matches = mx.logical_and(drafts == chosen[:, :-1], asked)
        accepted = mx.cumprod(matches.astype(mx.int32), axis=1).sum(axis=1)
        last = mx.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
        state = self.roll_back(layers, accepted + 1, length)
        # What the head stored for its own guesses is replaced by what the target really saw. The
        # choices behind a row's last one are read too and forgotten again, by its cursor: one pass
        # for all rows costs less than one a row.
        caches = [RowCache(keys, values, head_offset) for keys, values in head_state]
        positions = head_offset[:, None] + mx.arange(length, dtype=mx.int32)
        read = self.head.forward(chosen, hidden, caches, positions)
        seed_hidden = mx.take_along_axis(read, accepted[:, None, None], axis=1)
        return accepted, last, state, [cache.state for cache in caches], seed_hidden

    def _open(self, state: State, offset: mx.array) -> list[RowCache | RecurrentCache]:
        return [
            RowCache(layer[0], layer[1], offset) if attends else RecurrentCache(layer)
            for attends, layer in zip(self._attends, state, strict=True)
        ]
