"""SpecPrefill of a lane: select which tokens of a long prompt the target reads.

A sparse row is an ordinary row whose caches hold fewer slots than it has positions: positions come
from the row and slots from the caches, so that its batch needs no special case. Recurrent layers
read only the selected tokens. While a prompt is scored, the draft model's caches use the memory
that admission has reserved for the row, and are freed before the target reads. Any doubt about a
prompt or the draft model ends in a full prefill, counted by its reason.
"""

import logging
from dataclasses import dataclass, replace

from paceline.protocol import SpecPrefillCounts
from workers.engine.decode.metrics import LaneCounters
from workers.engine.decode.prefill import Prefill
from workers.engine.decode.spec_prefill import (
    LOOK_AHEAD_TOKENS,
    FullPrefillReason,
    PromptScoring,
    ScoringRange,
    choose_scoring_range,
    draft_incompatibility,
)
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.model_folder import refusing
from workers.engine.model.target import Target
from workers.engine.types import ModelUnusable, SpecPrefillSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """Settings and draft model of the sparse prefill."""

    settings: SpecPrefillSettings | None = None
    draft: Target | None = None
    draft_context_tokens: int = 0
    reason: str | None = None
    """Why there is no draft model although the settings name one."""

    @property
    def description(self) -> str | None:
        """Return a phrase on how long prompts are read; None if no draft model is configured."""
        if self.settings is None:
            return None
        if self.draft is None:
            return f"long prompts are read in full: {self.reason}"
        return (
            f"from {self.settings.threshold_tokens} tokens on, "
            f"{self.settings.keep_share:.0%} of a prompt are read"
        )

    def start_scoring(self, prefill: Prefill, counters: LaneCounters) -> None:
        """Start to score a prompt that is to be read sparsely."""
        row = prefill.row
        if row.answer:
            row.skipped_tokens = 0  # a requeued row is read in full
            return
        options = row.generation.spec_prefill
        if row.generation.exact:
            options = replace(options, sparse=False)
        reason = FullPrefillReason.NO_DRAFT
        if self.settings is not None and self.draft is not None:
            system = row.prompt.prefix.tokens if row.prompt.prefix else 0
            scope = choose_scoring_range(
                self.settings,
                options,
                draft_context_tokens=self.draft_context_tokens - LOOK_AHEAD_TOKENS,
                prompt_tokens=len(row.prompt.tokens),
                cached_tokens=row.cached_tokens,
                prefix_tokens=system if system in prefill.boundaries else 0,
                pictures=prefill.prompt_embedding is not None,
            )
            if isinstance(scope, ScoringRange):
                prefill.scoring = PromptScoring(self.draft, row.prompt.tokens, scope)
                return
            reason = scope
        elif not options.sparse and (self.settings is None or options.sparse is False):
            return
        counters.add(spec_prefill=SpecPrefillCounts(full_prefills={reason: 1}))

    def score_chunk(self, prefill: Prefill, chunk_tokens: int, counters: LaneCounters) -> None:
        """Let the draft model read one more chunk; apply its selection at the end."""
        scoring, row = prefill.scoring, prefill.row
        assert scoring is not None
        try:
            scoring.advance(chunk_tokens)
        except Exception as error:  # the target can read without a selection
            request_id = row.generation.request_id
            logger.warning("spec_prefill.failed request_id=%s", request_id, exc_info=error)
            reason = FullPrefillReason.DRAFT_FAILED
            counters.add(spec_prefill=SpecPrefillCounts(full_prefills={reason: 1}))
            prefill.scoring = None
            return
        if scoring.selected is None:
            return
        prefill.scoring = None
        prefill.read_indices = scoring.selected
        row.skipped_tokens = len(row.prompt.tokens) - len(scoring.selected)
        # What is read sparsely must not be cached.
        prefill.boundaries = [end for end in prefill.boundaries if end <= scoring.scope.begin]
        scored = scoring.scope.end - scoring.scope.begin
        selected = scored - row.skipped_tokens
        counters.add(
            spec_prefill=SpecPrefillCounts(
                prompts=1, scored_tokens=scored, selected_tokens=selected
            )
        )


NO_SPARSE_PREFILL = SparsePrefill()
"""For a worker without a draft model."""


def load_sparse_prefill(
    settings: SpecPrefillSettings | None, checkpoint: Checkpoint
) -> SparsePrefill:
    """Load the draft model; log and ignore a model that is unusable for this checkpoint."""
    if settings is None:
        return NO_SPARSE_PREFILL
    try:
        with refusing(settings.draft):
            draft = load_checkpoint(settings.draft)
    except ModelUnusable as error:
        logger.warning("spec_prefill.draft_unusable reason=%s", error)
        return SparsePrefill(settings, reason="the draft model cannot be loaded")
    reason = draft_incompatibility(checkpoint, draft)
    if reason is not None:
        logger.warning("spec_prefill.draft_unusable reason=%s", reason)
        return SparsePrefill(settings, reason=reason)
    return SparsePrefill(settings, draft.target, draft.context_tokens)
