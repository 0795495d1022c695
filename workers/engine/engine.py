"""Engine: load a model with its lanes, generate answers, report counts, stop."""

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
from workers.engine.prefill_budget import PrefillBudget
from workers.engine.prefix_cache import PrefixCache
from workers.engine.prefix_cache_files import PrefixCacheFiles, fingerprint
from workers.engine.probes import probe_native_verify, probe_shared_rows
from workers.engine.row import EventSink, Row, SpeculationCounter
from workers.engine.scheduler import LaneScheduler
from workers.engine.self_test import HeadHealth, check_head, warm_up
from workers.engine.sparse_prefill import NO_SPARSE_PREFILL, SparsePrefill, load_sparse_prefill
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


class Engine:
    """One model, its lanes, and their thread; create it with `Engine.start`."""

    def __init__(
        self, settings: EngineSettings, thread: EngineThread[LoadedEngine], loaded: LoadedEngine
    ) -> None:
        self.prompts = loaded.prompts
        self.card = loaded.card
        self._settings = settings
        self._thread = thread
        self._checkpoint = loaded.checkpoint
        self._memory = loaded.memory
        self._prefix_cache = loaded.prefix_cache
        self._lanes = {lane.name: lane for lane in loaded.lanes}

    @classmethod
    def start(cls, settings: EngineSettings) -> Engine:
        """Load the model on a new thread and serve it; raise `ModelUnusable` if that fails.

        Blocks until the weights are in memory and the MTP head has been tested.
        """

        def load() -> tuple[LoadedEngine, tuple[LaneScheduler, ...]]:
            loaded = load_engine(settings)
            return loaded, loaded.lanes

        thread = EngineThread(load)
        try:
            loaded = thread.start()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelUnusable(
                f"The model in {settings.model} cannot be loaded: {error}"
            ) from error
        return cls(settings, thread, loaded)

    @property
    def alive(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._thread.alive

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return the counts of every lane; safe from any thread."""
        return tuple(lane.counters.report() for lane in self._lanes.values())

    def memory_bytes(self) -> int:
        """Return the memory in use by MLX: weights, caches, activations."""
        return int(mx.get_active_memory())

    def memory_limit_bytes(self) -> int:
        """Return the limit of that memory."""
        return self._memory.limit_bytes

    def prefix_cache_bytes(self) -> int:
        """Return the memory in use by the prefix cache."""
        return self._prefix_cache.size_bytes

    def prefixes(self) -> tuple[str, ...]:
        """Return the keys of the cached prefixes, most recently used first."""
        return self._prefix_cache.keys

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; running generations raise `EngineStopped`."""
        self._thread.stop(timeout_s)
        self._prefix_cache.close()

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation; raise an `EngineError` if it cannot continue.

        Closing the generator, or cancelling its task, drops the row within one step.
        """
        lane = self._lanes.get(generation.lane)
        if lane is None:
            raise InvalidGeneration("model", f"This worker has no {generation.lane} lane.")
        if lane.waiting_rows >= self._settings.queue_limit:
            raise EngineBusy(retry_after_s=1.0)
        prompt = await asyncio.to_thread(self.prompts.prepare, generation.prompt)
        events: asyncio.Queue[Event | EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def enqueue(event: Event | EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        row = self._make_row(generation, lane, prompt, enqueue)
        if prompt.prefix is not None:
            key = prompt.prefix.key
            row.prefetched = await asyncio.to_thread(self._prefix_cache.prefetch, key)
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
            if not row.finish_reason:
                self._thread.cancel(row)

    def _make_row(
        self, generation: Generation, lane: LaneScheduler, prompt: PreparedPrompt, sink: EventSink
    ) -> Row:
        room = self._validate(generation, prompt)
        bypass = lane.bypass_reasons(generation)
        requested = generation.draft_tokens
        draft_tokens = self._settings.draft_tokens if requested is None else requested
        if bypass or not lane.has_head:
            draft_tokens = 0
        seed = generation.sampling.seed
        default = self._checkpoint.default_max_tokens
        return Row(
            generation=generation,
            prompt=prompt,
            seed=secrets.randbits(63) if seed is None else seed,
            max_tokens=min(generation.max_tokens or default or room, room),
            draft_tokens=draft_tokens,
            draft_tokens_fixed=requested is not None,
            bypass=bypass,
            text=self.prompts.stream(generation),
            speculation=SpeculationCounter(draft_tokens),
            sink=sink,
        )

    def _validate(self, generation: Generation, prompt: PreparedPrompt) -> int:
        """Raise `InvalidGeneration` if the request can never run; return the room for its answer.

        The room is in tokens, limited by the context window and by the memory for one row.
        """
        count = len(prompt.tokens)
        context, longest = self.card.context_tokens, self._memory.max_row_tokens()
        if not count:
            raise InvalidGeneration("messages", "The prompt is empty.")
        if count >= context:
            raise InvalidGeneration(
                "messages",
                f"The prompt has {count} tokens; this model's context holds {context}.",
                code="context_length_exceeded",
            )
        if count >= longest:
            raise InvalidGeneration(
                "messages",
                f"The prompt has {count} tokens; this machine's memory holds {longest}.",
                code="prompt_exceeds_memory",
            )
        for token, _ in generation.sampling.logit_bias:
            if token >= self._checkpoint.vocabulary:
                raise InvalidGeneration("logit_bias", f"Token {token} is not in the vocabulary.")
        return min(context, longest) - count


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A loaded model with its lanes."""

    checkpoint: Checkpoint
    prompts: PromptRenderer
    lanes: tuple[LaneScheduler, ...]
    prefix_cache: PrefixCache
    memory: MemoryEstimate
    card: ModelCard


def load_engine(settings: EngineSettings) -> LoadedEngine:
    """Load the model, create its lanes, and test its MTP head; runs on the engine thread."""
    checkpoint = load_checkpoint(settings.model)
    sparse_prefill = load_sparse_prefill(settings.spec_prefill, checkpoint)
    prompts = PromptRenderer(checkpoint.processor)
    draft_tokens = settings.draft_tokens if checkpoint.head is not None else 0
    if draft_tokens:
        checkpoint.target.native_verify = probe_native_verify(checkpoint.target)
    if checkpoint.target.supports_batching and not checkpoint.target.explicit_positions:
        checkpoint.target.supports_batching = probe_shared_rows(checkpoint.target)
    memory = measure_memory(checkpoint.target, checkpoint.head)
    rows = checkpoint.target.row_limit(settings.max_rows)

    def make_lane(
        name: LaneName,
        prefix_cache: PrefixCache,
        siblings: Sequence[LaneScheduler] = (),
        sparse_prefill: SparsePrefill = NO_SPARSE_PREFILL,
    ) -> LaneScheduler:
        return LaneScheduler(
            name,
            checkpoint,
            prompts,
            LaneCounters(name, slots=rows, draft_tokens=draft_tokens),
            prefix_cache=prefix_cache,
            siblings=siblings,
            draft_tokens=draft_tokens,
            max_rows=rows,
            prefill_budget=PrefillBudget(settings.prefill_chunk_tokens, settings.prefill_budget_s),
            memory=memory,
            sparse_prefill=sparse_prefill,
        )

    prefix_cache = PrefixCache(
        min(settings.prefix_cache_bytes, memory.room_bytes // 2), _prefix_cache_files(settings)
    )
    lanes: list[LaneScheduler] = []
    for name in settings.lanes:
        # Without a head the text-mtp lane would promise the router a speculation that never comes.
        if name is not LaneName.TEXT_MTP or checkpoint.head is not None:
            lanes.append(make_lane(name, prefix_cache, lanes, sparse_prefill))
    if not lanes:
        reason = checkpoint.mtp_unavailable_reason
        raise ModelUnusable(f"None of the configured lanes can run: {reason}.")
    test_lane = make_lane(lanes[0].name, PrefixCache(0))
    logger.info("engine.warming_up the first start on a machine compiles kernels")
    warm_up(test_lane, prompts, draft_tokens)
    health = None
    if draft_tokens:
        health = check_head(test_lane, prompts)
        logger.info("mtp_head.tested %s", health.description)
        for lane in lanes:
            lane.counters.head_healthy = health.healthy
    return LoadedEngine(
        checkpoint=checkpoint,
        prompts=prompts,
        lanes=tuple(lanes),
        prefix_cache=prefix_cache,
        memory=memory,
        card=_card(
            settings, checkpoint, prompts, lanes, health=health, sparse_prefill=sparse_prefill
        ),
    )


def _prefix_cache_files(settings: EngineSettings) -> PrefixCacheFiles | None:
    if settings.prefix_cache_dir is None:
        return None
    return PrefixCacheFiles(
        settings.prefix_cache_dir, settings.prefix_cache_bytes, fingerprint(settings.model)
    )


def _card(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    prompts: PromptRenderer,
    lanes: Sequence[LaneScheduler],
    *,
    health: HeadHealth | None,
    sparse_prefill: SparsePrefill,
) -> ModelCard:
    parts = [checkpoint.target.model.parameters()]
    if checkpoint.head is not None:
        parts.append(checkpoint.head.parameters())
    parameters = [array for _, array in tree_flatten(parts)]
    reason = checkpoint.mtp_unavailable_reason
    if health and not health.healthy:
        reason = health.description
    return ModelCard(
        model=settings.served_name,
        family=checkpoint.family,
        lanes=tuple(lane.name for lane in lanes),
        context_tokens=checkpoint.context_tokens,
        vision=prompts.has_vision,
        parameters=sum(array.size for array in parameters),
        weights_bytes=sum(array.nbytes for array in parameters),
        native_verify=checkpoint.target.native_verify,
        mtp=health is not None and health.healthy,
        mtp_unavailable_reason=reason,
        draft_tokens_requested=settings.draft_tokens,
        draft_tokens_effective=max(lane.counters.report().effective_draft_tokens for lane in lanes),
        spec_prefill=sparse_prefill.description,
    )
