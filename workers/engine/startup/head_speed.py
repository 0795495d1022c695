"""Make an MTP head draft faster where the device does: its weights in eight bits, and a shortlist.

A head reads all its weights for each token that it drafts. Heads are published in bfloat16, also
for models of 4 bits, where they take as long as a tenth of the model. A GPU reads eight bits in
about half the time; a CPU multiplies floats faster. So the worker measures a pass of both at its
start, and in the same way a pass over a shortlist of frequent tokens (`draft_shortlist.py`).
Both change few drafts, and no answer: the self-test of the head comes after it, and a head that
fails it gets its own weights and the whole vocabulary back.
"""

import logging
import time
from collections.abc import Callable
from copy import copy
from statistics import median
from typing import Any

import mlx.core as mx
from mlx import nn

from workers.engine.decode.batch import states_of
from workers.engine.decode.step_graph import StepGraph
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.draft_shortlist import FURTHER_TOKENS, RECENT_TOKENS, DraftShortlist
from workers.engine.model.mtp_head import AssistantHead, MtpHead
from workers.engine.model.target import Target
from workers.engine.startup.probes import batch_caches

logger = logging.getLogger(__name__)

BITS = 8
GROUP_SIZE = 64
MIN_GAIN = 1.1
"""A pass must be faster by this factor."""
SHORTLIST_TOKENS = 32_768
_MIN_SHARE = 2
"""A vocabulary must be larger by this factor."""
_LAYERS = (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding)
_PASSES = 9
_PROMPT_TOKENS = 16

Restore = Callable[[], None]
"""Gives a head its own weights back."""


def measure_s(compute: Callable[[], mx.array]) -> float:
    """Return the median of the seconds of some passes; the first ones compile kernels."""
    durations = []
    for _ in range(_PASSES):
        begun_s = time.perf_counter()
        mx.eval(compute())
        durations.append(time.perf_counter() - begun_s)
    return median(durations[2:])


def quantise_if_faster(
    head: MtpHead, target: Target, measure: Callable[[Callable[[], mx.array]], float] = measure_s
) -> Restore | None:
    """Quantise a head if that makes it draft faster; return a function that undoes it, or None.

    `measure` returns the seconds that a function takes. A graph of the head must not be compiled
    yet: it would go on with the weights that it has seen.
    """

    def can_be_quantised(_: str, module: Any) -> bool:
        """Return whether a module itself has weights that are floats, in whole groups."""
        if not hasattr(module, "to_quantized"):
            return False
        width = module.weight.shape[-1]
        return mx.issubdtype(module.weight.dtype, mx.floating) and width % GROUP_SIZE == 0

    def restore() -> None:
        head.drafter.update_modules(own)

    own = head.drafter.leaf_modules()
    draft = draft_pass(head, target)
    before_s = measure(draft)
    nn.quantize(head.drafter, group_size=GROUP_SIZE, bits=BITS, class_predicate=can_be_quantised)
    mx.eval(head.parameters())
    after_s = measure(draft)
    if before_s < MIN_GAIN * after_s:
        restore()
        return None
    logger.info("mtp_head.quantised bits=%d speedup=%.2f", BITS, before_s / after_s)
    return restore


def use_shortlist_if_faster(
    checkpoint: Checkpoint,
    graph: StepGraph,
    *,
    tokens: int = SHORTLIST_TOKENS,
    measure: Callable[[Callable[[], mx.array]], float] = measure_s,
) -> DraftShortlist | None:
    """Give the head of a graph a shortlist if it drafts faster with it; return that."""
    head, target = graph.head, checkpoint.target
    if head is None or isinstance(head, AssistantHead):
        return None
    language = target.language
    layer = language.lm_head if "lm_head" in language else language.model.embed_tokens
    if type(layer) not in _LAYERS or "bias" in layer:
        return None
    if layer["weight"].shape[0] < _MIN_SHARE * tokens:
        return None
    shortlist = DraftShortlist(layer, tokens, _marks(checkpoint))
    whole_s = measure(draft_pass(head, target))
    head.shortlist = shortlist
    short_s = measure(draft_pass(head, target, FURTHER_TOKENS))
    if whole_s < MIN_GAIN * short_s:
        head.shortlist = None
        return None
    state = states_of(batch_caches(target, (RECENT_TOKENS,)))
    offset = mx.array((RECENT_TOKENS,), dtype=mx.int32)
    token, shift = mx.zeros((1, 1), dtype=mx.int32), mx.zeros_like(offset)
    mx.eval(state)
    step_s = measure(lambda: graph.verify(token, state, offset, shift).scores)
    shortlist.saving = (whole_s - short_s) / (step_s + short_s)
    logger.info("mtp_head.shortlist tokens=%d speedup=%.2f", tokens, whole_s / short_s)
    return shortlist


def draft_pass(head: MtpHead, target: Target, further_tokens: int = 0) -> Callable[[], mx.array]:
    """Return a function that drafts one token for one row.

    With `further_tokens` it drafts over that many and the head's shortlist.
    """
    width = target.language.model.norm.weight.shape[0]
    hidden = mx.zeros((1, 1, width), target.language.model.norm.weight.dtype)
    token = mx.zeros((1,), dtype=mx.int32)
    if isinstance(head, AssistantHead):
        caches = batch_caches(target, (_PROMPT_TOKENS,))
        mx.eval(states_of(caches))
        attended: list[Any] = [caches[layer] for layer in head.attended_layers]
        return lambda: head.draft_tokens(hidden, token, [*map(copy, attended)], 1)[0]

    further = mx.zeros((1, further_tokens), dtype=mx.int32)
    return lambda: head.draft(
        head.forward(token[None], hidden, head.new_caches(), token[None]), further
    )


def _marks(checkpoint: Checkpoint) -> list[int]:
    """Return the tokens that end answers, and a tokenizer's tokens for other marks."""
    processor = checkpoint.processor
    added = getattr(processor, "tokenizer", processor).added_tokens_decoder
    plain = [index for index, token in added.items() if not token.special]
    named = [*sorted(checkpoint.eos), *plain, *added]
    return [token for token in named if token < checkpoint.vocabulary]
