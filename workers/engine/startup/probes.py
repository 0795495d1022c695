"""Capability probes of a checkpoint, run once at load, on the engine thread.

`probe_native_verify`: can the target verify several tokens in one pass? It needs recurrent layers
that record the state after every token of a pass. Without it tokens are verified one by one
(`step_graph.py`), which is exact and as slow as not drafting; the lane measures that and stops
drafting. (vLLM #36982 has the same idea: probe the capability, and have a fallback.)

`probe_shared_rows`: can rows of different lengths share a forward pass? A batch passes all slots of
its caches to the attention, and lengths as an array of cursors (`kv_cache.py`). Some families cut
the mask to the length of one row and raise, others take a row's position from the slots and compute
nonsense. Their rows decode one by one, in the family's own caches.

`probe_compiled_passes`: does a pass of a batch compute the same if it is compiled? MLX compiles
what it sees of one call. A family that reads a cursor on the host raises there, or goes on with the
value of that call; its passes stay uncompiled, and the host describes them anew each time.

`probe_cache_layout`: which arrays does a node of the prefix cache have? Nodes of other workers must
have the same.
"""

import logging
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from workers.engine.decode.batch import row_cache, set_states, states_of
from workers.engine.decode.step_graph import State, StepGraph
from workers.engine.model.kv_cache import LayerCache, NoHistory, RowCache
from workers.engine.model.mtp_head import MtpHead
from workers.engine.model.target import CompiledPasses, Target
from workers.engine.model.windows import FamilyWindow, window_tokens
from workers.engine.prefix.cache import MIN_TOKENS, PrefixCache
from workers.engine.prefix.transfer import CacheLayout
from workers.engine.prefix.tree import state_of

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = (12, 5)
_VERIFIED_TOKENS = 4
_NODE_BYTES = 1 << 62
"""Room for any node."""
_VERIFY_NOISE = 0.2
"""Relative to the effect of four more tokens on the next scores: far above the differences between
kernels in bfloat16, far below the effect of a state that was not rolled back."""
_COMPILED_PASSES = 3
_COMPILATION_NOISE = 0.1
"""Relative to the distance between the first and the last pass: far above what the order of fused
operations changes, far below the effect of another cursor."""
_BATCH_NOISE = 0.1
"""Relative to the distance between two prompts: far above the differences between kernels, far
below the effect of reading a row at another row's length."""


def probe_native_verify(target: Target) -> bool:
    """Return whether a rejected draft leaves no trace in the caches of this model.

    Appends some tokens in one pass, keeps one, and compares the next scores with those of a model
    that read that one alone, and of one that kept them all; with two rows of different lengths if
    rows share a pass.
    """
    graph = StepGraph(target, head=None)
    try:
        never_read = _scores_after(graph, target, verified=1, kept=1)
        rejected = _scores_after(graph, target, verified=_VERIFIED_TOKENS, kept=1)
        accepted = _scores_after(graph, target, verified=_VERIFIED_TOKENS, kept=_VERIFIED_TOKENS)
    except NoHistory as error:
        logger.warning("model.native_verify_unsupported reason=%s", error)
        return False
    except Exception as error:  # a family may raise anything here
        logger.warning("model.native_verify_unsupported", exc_info=error)
        return False
    trace = _distance(rejected, never_read) / _distance(accepted, never_read)
    return bool(trace.item() < _VERIFY_NOISE)


def _scores_after(graph: StepGraph, target: Target, *, verified: int, kept: int) -> mx.array:
    lengths = _PROMPT_TOKENS if target.supports_batching else _PROMPT_TOKENS[:1]
    offset = mx.array(lengths, dtype=mx.int32)
    shift = mx.zeros_like(offset)
    tokens = offset[:, None] + mx.arange(verified, dtype=mx.int32)
    result = graph.verify(tokens, states_of(batch_caches(target, lengths)), offset, shift)
    state: State = result.state
    if verified > 1:
        state = graph.roll_back(result.layers, mx.full(offset.shape, kept), verified)
    following = offset[:, None] + 1
    return graph.verify(following, state, offset + kept, shift).scores.astype(mx.float32)


def probe_compiled_passes(target: Target) -> CompiledPasses:
    """Return which passes of a batch compute the same compiled, at all cursors and capacities."""
    return CompiledPasses(
        plain=_compiles(target, 1),
        verify=target.native_verify and _compiles(target, _VERIFIED_TOKENS),
    )


