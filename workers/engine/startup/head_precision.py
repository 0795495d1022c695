"""Weights of an MTP head in eight bits, where the device drafts faster so.

A head reads all its weights for each token that it drafts. Heads are published in bfloat16, also
for models of 4 bits, where they take as long as a tenth of the model. A GPU reads eight bits in
about half the time; a CPU multiplies floats faster. So the worker measures a pass of both at its
start.
Eight bits change few drafts, and no answer: the self-test of the head comes after it, and a head
that fails it gets its own weights back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import copy
from statistics import median
from typing import Any

import mlx.core as mx
from mlx import nn

from workers.engine.decode.batch import states_of
from workers.engine.model.mtp_head import AssistantHead, MtpHead
from workers.engine.model.target import Target
from workers.engine.startup.probes import batch_caches

logger = logging.getLogger(__name__)

BITS = 8
GROUP_SIZE = 64
MIN_GAIN = 1.1
"""Factor by which a pass must be faster."""
_PASSES = 9
_PROMPT_TOKENS = 16

Restore = Callable[[], None]
"""Gives a head its own weights back."""


def quantise_if_faster(
    head: MtpHead,
    target: Target,
    measure: Callable[[Callable[[], mx.array]], float] | None = None,
) -> Restore | None:
    """Quantise a head if it drafts faster so; return what undoes that, or None if it does not.

    `measure` returns the seconds that a function takes. A graph of the head must not be compiled
    yet: it would go on with the weights that it has seen.
    """
    measure = measure or measure_s
    own = head.drafter.leaf_modules()
    draft = draft_pass(head, target)
    before_s = measure(draft)
    nn.quantize(head.drafter, group_size=GROUP_SIZE, bits=BITS, class_predicate=_can_be_quantised)
    mx.eval(head.parameters())

    def restore() -> None:
        head.drafter.update_modules(own)

    after_s = measure(draft)
    if before_s < MIN_GAIN * after_s:
        restore()
        return None
    logger.info("mtp_head.quantised bits=%d speedup=%.2f", BITS, before_s / after_s)
    return restore


def _can_be_quantised(_: str, module: Any) -> bool:
    """Return whether a module has weights of its own that are floats, in whole groups."""
    if not hasattr(module, "to_quantized"):
        return False
    width = module.weight.shape[-1]
    return mx.issubdtype(module.weight.dtype, mx.floating) and width % GROUP_SIZE == 0


def draft_pass(
    head: MtpHead, target: Target, further: mx.array | None = None
) -> Callable[[], mx.array]:
    """Return a function that drafts one token for one row.

    With `further` tokens [1, n] it drafts over these and the head's shortlist.
    """
    width = target.language.model.norm.weight.shape[0]
    hidden = mx.zeros((1, 1, width), target.language.model.norm.weight.dtype)
    token = mx.zeros((1,), dtype=mx.int32)
    if isinstance(head, AssistantHead):
        caches = batch_caches(target, (_PROMPT_TOKENS,))
        mx.eval(states_of(caches))
        attended: list[Any] = [caches[layer] for layer in head.attended_layers]
        return lambda: head.draft_tokens(hidden, token, [*map(copy, attended)], 1)[0]

    def draft() -> mx.array:
        state = head.forward(token[None], hidden, head.new_caches(), token[None])
        return head.draft(state) if further is None else head.draft_frequent(state, further)

    return draft


def measure_s(compute: Callable[[], mx.array]) -> float:
    """Return the median of the seconds of some passes; the first ones compile kernels."""
    durations = []
    for _ in range(_PASSES):
        begun_s = time.perf_counter()
        mx.eval(compute())
        durations.append(time.perf_counter() - begun_s)
    return median(durations[2:])
