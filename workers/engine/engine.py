"""The engine as the rest of the worker sees it: start, generate, report, stop.

Put an engine together from a model folder: checkpoint, prompts, lanes, and a tested MTP head.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from workers.engine.memory import MemoryEstimate, measure_memory
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint, load_checkpoint
from workers.engine.prefill_budget import PrefillPace
from workers.engine.prefix_cache import PrefixCache
from workers.engine.prefix_cache_files import SnapshotFiles, fingerprint
from workers.engine.probes import probe_native_verify, probe_shared_rows
from workers.engine.row import Row, Sink, SpeculationTally
from workers.engine.scheduler import LaneScheduler
from workers.engine.self_test import HeadHealth, examine_head, warm_up
from workers.engine.sparse_prefill import OFF, SparseReading, load_sparse_reading
from workers.engine.thread import EngineThread
from workers.engine.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import (
    EngineBusy,
    EngineError,
    EngineSettings,
    Event,
    Finished,
    Generation,
    InvalidGeneration,
    LaneName,
    ModelCard,
    ModelUnusable,
)
from workers.protocol import LaneReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A loaded model and the lanes on it."""

    checkpoint: Checkpoint
    prompts: PromptRenderer
    lanes: tuple[LaneScheduler, ...]
    snapshots: PrefixCache
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
    snapshots = PrefixCache(
        min(settings.snapshot_bytes, memory.room_bytes // 2), _snapshot_files(settings)
    )
    lanes: list[LaneScheduler] = []
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
        snapshots=PrefixCache(0),
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
    snapshots: PrefixCache,
    siblings: Sequence[LaneScheduler],
    memory: MemoryEstimate,
    sparse_reading: SparseReading = OFF,
) -> LaneScheduler:
    rows = checkpoint.target.rows_at_most(settings.max_rows)
    return LaneScheduler(
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
    lanes: tuple[LaneScheduler, ...],
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


class Engine:
    """One model, its lanes, and the thread they run on. Make it with `Engine.start`."""

    def __init__(
        self, settings: EngineSettings, thread: EngineThread[Assembly], assembly: Assembly
    ) -> None:
        self.prompts = assembly.prompts
        self.card = assembly.card
        self._settings = settings
        self._thread = thread
        self._vocabulary = assembly.checkpoint.vocabulary
        self._default_max_tokens = assembly.checkpoint.default_max_tokens
        self._memory = assembly.memory
        self._snapshots = assembly.snapshots
        self._lanes = {lane.name: lane for lane in assembly.lanes}

    @classmethod
    def start(cls, settings: EngineSettings) -> Engine:
        """Load the model on a thread of its own and serve it; raise `ModelUnusable` if it cannot.

        Blocks until the weights are in memory and the MTP head has been tested.
        """

        def load() -> tuple[Assembly, tuple[LaneScheduler, ...]]:
            assembly = assemble(settings)
            return assembly, assembly.lanes

        thread = EngineThread(load)
        try:
            assembly = thread.start()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelUnusable(
                f"The model in {settings.model} cannot be loaded: {error}"
            ) from error
        return cls(settings, thread, assembly)

    @property
    def alive(self) -> bool:
        """Say whether the engine takes work."""
        return self._thread.alive

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return a snapshot of every lane; safe from any thread."""
        return tuple(lane.counters.report() for lane in self._lanes.values())

    def memory_bytes(self) -> int:
        """Return the bytes that MLX holds: weights, caches, activations."""
        return int(mx.get_active_memory())

    def memory_limit_bytes(self) -> int:
        """Return the bytes that it may hold at most."""
        return self._memory.limit_bytes

    def snapshot_bytes(self) -> int:
        """Return the bytes of them that are kept of system prompts."""
        return self._snapshots.size_bytes

    def prefixes(self) -> tuple[str, ...]:
        """Name the system prompts that are kept, the last one used first."""
        return self._snapshots.keys

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; generations still running end in `EngineStopped`."""
        self._thread.stop(timeout_s)
        self._snapshots.close()

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation; raise an `EngineError` if it cannot go on.

        Closing the generator, or cancelling the task that reads it, drops the row within one step.
        """
        lane = self._lanes.get(generation.lane)
        if lane is None:
            raise InvalidGeneration("model", f"This worker has no {generation.lane} lane.")
        if lane.waiting >= self._settings.queue_limit:
            raise EngineBusy(retry_after_s=1.0)
        prompt = await asyncio.to_thread(self.prompts.prepare, generation.prompt)
        events: asyncio.Queue[Event | EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(event: Event | EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        row = self._row(generation, prompt, hear)
        if prompt.prefix is not None:
            row.read_ahead = await asyncio.to_thread(self._snapshots.read_ahead, prompt.prefix.key)
        self._thread.submit(generation.lane, row)
        try:
            while True:
                event = await events.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            if not row.finish:
                self._thread.cancel(row)

    def _row(self, generation: Generation, prompt: PreparedPrompt, hear: Sink) -> Row:
        longest = self._memory.longest_row()
        room = min(self.card.context_tokens, longest) - len(prompt.tokens)
        if not prompt.tokens:
            raise InvalidGeneration("messages", "The prompt is empty.")
        if len(prompt.tokens) >= self.card.context_tokens:
            raise InvalidGeneration(
                "messages",
                f"The prompt has {len(prompt.tokens)} tokens; "
                f"this model's context holds {self.card.context_tokens}.",
                code="context_length_exceeded",
            )
        if room < 1:
            raise InvalidGeneration(
                "messages",
                f"The prompt has {len(prompt.tokens)} tokens; "
                f"this machine's memory holds {longest}.",
                code="prompt_exceeds_memory",
            )
        for token, _ in generation.sampling.logit_bias:
            if token >= self._vocabulary:
                raise InvalidGeneration("logit_bias", f"Token {token} is not in the vocabulary.")
        lane = self._lanes[generation.lane]
        bypass = lane.bypasses(generation)
        asked = generation.draft_tokens
        draft_tokens = self._settings.draft_tokens if asked is None else asked
        if bypass or not lane.speculates:
            draft_tokens = 0
        seed = generation.sampling.seed
        return Row(
            generation=generation,
            prompt=prompt,
            seed=secrets.randbits(63) if seed is None else seed,
            max_tokens=min(generation.max_tokens or self._default_max_tokens or room, room),
            draft_tokens=draft_tokens,
            draft_tokens_asked=asked is not None,
            bypass=bypass,
            text=self.prompts.stream(generation),
            tally=SpeculationTally(draft_tokens),
            sink=hear,
        )