def _compiles(target: Target, length: int) -> bool:
    """Compare compiled passes with others: two, then one more with longer caches."""
    never = StepGraph(target, head=None, compiles=CompiledPasses(plain=False, verify=False))
    always = StepGraph(target, head=None, compiles=CompiledPasses(plain=True, verify=True))
    try:
        expected = _scores_of_passes(never, target, length)
        found = _scores_of_passes(always, target, length)
        again = _scores_of_passes(never, target, length)  # traces must leave nothing in the model
        difference = mx.maximum(_distance(found, expected), _distance(again, expected))
        share = (difference / _distance(expected[0], expected[-1])).item()
    except Exception as error:  # noqa: BLE001  # a family may raise anything here
        logger.info("model.not_compiled tokens=%d reason=%s", length, type(error).__name__)
        return False
    if share < _COMPILATION_NOISE:
        return True
    logger.info("model.not_compiled tokens=%d relative_difference=%.3f", length, share)
    return False


def _scores_of_passes(graph: StepGraph, target: Target, length: int) -> mx.array:
    """Return the scores of several passes of `length` tokens: [passes, rows, L, vocabulary]."""
    offset = mx.array(_PROMPT_TOKENS, dtype=mx.int32)
    shift, scores = mx.zeros_like(offset), []
    caches = batch_caches(target, _PROMPT_TOKENS)
    for number in range(_COMPILED_PASSES):
        if number == _COMPILED_PASSES - 1:
            for cache in caches:
                if isinstance(cache, RowCache):
                    cache.resize(2 * cache.slots)
        tokens = offset[:, None] + mx.arange(length, dtype=mx.int32)
        result = graph.verify(tokens, states_of(caches), offset, shift)
        kept = mx.full(offset.shape, length)
        state = result.state if length == 1 else graph.roll_back(result.layers, kept, length)
        set_states(caches, state)
        offset = offset + length
        scores.append(result.scores.astype(mx.float32))
    return mx.stack(scores)


def probe_shared_rows(target: Target) -> bool:
    """Return whether rows have the same scores in a batch as by themselves.

    Compares a batch of one row, and one of two rows of different lengths.
    """

    def next_scores(caches: Sequence[LayerCache], lengths: Sequence[int]) -> mx.array:
        """Append one token to every row; return the scores after it: [rows, vocabulary]."""
        positions = mx.array([[tokens] for tokens in lengths], dtype=mx.int32)
        scores = target.scores(target.forward(mx.ones_like(positions), caches, positions))
        return scores[:, -1].astype(mx.float32)

    one = _PROMPT_TOKENS[:1]
    try:
        alone = [next_scores(_read_prompt(target, n), [n]) for n in _PROMPT_TOKENS]
        expected = mx.concatenate(alone)
        first = next_scores(batch_caches(target, one), one)
        both = next_scores(batch_caches(target, _PROMPT_TOKENS), _PROMPT_TOKENS)
        difference = mx.maximum(_distance(first, expected[:1]), _distance(both, expected))
        share = (difference / _distance(expected[0], expected[1])).item()
    except Exception as error:  # a family may raise anything here
        logger.warning("model.batching_unsupported", exc_info=error)
        return False
    if share < _BATCH_NOISE:
        return True
    logger.warning("model.batching_unsupported relative_difference=%.2f", share)
    return False


def _distance(first: mx.array, second: mx.array) -> mx.array:
    return mx.abs(first - second).max()


def probe_cache_layout(
    target: Target, head: MtpHead | None, *, quantized: bool = False
) -> CacheLayout:
    """Read some tokens, and return the arrays of their node in the prefix cache."""
    tokens, positions = mx.zeros((1, MIN_TOKENS), dtype=mx.int32), mx.arange(MIN_TOKENS)[None]
    caches, head_caches = target.new_caches(), head.new_caches() if head else []
    output = target.forward(tokens, caches, positions)
    if head_caches:
        assert head is not None
        head.forward(tokens[:, 1:], output[:, :-1], head_caches, positions[:, :-1])
    state = state_of(caches, head_caches, output[:, -1:] if head is not None else None)
    cache, prompt = PrefixCache(_NODE_BYTES, quantized=quantized), np.zeros(MIN_TOKENS, np.int64)
    cache.store("", prompt, state, room_bytes=_NODE_BYTES)
    run = cache.read_run("", prompt, 0, MIN_TOKENS, _NODE_BYTES)
    assert run is not None, "the cache has room for it"
    windows = [window_tokens(cache) for cache in caches if isinstance(cache, FamilyWindow)]
    return CacheLayout.of(run.to_host()[1], windows)


def batch_caches(target: Target, prompts_tokens: Sequence[int]) -> list[LayerCache]:
    """Read one prompt of each length, and return their caches as those of a batch."""
    batch, *others = [
        [row_cache(cache) for cache in _read_prompt(target, n)] for n in prompts_tokens
    ]
    for other in others:
        for cache, new in zip(batch, other, strict=True):
            cache.extend(new)
    return batch


def _read_prompt(target: Target, length: int) -> list[LayerCache]:
    caches = target.new_caches()
    positions = mx.arange(length, dtype=mx.int32)[None]
    target.forward(positions + length, caches, positions)
    return caches
