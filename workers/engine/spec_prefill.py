"""Which tokens of a long prompt are read at all: SpecPrefill (Liu et al. 2025, arXiv 2502.02789).

A small draft model says how much every token of the prompt mattered to the tokens that it would
answer with. The chunks that mattered most are read by the target, at their true positions; the
others never are. Nothing here touches a model: scores go in, decisions come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

import numpy as np

TokenScores: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"

CHUNK_TOKENS = 16
"""Kept or left out together: about a sentence."""
SMOOTHING_TOKENS = 5
"""A token matters if its neighbours do: a word is more than one token."""
SINK_TOKENS = 4
"""Always read: attention rests on the first tokens of a text (Xiao et al. 2023, 2309.17453)."""
TAIL_TOKENS = 32
"""Always read: the end of the prompt is the question, and the template's call to answer."""
SHORTEST_TOKENS = 256
"""PromptScoring fewer costs more than reading them, whoever asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillSettings:
    """How a worker reads long prompts sparsely."""

    draft: Path
    """Folder of a small model with the target's vocabulary."""
    threshold_tokens: int = 8192
    """UncachedPrompt tokens from which a prompt is read sparsely, unless the request decides."""
    keep_share: float = 0.3


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
class SpecPrefillOptions:
    """What a request says about it; None leaves the decision to the worker."""

    sparse: bool | None = None
    keep_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRange:
    """The tokens of a prompt that are scored, [begin, end), and the share of them that is read."""

    begin: int
    end: int
    keep_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UncachedPrompt:
    """A prompt before any of it has been read."""

    prompt_tokens: int
    cached_tokens: int
    """Read already: they came out of a snapshot."""
    prefix_tokens: int
    """A shared beginning that is to be kept once it is read; 0 where there is none."""
    pictures: bool


def choose_scoring_range(
    settings: SpecPrefillSettings,
    draft_context_tokens: int,
    options: SpecPrefillOptions,
    unread: UncachedPrompt,
) -> ScoringRange | FullPrefillReason:
    """Decide what of a prompt is scored, or why it is read in full.

    A shared beginning is read in full the first time, since its snapshot then serves everybody;
    only a request that asks for sparse reading by name reads that sparsely too.
    """
    keep_share = settings.keep_share if options.keep_share is None else options.keep_share
    begin = unread.cached_tokens
    if not options.sparse:
        begin = max(begin, unread.prefix_tokens)
    tokens = unread.prompt_tokens - begin
    least = SHORTEST_TOKENS if options.sparse else max(settings.threshold_tokens, SHORTEST_TOKENS)
    refusals = (
        (options.sparse is False, FullPrefillReason.SWITCHED_OFF),
        (unread.pictures, FullPrefillReason.PICTURES),
        (tokens < least, FullPrefillReason.TOO_SHORT),
        (tokens > draft_context_tokens, FullPrefillReason.TOO_LONG_FOR_DRAFT),
        (keep_share >= 1, FullPrefillReason.KEEPS_ALL),
    )
    for holds, reason in refusals:
        if holds:
            return reason
    return ScoringRange(begin=begin, end=unread.prompt_tokens, keep_share=keep_share)


def select(importance: TokenScores, keep_share: float) -> tuple[int, ...]:
    """Return, in order, the indices of the tokens to read: whole chunks, the best ones first.

    About `keep_share` of all tokens, never less than the beginning and the end of the prompt. A
    chunk counts by its best token: one fact among plain words must not be averaged away.
    """
    count = len(importance)
    kept = np.zeros(count, dtype=bool)
    kept[:SINK_TOKENS] = True
    kept[-TAIL_TOKENS:] = True
    smooth = _smoothed(importance)
    starts = range(0, count, CHUNK_TOKENS)
    best = [float(smooth[start : start + CHUNK_TOKENS].max()) for start in starts]
    budget = round(count * keep_share)
    for chunk in sorted(range(len(best)), key=lambda chunk: -best[chunk]):
        if kept.sum() >= budget:
            break
        kept[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS] = True
    return tuple(np.flatnonzero(kept).tolist())


def _smoothed(importance: TokenScores) -> TokenScores:
    """Average every score with its neighbours; beyond the ends there is nothing to add."""
    window = np.ones(SMOOTHING_TOKENS, dtype=np.float32)
    sums = np.convolve(importance, window, mode="same")
    return sums / np.convolve(np.ones_like(importance), window, mode="same")
