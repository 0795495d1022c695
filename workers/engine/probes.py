"""Can this checkpoint verify several tokens in one pass? Asked once, at load.

It takes recurrent layers that tell the state behind every token of a pass. Where they do not, the
tokens go in one by one (`round_graph.py`): as exact, and as slow as not drafting at all, which the
lane then finds out by itself. (The idea of vLLM #36982: ask for the capability, and have a way
without it.)
"""

from __future__ import annotations

import logging

import mlx.core as mx

from workers.engine.kv_cache import RowCache, capacity
from workers.engine.model import KVCache, Target
from workers.engine.step_graph import RoundGraph, State

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
    graph = RoundGraph(target, head=None)
    try:
        never_seen = _scores_after(graph, target, verified=1, kept=1)
        rejected = _scores_after(graph, target, verified=_VERIFIED, kept=1)
        accepted = _scores_after(graph, target, verified=_VERIFIED, kept=_VERIFIED)
    except Exception as error:  # whatever a family raises, the answer is no
        logger.warning("verify.not_native", exc_info=error)
        return False
    trace = mx.abs(rejected - never_seen).max() / mx.abs(accepted - never_seen).max()
    return bool(trace.item() < _NOISE)


def _scores_after(graph: RoundGraph, target: Target, *, verified: int, kept: int) -> mx.array:
    offset = mx.array([_PROMPT_TOKENS])
    shift = mx.zeros_like(offset)
    tokens = mx.arange(_PROMPT_TOKENS, _PROMPT_TOKENS + verified, dtype=mx.int32)[None]
    seen = graph.verify(tokens, _read_prompt(target), offset, shift)
    state = seen.state
    if verified > 1:
        state = graph.keep(seen.layers, mx.array([kept]), verified)
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
