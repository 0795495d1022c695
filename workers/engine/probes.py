"""Can this checkpoint verify several tokens in one pass? Asked once, at load.

It takes recurrent layers that tell the state behind every token of a pass. Where they do not, the
tokens go in one by one (`step_graph.py`): as exact, and as slow as not drafting at all, which the
lane then finds out by itself. (The idea of vLLM #36982: ask for the capability, and have a way
without it.)

May rows of this model share a forward pass? Asked once, at load.

A batch hands the attention all slots of its caches and tells lengths as an array of cursors
(`kv_cache.py`). Not every family is made for that: some cut the mask to what one row has written
and raise, some take a row's position from the slots and answer nonsense. Their rows decode one by
one then, in the caches that the family makes itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from workers.engine.kv_cache import RowCache, capacity
from workers.engine.model import KVCache, LayerCache, Target
from workers.engine.step_graph import State, StepGraph

logger = logging.getLogger(__name__)
_PROMPT_TOKENS = 12
_VERIFIED = 4
_NOISE = 0.2
"""Of what four tokens more change in the next scores: far more than other kernels do in bfloat16,
far less than a state that was not rolled back."""


def probe_native_verify(target: Target) -> bool:
    """Say whether a rejected draft leaves this model as if it had never been seen.

    Appends some tokens in one pass, keeps one, and compares the next scores with those of a model
    that saw that one alone, and of one that kept them all. Must run on the engine thread.
    """
    graph = StepGraph(target, head=None)
    try:
        never_seen = _scores_after(graph, target, verified=1, kept=1)
        rejected = _scores_after(graph, target, verified=_VERIFIED, kept=1)
        accepted = _scores_after(graph, target, verified=_VERIFIED, kept=_VERIFIED)
    except Exception as error:  # whatever a family raises, the answer is no
        logger.warning("verify.not_native", exc_info=error)
        return False
    trace = mx.abs(rejected - never_seen).max() / mx.abs(accepted - never_seen).max()
    return bool(trace.item() < _NOISE)


def _scores_after(graph: StepGraph, target: Target, *, verified: int, kept: int) -> mx.array:
    offset = mx.array([_PROMPT_TOKENS])
    shift = mx.zeros_like(offset)
    tokens = mx.arange(_PROMPT_TOKENS, _PROMPT_TOKENS + verified, dtype=mx.int32)[None]
    seen = graph.verify(tokens, _read_prompt(target), offset, shift)
    state = seen.state
    if verified > 1:
        state = graph.roll_back(seen.layers, mx.array([kept]), verified)
    following = mx.array([[_PROMPT_TOKENS + 1]], dtype=mx.int32)
    return graph.verify(following, state, offset + kept, shift).scores.astype(mx.float32)


def _read_prompt(target: Target) -> State:
    tokens = mx.arange(_PROMPT_TOKENS, dtype=mx.int32)[None]
    caches = target.new_caches()
    target.forward(tokens, caches, tokens)
    state: State = []
    for cache in caches:
        if isinstance(cache, KVCache):
            rows = RowCache(cache.keys, cache.values, mx.array([cache.offset]))
            rows.resize(capacity(_PROMPT_TOKENS + _VERIFIED + 1))
            state.append(rows.state)
        else:
            state.append(tuple(cache.state))
    return state


_PROMPTS_TOKENS = (12, 5)
_NOISE_shared_rows = 0.1
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
    if share < _NOISE_shared_rows:
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
