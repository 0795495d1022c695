"""Selection of the prompt tokens to read: SpecPrefill (Liu et al. 2025, arXiv 2502.02789).

A small draft model scores how much each token of the prompt matters to the tokens of its own
answer. The target reads the chunks with the highest scores, at their true positions, and never the
others. Pure: scores come in, indices go out, no model is involved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from workers.engine.types import SpecPrefillOptions, SpecPrefillSettings

TokenScores: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"

CHUNK_TOKENS = 16
"""Tokens that are selected or skipped together: about a sentence."""
SMOOTHING_TOKENS = 5
"""Window over which scores are averaged: a word is more than one token."""
SINK_TOKENS = 4
"""Always read: the first tokens of a text attract attention (Xiao et al. 2023, 2309.17453)."""
TAIL_TOKENS = 32
"""Always read: the end of the prompt is the question, and the template's call to answer."""
MIN_SCORED_TOKENS = 256
"""Fewer tokens cost more to score than to read, even for a request that asks for it."""


class FullPrefillReason(StrEnum):
    """Why a prompt is read in full although the worker could read it sparsely."""

    SWITCHED_OFF = "switched_off"
    NO_DRAFT = "no_draft"
    PICTURES = "pictures"
    TOO_SHORT = "too_short"
    TOO_LONG_FOR_DRAFT = "too_long_for_draft"
    KEEPS_ALL = "keeps_all"
    DRAFT_FAILED = "draft_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRange:
    """Range [begin, end) of the prompt tokens to score, and the share of them to read."""

    begin: int
    end: int
    keep_share: float


def choose_scoring_range(
    settings: SpecPrefillSettings,
    options: SpecPrefillOptions,
    *,
    draft_context_tokens: int,
    prompt_tokens: int,
    cached_tokens: int,
    prefix_tokens: int,
    pictures: bool,
) -> ScoringRange | FullPrefillReason:
    """Return the part of a prompt to score, or the reason to read it in full.

    The prefix cache already holds `cached_tokens`. A shared prefix of `prefix_tokens` that it does
    not hold yet is read in full, since other requests use its cache entry; only a request that asks
    for sparse prefill reads the prefix sparsely too.
    """
    keep_share = settings.keep_share if options.keep_share is None else options.keep_share
    begin = cached_tokens if options.sparse else max(cached_tokens, prefix_tokens)
    tokens = prompt_tokens - begin
    least = max(MIN_SCORED_TOKENS, 0 if options.sparse else settings.threshold_tokens)
    reasons = (
        (options.sparse is False, FullPrefillReason.SWITCHED_OFF),
        (pictures, FullPrefillReason.PICTURES),
        (tokens < least, FullPrefillReason.TOO_SHORT),
        (tokens > draft_context_tokens, FullPrefillReason.TOO_LONG_FOR_DRAFT),
        (keep_share >= 1, FullPrefillReason.KEEPS_ALL),
    )
    scope = ScoringRange(begin=begin, end=prompt_tokens, keep_share=keep_share)
    return next((reason for applies, reason in reasons if applies), scope)


def select(scores: TokenScores, keep_share: float) -> tuple[int, ...]:
    """Return the sorted indices of the tokens to read: the chunks with the highest scores.

    They are about `keep_share` of all tokens, and at least the beginning and end of the prompt. The
    score of a chunk is that of its best token: an average would hide one fact among plain words.
    """
    count = len(scores)
    selected = np.zeros(count, dtype=bool)
    selected[:SINK_TOKENS] = True
    selected[-TAIL_TOKENS:] = True
    smooth = _smoothed(scores)
    starts = range(0, count, CHUNK_TOKENS)
    best = [float(smooth[start : start + CHUNK_TOKENS].max()) for start in starts]
    budget = round(count * keep_share)
    for chunk in sorted(range(len(best)), key=lambda chunk: -best[chunk]):
        if selected.sum() >= budget:
            break
        selected[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS] = True
    return tuple(np.flatnonzero(selected).tolist())


def _smoothed(scores: TokenScores) -> TokenScores:
    """Average every score over its window, which ends at the ends of the prompt."""
    window = np.ones(SMOOTHING_TOKENS, dtype=np.float32)
    sums = np.convolve(scores, window, mode="same")
    return sums / np.convolve(np.ones_like(scores), window, mode="same")
