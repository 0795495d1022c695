"""Put an engine together from a model folder: checkpoint, prompts, lanes, and a tested MTP head."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mlx.utils import tree_flatten

from workers.engine.memory import MemoryEstimate, measure_memory
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint, load_checkpoint
from workers.engine.prefill_budget import PrefillPace
from workers.engine.prefix_cache import Snapshots
from workers.engine.prefix_cache_files import SnapshotFiles, fingerprint
from workers.engine.probes import probe_native_verify
from workers.engine.scheduler import Lane
from workers.engine.self_test import HeadHealth, examine_head, warm_up
from workers.engine.settings import EngineSettings, ModelCard
from workers.engine.shared_rows import probe_shared_rows
from workers.engine.sparse_prefill import OFF, SparseReading, load_sparse_reading
from workers.engine.tokenizer import PromptRenderer
from workers.engine.types import LaneName, ModelUnusable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A loaded model and the lanes on it."""

    checkpoint: Checkpoint
    prompts: PromptRenderer
    lanes: tuple[Lane, ...]
    snapshots: Snapshots
    memory: MemoryEstimate
    card: ModelCard


def assemble(settings: EngineSettings) -> Assembly:
    """Load the model and make its lanes; must run on the thread that will step them."""
    checkpoint = load_checkpoint(settings.model)
    sparse_reading = load_sparse_reading(settings.spec_prefill, checkpoint)
    prompts = PromptRenderer(checkpoint.processor)
    draft_tokens = settings.draft_tokens if checkpoint.head is not None else 0
    if draft_tokens:
        checkpoint.target.native_verify = probe_native_verify(checkpoint.target)
    if checkpoint.target.batches_rows and not checkpoint.target.explicit_positions:
        checkpoint.target.batches_rows = probe_shared_rows(checkpoint.target)
    memory = measure_memory(checkpoint.target, checkpoint.head)
    snapshots = Snapshots(
        min(settings.snapshot_bytes, memory.room_bytes // 2), _snapshot_files(settings)
    )
    lanes: list[Lane] = []
    for name in settings.lanes:
        # A lane that promises speculation and has no head for it would mislead the router.
        if name is not LaneName.TEXT_MTP or checkpoint.head is not None:
            lanes.append(
                _make_lane(
                    name,
                    settings=settings,
                    checkpoint=checkpoint,
                    prompts=prompts,
                    draft_tokens=draft_tokens,
                    snapshots=snapshots,
                    siblings=lanes,
                    memory=memory,
                    sparse_reading=sparse_reading,
                )
            )
    if not lanes:
        raise ModelUnusable(f"None of the lanes asked for can run: {checkpoint.why_no_mtp}.")
    rehearsal = _make_lane(
        lanes[0].name,
        settings=settings,
        checkpoint=checkpoint,
        prompts=prompts,
        draft_tokens=draft_tokens,
        snapshots=Snapshots(0),
        siblings=(),
        memory=memory,
    )
    logger.info("engine.warming_up the first start on a machine compiles kernels")
    warm_up(rehearsal, prompts, draft_tokens)
    health = None
    if draft_tokens:
        health = examine_head(rehearsal, prompts)
        logger.info("head.tested %s", health.sentence)
        for lane in lanes:
            lane.counters.head_healthy = health.sound
    return Assembly(
        checkpoint=checkpoint,
        prompts=prompts,
        lanes=tuple(lanes),
        snapshots=snapshots,
        memory=memory,
        card=_card(
            settings, checkpoint, tuple(lanes), prompts, health, sparse_reading=sparse_reading
        ),
    )


def _snapshot_files(settings: EngineSettings) -> SnapshotFiles | None:
    if settings.snapshot_folder is None:
        return None
    return SnapshotFiles(
        settings.snapshot_folder, settings.snapshot_bytes, fingerprint(settings.model)
    )


def _make_lane(
    name: LaneName,
    *,
    settings: EngineSettings,
    checkpoint: Checkpoint,
    prompts: PromptRenderer,
    draft_tokens: int,
    snapshots: Snapshots,
    siblings: Sequence[Lane],
    memory: MemoryEstimate,
    sparse_reading: SparseReading = OFF,
) -> Lane:
    rows = checkpoint.target.rows_at_most(settings.max_rows)
    return Lane(
        name,
        checkpoint,
        prompts,
        LaneCounters(name, slots=rows, draft_tokens=draft_tokens),
        snapshots=snapshots,
        siblings=siblings,
        draft_tokens=draft_tokens,
        max_rows=rows,
        pace=PrefillPace(settings.prefill_chunk_tokens, settings.prefill_budget_s),
        memory=memory,
        sparse_reading=sparse_reading,
    )


def _card(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    lanes: tuple[Lane, ...],
    prompts: PromptRenderer,
    health: HeadHealth | None,
    *,
    sparse_reading: SparseReading,
) -> ModelCard:
    parts = [checkpoint.target.model.parameters()]
    if checkpoint.head is not None:
        parts.append(checkpoint.head.parameters())
    parameters = [array for _, array in tree_flatten(parts)]
    effective = max((lane.counters.report().effective_draft_tokens for lane in lanes), default=0)
    return ModelCard(
        model=settings.served_name,
        family=checkpoint.family,
        lanes=tuple(lane.name for lane in lanes),
        context_tokens=checkpoint.context_tokens,
        vision=prompts.sees_pictures,
        parameters=sum(array.size for array in parameters),
        weights_bytes=sum(array.nbytes for array in parameters),
        native_verify=checkpoint.target.native_verify,
        mtp=health is not None and health.sound,
        why_no_mtp=(health.sentence if health and not health.sound else checkpoint.why_no_mtp),
        draft_tokens_requested=settings.draft_tokens,
        draft_tokens_effective=effective,
        spec_prefill=sparse_reading.sentence,
    )
