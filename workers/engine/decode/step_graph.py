"""Device side of a step as pure functions of arrays, compiled for each shape.

The host that launches the operations limits a small model on a fast machine, not the device:
compiled, a verify of three tokens costs as much as an uncompiled plain step. Compilation needs
shapes that do not change from step to step: caches return all their slots (`kv_cache.py`), cursors
and counts stay on the device, and the device rolls back rejected tokens itself. The host reads the
accepted tokens while the device already computes the next state.

States are lists of layers: `(keys, values)` of an attention, the slots of a recurrent layer.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import mlx.core as mx

from workers.engine.model.kv_cache import (
    History,
    KVCache,
    LayerCache,
    RecurrentCache,
    RowCache,
    stack_history,
    state_after,
)
from workers.engine.model.mtp_head import AssistantHead, MtpHead
from workers.engine.model.target import CompiledPasses, Target
from workers.engine.model.windows import FamilyWindow, open_window

P = ParamSpec("P")
R = TypeVar("R")
COMPILED_STEPS = 64
"""Functions that a graph keeps compiled, each for one shape: rows, tokens and slots. Eight streams
of one lane use 81 within 1,200 calls, and compile 7% more often than if all were kept."""
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
    """Draft, verify and commit of a target, with or without its head; all lanes share one.

    The methods `_draft` to `_commit` are compiled: they read no value, and return only arrays.
    """

    def __init__(
        self, target: Target, head: MtpHead | None, *, compiles: CompiledPasses | None = None
    ) -> None:
        """Create the graph of a target; `compiles` replaces what is known of its passes."""
        self.head = head
        self._target = target
        self._layers = target.new_caches()
        self._attends = [isinstance(cache, KVCache | FamilyWindow) for cache in self._layers]
        self._compiles = target.compiles if compiles is None else compiles
        self._steps = steps = CompiledSteps()
        self.draft = steps.compiled(self._draft)
        self._compiled_verify = steps.compiled(self._verify)
        self.settle = steps.compiled(self._settle)
        self.commit = steps.compiled(self._commit)

    def forget(self) -> None:
        """Compile everything anew: weights have been replaced."""
        self._steps.clear()

    def verify(
        self, tokens: mx.array, state: State, offset: mx.array, position_shift: mx.array
    ) -> VerifyResult:
        """Run tokens [rows, L] through the target, at every row's cursor."""
        one = tokens.shape[1] == 1
        compiled = self._compiles.plain if one else self._compiles.verify
        verify = self._compiled_verify if compiled else self._verify
        scores, hidden, layers = verify(tokens, state, offset, position_shift)
        return VerifyResult(scores, hidden if self._target.returns_hidden else None, layers)

    def attended_state(self, caches: Sequence[LayerCache]) -> State:
        """Return the states of the target's layers that the head reads."""
        layers = self.head.attended_layers if isinstance(self.head, AssistantHead) else ()
        return [tuple(caches[layer].state) for layer in layers]

    def split(self, layers: Layers, caches: Sequence[LayerCache]) -> tuple[State, Layers]:
        """Return the state with the attention layers after a verify, and the other layers.

        The state has the recurrent layers as the caches have them.
        """
        parts = list(zip(self._attends, layers, caches, strict=True))
        state = [tuple(layer) if attends else tuple(cache.state) for attends, layer, cache in parts]
        return state, [layer for attends, layer, _ in parts if not attends]

    def join(self, caches: Sequence[LayerCache], recurrent: Layers) -> Layers:
        """Return the attention layers that caches hold, between those that are none."""
        others = iter(recurrent)
        return [
            tuple(cache.state) if attends else next(others)
            for attends, cache in zip(self._attends, caches, strict=True)
        ]

    def roll_back(self, layers: Layers, kept: mx.array, length: int) -> State:
        """Return the state after the first `kept[row]` of `length` verified tokens."""
        return [
            tuple(layer) if attends else tuple(state_after(slot, kept, length) for slot in layer)
            for attends, layer in zip(self._attends, layers, strict=True)
        ]

    def _draft(
        self,
        seed: tuple[mx.array, mx.array, mx.array],
        head_state: State,
        attended: State,
        offset: mx.array,
        length: int,
    ) -> tuple[mx.array, State]:
        """Draft the next `length` tokens: [rows, length]; return the head's new caches too.

        `seed` is the hidden state [rows, 1, width] that the head begins with, the last token
        [rows], and the tokens [rows, n] that it drafts beside its shortlist, none if it drafts over
        all; `attended` are the states of the target's layers that the head reads.
        """
        assert self.head is not None
        hidden, last_tokens, further = seed
        if isinstance(self.head, AssistantHead):
            read = [
                _open_attention(self._layers[layer], state, offset)
                for layer, state in zip(self.head.attended_layers, attended, strict=True)
            ]
            return mx.stack(self.head.draft_tokens(hidden, last_tokens, read, length), axis=1), []
        caches = [RowCache(keys, values, offset) for keys, values in head_state]
        drafts = [self.head.draft(hidden, further)]
        while len(drafts) < length:
            position = caches[0].offset[:, None]
            hidden = self.head.forward(drafts[-1][:, None], hidden, caches, position)
            drafts.append(self.head.draft(hidden, further))
        return mx.stack(drafts, axis=1), [cache.state for cache in caches]

    def _verify(
        self, tokens: mx.array, state: State, offset: mx.array, position_shift: mx.array
    ) -> tuple[mx.array, mx.array, Layers]:
        """Verify in one pass, or one per token where the layers record no history within a pass."""
        length = tokens.shape[1]
        positions = (offset + position_shift)[:, None] + mx.arange(length, dtype=mx.int32)
        if length == 1 or self._target.native_verify:
            caches = self._open(state, offset)
            output = self._target.forward(tokens, caches, positions)
            layers = [
                cache.history() if isinstance(cache, RecurrentCache) and length > 1 else cache.state
                for cache in caches
            ]
            return self._target.scores(output), output, layers
        steps: list[State] = []
        hidden, scores = [], []
        for at in range(length):
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

    def _settle(
        self, layers: Layers, chosen: mx.array, drafted: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array, State]:
        """Accept some of the drafts [rows, k], of which [rows] count, and roll back the others.

        Returns the number of accepted tokens [rows], the token after them [rows], which is in no
        cache yet, and the state of the target.
        """
        accepted, last_tokens = accept_drafts(*drafted, chosen)
        return accepted, last_tokens, self.roll_back(layers, accepted + 1, chosen.shape[1])

    def _commit(
        self,
        layers: Layers,
        hidden: mx.array,
        chosen: mx.array,
        drafted: tuple[mx.array, mx.array],
        head: tuple[State, mx.array],
    ) -> tuple[mx.array, mx.array, State, State, mx.array]:
        """Settle the drafts of a head, given its caches and their cursors [rows].

        Returns the state of the head too, and its hidden state [rows, 1, width] that drafts the
        next token.
        """
        assert self.head is not None
        accepted, last_tokens, state = self._settle(layers, chosen, drafted)
        head_state, offset = head
        # The head's states for its own drafts are replaced by those for the target's choices. It
        # also reads the choices after a row's last token, which the row's cursor then excludes: one
        # pass for all rows costs less than one per row.
        caches = [RowCache(keys, values, offset) for keys, values in head_state]
        positions = offset[:, None] + mx.arange(chosen.shape[1], dtype=mx.int32)
        read = self.head.forward(chosen, hidden, caches, positions)
        seed_hidden = mx.take_along_axis(read, accepted[:, None, None], axis=1)
        return accepted, last_tokens, state, [cache.state for cache in caches], seed_hidden

    def _open(self, state: State, offset: mx.array) -> list[RowCache | RecurrentCache]:
        return [
            _open_attention(cache, layer, offset) if attends else RecurrentCache(layer)
            for attends, cache, layer in zip(self._attends, self._layers, state, strict=True)
        ]


