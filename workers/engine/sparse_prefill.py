"""Reading long prompts sparsely: which ones, by whose scores, and what is counted of it.

A sparse row is a row like any other: its caches hold fewer slots than it has positions, which its
batch never notices, since positions come from the row and slots from the caches. Recurrent layers
read only the kept tokens, so what they remember of the rest is nothing. While a prompt is scored,
the draft's caches live in the room that admission has kept for the row, and are gone before the
target reads. Any doubt about a prompt or about the draft model ends in a full prefill, counted by
its reason.
"""

from __future__ import annotations

import logging

from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint, load_checkpoint
from workers.engine.prefill import Prefill
from workers.engine.prompt_scorer import PromptScorer, why_unfit
from workers.engine.spec_prefill import (
    ReadInFull,
    SpecPrefillSettings,
    Unread,
    choose_scope,
)

logger = logging.getLogger(__name__)


class SparseReading:
    """Decides for every prompt, before it is read and while it is scored."""

    def __init__(
        self,
        settings: SpecPrefillSettings | None,
        scorer: PromptScorer | None,
        why_not: str | None = None,
    ) -> None:
        """Take no scorer where there is no draft model, or none that can be used."""
        self._settings = settings
        self._scorer = scorer
        self._why_not = why_not

    @property
    def sentence(self) -> str | None:
        """Say to people how long prompts are read; None where no draft model was asked for."""
        if self._settings is None:
            return None
        if self._scorer is None:
            return f"long prompts are read in full: {self._why_not}"
        return (
            f"from {self._settings.threshold_tokens} tokens on, "
            f"{self._settings.keep_share:.0%} of a prompt are read"
        )

    def consider(self, prefill: Prefill, counters: LaneCounters) -> None:
        """Open the scoring of a prompt that is to be read sparsely."""
        row = prefill.row
        if row.answer:
            row.skipped_tokens = 0  # read again after a failure, and now in full
            return
        wish = row.generation.spec_prefill
        if self._settings is None or self._scorer is None:
            if wish.sparse or (self._settings and wish.sparse is None):
                counters.read_in_full(ReadInFull.NO_DRAFT)
            return
        unread = Unread(
            prompt_tokens=len(row.prompt.tokens),
            cached_tokens=row.cached_tokens,
            prefix_tokens=prefill.prefix_tokens,
            pictures=prefill.embedded is not None,
        )
        scope = choose_scope(self._settings, self._scorer.context_tokens, wish, unread)
        if isinstance(scope, ReadInFull):
            counters.read_in_full(scope)
        else:
            prefill.scoring = self._scorer.begin(row.prompt.tokens, scope)

    def score(self, prefill: Prefill, chunk_tokens: int, counters: LaneCounters) -> None:
        """Let the draft model read on, and take its choice once it has read all."""
        scoring, row = prefill.scoring, prefill.row
        assert scoring is not None
        try:
            scoring.advance(chunk_tokens)
        except Exception as error:  # the target can read without its advice
            logger.warning(
                "spec_prefill.failed request_id=%s", row.generation.request_id, exc_info=error
            )
            counters.read_in_full(ReadInFull.DRAFT_FAILED)
            prefill.scoring = None
            return
        if scoring.reads is None:
            return
        prefill.scoring = None
        prefill.reads = scoring.reads
        row.skipped_tokens = len(row.prompt.tokens) - len(scoring.reads)
        if scoring.scope.begin < prefill.prefix_tokens:
            prefill.prefix_tokens = 0  # caches with holes are not the prefix: never to be kept
        scored = scoring.scope.end - scoring.scope.begin
        counters.read_sparsely(scored=scored, kept=scored - row.skipped_tokens)


OFF = SparseReading(None, None)
"""For a worker without a draft model."""


def load_sparse_reading(
    settings: SpecPrefillSettings | None, checkpoint: Checkpoint
) -> SparseReading:
    """Load the draft model; one that cannot serve this checkpoint is told of and left out."""
    if settings is None:
        return OFF
    try:
        draft = load_checkpoint(settings.draft)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        logger.warning("spec_prefill.unusable", exc_info=error)
        return SparseReading(settings, None, "the draft model cannot be loaded")
    why_not = why_unfit(checkpoint, draft)
    if why_not is not None:
        logger.warning("spec_prefill.unusable %s", why_not)
        return SparseReading(settings, None, why_not)
    return SparseReading(settings, PromptScorer(draft.target, draft.context_tokens))
