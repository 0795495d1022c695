"""May rows of this model share a forward pass? Asked once, at load.

A batch hands the attention all slots of its caches and tells lengths as an array of cursors
(`row_cache.py`). Not every family is made for that: some cut the mask to what one row has written
and raise, some take a row's position from the slots and answer nonsense. Their rows decode one by
one then, in the caches that the family makes itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from workers.engine.kv_cache import RowCache, capacity
from workers.engine.model import KVCache, LayerCache, Target

logger = logging.getLogger(__name__)

_PROMPTS_TOKENS = (12, 5)
_NOISE = 0.1
"""Of the distance between two prompts: far more than other kernels make, far less than a row that
is read at another's length."""


def probe_shared_rows(target: Target) -> bool:
    """Say whether rows score in one batch what each of them scores alone.

    Tried with one row and with two of different length. Must run on the engine thread.
    """
    try:
        alone = [_next_scores(target, _read(target, n), [n]) for n in _PROMPTS_TOKENS]
        expected = mx.concatenate(alone)
        one = _PROMPTS_TOKENS[:1]
        first = _next_scores(target, _shared(target, one), one)
        both = _next_scores(target, _shared(target, _PROMPTS_TOKENS), _PROMPTS_TOKENS)
    except Exception as error:  # whatever a family raises, the answer is no
        logger.warning("rows.not_shared", exc_info=error)
        return False
    distance = mx.abs(expected[0] - expected[1]).max()
    apart = mx.maximum(mx.abs(first - expected[:1]).max(), mx.abs(both - expected).max())
    share = (apart / distance).item()
    if share < _NOISE:
        return True
    logger.warning("rows.not_shared scores are %.2f apart", share)
    return False


def _read(target: Target, tokens: int) -> list[LayerCache]:
    caches = target.new_caches()
    positions = mx.arange(tokens, dtype=mx.int32)[None]
    target.forward(positions + tokens, caches, positions)
    return caches


def _shared(target: Target, prompts_tokens: Sequence[int]) -> list[LayerCache]:
    """Read prompts of so many tokens, and put them in one batch."""
    batch, *others = [[_opened(cache) for cache in _read(target, n)] for n in prompts_tokens]
    for other in others:
        for mine, new in zip(batch, other, strict=True):
            (mine.join if isinstance(mine, RowCache) else mine.extend)(new)
    return batch


def _opened(cache: LayerCache) -> LayerCache:
    if not isinstance(cache, KVCache):
        return cache
    rows = RowCache(cache.keys, cache.values, mx.array([cache.offset], dtype=mx.int32))
    rows.resize(capacity(cache.offset + 1))
    return rows


def _next_scores(
    target: Target, caches: Sequence[LayerCache], prompts_tokens: Sequence[int]
) -> mx.array:
    """Append one token to every row; return the scores behind it: [rows, vocabulary]."""
    positions = mx.array([[tokens] for tokens in prompts_tokens], dtype=mx.int32)
    scores = target.scores(target.forward(mx.ones_like(positions), caches, positions))
    return scores[:, -1].astype(mx.float32)