def accept_drafts(
    drafts: mx.array, limits: mx.array, chosen: mx.array
) -> tuple[mx.array, mx.array]:
    """Return how many drafts of each row are accepted, and the token after them: [rows] each.

    `drafts` is [rows, k], of which the first `limits` [rows] are drafted; `chosen` [rows, k + 1]
    are the target's choices at every position, by the row's own sampling rules. A draft is accepted
    where it equals the choice, up to the first that does not (Leviathan et al. 2023, arXiv
    2211.17192, for a draft of the likeliest tokens): so every row gets the tokens that it would get
    without speculation, whatever its sampler.
    """
    within_limit = mx.arange(drafts.shape[1])[None] < limits[:, None]
    matches = mx.logical_and(drafts == chosen[:, :-1], within_limit)
    accepted = mx.cumprod(matches.astype(mx.int32), axis=1).sum(axis=1)
    return accepted, mx.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]


def _open_attention(cache: LayerCache, state: LayerState, offset: mx.array) -> RowCache:
    if isinstance(cache, FamilyWindow):
        return open_window(cache, state[0], state[1], offset)
    return RowCache(state[0], state[1], offset)


class CompiledSteps:
    """Functions that MLX compiles for each shape of their arguments, up to `COMPILED_STEPS`.

    MLX keeps what it has compiled for as long as it has the function, and that takes about 0.13 MB
    for each layer of a model: hundreds of shapes take gigabytes. So each shape of each function is
    a function of its own, and the least recently used is dropped.
    """

    def __init__(self) -> None:
        # MLX knows a function by its address.
        self._compile = lru_cache(COMPILED_STEPS)(lambda function, _: mx.compile(partial(function)))

    def compiled(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, which reads no value and returns only arrays, as compiled."""

        def run(*arguments: P.args, **named: P.kwargs) -> R:
            compiled: Callable[P, R] = self._compile(function, _shape_of(arguments))
            return compiled(*arguments, **named)

        return run

    def clear(self) -> None:
        """Keep nothing any more."""
        self._compile.cache_clear()

    def __len__(self) -> int:
        return self._compile.cache_info().currsize


def _shape_of(argument: object) -> object:
    """Return what tells the shapes of an argument from others.

    Of a list of layers the first and the last suffice: all have the same rows and slots, or do not
    change. A wrong guess only makes MLX compile two shapes for one function.
    """
    if isinstance(argument, mx.array):
        return argument.shape
    if isinstance(argument, list):
        return tuple(map(_shape_of, (*argument[:1], *argument[-1:])))
    return tuple(map(_shape_of, argument)) if isinstance(argument, tuple) else argument
