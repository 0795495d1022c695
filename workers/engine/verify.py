"""Run the last token and a draft through the target, then keep what each row accepts.

Where model and caches can do it, all of it is one forward pass: recurrent caches record the state
behind every token on the way (mlx-vlm's cache transaction). Where they cannot, the tokens go in one
by one and the states are collected here: as exact, and as slow as not drafting at all, which the
lane then finds out by itself. `probe_native_verify` tells which it is, at load, for the very
checkpoint (the idea of vLLM #36982: ask for the capability, and have a way without it).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from workers.engine.row_cache import RowCache
from workers.engine.seam import (
    ArraysCache,
    Forward,
    KVCache,
    LayerCache,
    Target,
    start_speculative_cache,
)

logger = logging.getLogger(__name__)

_PROBE_PROMPT_TOKENS = 12
_PROBE_DRAFT_TOKENS = 3
_NOISE = 0.05
"""Difference of scores, relative to the largest, that other kernels may make in bfloat16."""


class Verify:
    """One verify of a batch: `run` it, then `keep` a number of tokens row by row."""

    def __init__(self, target: Target, caches: Sequence[LayerCache], *, native: bool) -> None:
        self._target = target
        self._caches = caches
        self._native = native
        self._transaction = None
        self._recorded: list[list[list[mx.array]]] = []
        """States of the recurrent caches behind every single step."""

    def run(self, tokens: mx.array, positions: mx.array) -> Forward:
        """Append tokens [rows, L] to the caches and return what the target makes of them."""
        length = tokens.shape[1]
        if length == 1:  # always kept: no record needed
            return self._target.forward(tokens, self._caches, positions)
        if self._native:
            self._transaction = start_speculative_cache(self._caches, length)
            return self._target.forward(tokens, self._caches, positions)
        return self._one_by_one(tokens, positions)

    def keep(self, kept: Sequence[int]) -> None:
        """Keep the first `kept[row]` tokens of what `run` appended."""
        if self._transaction is not None:
            self._transaction.commit(list(kept))
            return
        for cache in self._caches:
            if isinstance(cache, RowCache):
                cache.advance(kept)
        for index, cache in enumerate(self._recurrent()):
            if self._recorded:
                steps = [states[index] for states in self._recorded]
                cache.state = [_pick(list(slot), kept) for slot in zip(*steps, strict=True)]

    def _one_by_one(self, tokens: mx.array, positions: mx.array) -> Forward:
        parts = []
        for at in range(tokens.shape[1]):
            parts.append(
                self._target.forward(
                    tokens[:, at : at + 1], self._caches, positions[:, at : at + 1]
                )
            )
            self._recorded.append([list(cache.state) for cache in self._recurrent()])
        return Forward(
            hidden=_joined([part.hidden for part in parts]),
            scores=_joined([part.scores for part in parts]),
        )

    def _recurrent(self) -> list[ArraysCache]:
        return [cache for cache in self._caches if isinstance(cache, ArraysCache)]


def probe_native_verify(target: Target) -> bool:
    """Say whether a rejected draft leaves this model as if it had never been seen.

    Appends three tokens in one pass, keeps one, and compares the next scores with those of a cache
    that saw that one alone. Must run on the engine thread.
    """
    try:
        expected = _scores_after(target, rejected=0)
        got = _scores_after(target, rejected=_PROBE_DRAFT_TOKENS - 1)
    except Exception as error:  # whatever a family raises, the answer is no
        logger.warning("verify.not_native", exc_info=error)
        return False
    difference = mx.abs(expected - got).max() / mx.abs(expected).max()
    return bool(difference.item() < _NOISE)


def _scores_after(target: Target, rejected: int) -> mx.array:
    tokens = mx.arange(_PROBE_PROMPT_TOKENS, dtype=mx.int32)[None]
    fresh = target.new_caches()
    target.forward(tokens, fresh, tokens)
    caches: list[LayerCache] = [
        RowCache([cache.offset], cache.keys, cache.values) if isinstance(cache, KVCache) else cache
        for cache in fresh
    ]
    end = _PROBE_PROMPT_TOKENS
    appended = mx.arange(end, end + 1 + rejected, dtype=mx.int32)[None]
    verify = Verify(target, caches, native=True)
    verify.run(appended, appended)
    verify.keep([1])
    following = mx.array([[end + 1]], dtype=mx.int32)
    return target.scores(target.forward(following, caches, following)).astype(mx.float32)


def _joined(parts: Sequence[mx.array | None]) -> mx.array | None:
    arrays = [part for part in parts if part is not None]
    return mx.concatenate(arrays, axis=1) if arrays else None


def _pick(states: list[mx.array], kept: Sequence[int]) -> mx.array:
    """Take, for every row, the state behind its last kept token."""
    return mx.concatenate([states[count - 1][row : row + 1] for row, count in enumerate(kept)])
