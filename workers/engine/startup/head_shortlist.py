"""Give a head a shortlist of frequent tokens where the device drafts faster over it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx
from mlx import nn

from workers.engine.decode.batch import states_of
from workers.engine.decode.step_graph import StepGraph
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.draft_shortlist import FURTHER_TOKENS, RECENT_TOKENS, DraftShortlist
from workers.engine.model.mtp_head import AssistantHead
from workers.engine.model.target import Target
from workers.engine.startup.head_precision import MIN_GAIN, draft_pass, measure_s
from workers.engine.startup.probes import batch_caches

logger = logging.getLogger(__name__)

SHORTLIST_TOKENS = 32_768
_MIN_SHARE = 2
"""Factor by which a vocabulary must be larger."""
_LAYERS = (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding)


def use_shortlist_if_faster(
    checkpoint: Checkpoint,
    graph: StepGraph,
    *,
    tokens: int = SHORTLIST_TOKENS,
    measure: Callable[[Callable[[], mx.array]], float] = measure_s,
) -> DraftShortlist | None:
    """Give the head of a graph a shortlist if it drafts faster with it; return that.

    `measure` returns the seconds that a function takes.
    """
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
    further = mx.zeros((1, FURTHER_TOKENS), dtype=mx.int32)
    whole_s = measure(draft_pass(head, target))
    head.shortlist = shortlist
    short_s = measure(draft_pass(head, target, further))
    if whole_s < MIN_GAIN * short_s:
        head.shortlist = None
        return None
    step_s = measure(_step_of(target, graph))
    shortlist.saving = (whole_s - short_s) / (step_s + short_s)
    logger.info("mtp_head.shortlist tokens=%d speedup=%.2f", tokens, whole_s / short_s)
    return shortlist


def _step_of(target: Target, graph: StepGraph) -> Callable[[], mx.array]:
    """Return a function that runs one token of one row through the model."""
    lengths = (RECENT_TOKENS,)
    state, offset = states_of(batch_caches(target, lengths)), mx.array(lengths, dtype=mx.int32)
    token, shift = mx.zeros((1, 1), dtype=mx.int32), mx.zeros_like(offset)
    mx.eval(state)
    return lambda: graph.verify(token, state, offset, shift).scores


def _marks(checkpoint: Checkpoint) -> list[int]:
    """Return the tokens that end answers, and those that a tokenizer has for other marks."""
    processor = checkpoint.processor
    added = getattr(processor, "tokenizer", processor).added_tokens_decoder
    plain = [index for index, token in added.items() if not token.special]
    named = [*sorted(checkpoint.eos), *plain, *added]
    return [token for token in named if token < checkpoint.vocabulary]
