"""Engine: load a model with its lanes, generate answers, report counts, stop."""

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial

from mlx.utils import tree_flatten

from paceline.drain_rate import QueuePlace
from paceline.protocol import LaneReport, StartStage
from paceline.request.profile import Bypass
from workers.engine import types
from workers.engine.decode.draft_length import RUN_LENGTHS
from workers.engine.decode.memory_pressure import (
    MemoryMonitor,
    MemoryReading,
    Pressure,
    memory_reader,
)
from workers.engine.decode.row import EventSink, Row, SpeculationCounter
from workers.engine.decode.sampler import PromptLogprobs
from workers.engine.decode.step_graph import StepGraph
from workers.engine.lane.admission import Admission
from workers.engine.lane.memory import measure_memory
from workers.engine.lane.prefix_exchange import PrefixExchange
from workers.engine.lane.scheduler import EngineParts, LaneScheduler
from workers.engine.lane.sparse_prefill import load_sparse_prefill
from workers.engine.lane.thread import EngineThread, ThreadedEngine
from workers.engine.model.checkpoint import Checkpoint, limit_context, load_checkpoint
from workers.engine.model.device import (
    limit_freed_buffers,
    limit_memory,
    memory_limit_bytes,
    on_cpu,
)
from workers.engine.model.model_folder import refusing
from workers.engine.model.mtp_head import HeadUnusable
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import PrefixCacheFiles
from workers.engine.prefix.fingerprint import DIGESTS, Fingerprint, ModelFiles, lower_priority
from workers.engine.prefix.transfer import PrefixOffer, PrefixQuery, PrefixSource, TransferFailed
from workers.engine.startup.head_speed import quantise_if_faster, use_shortlist_if_faster
from workers.engine.startup.probes import (
    probe_cache_layout,
    probe_compiled_passes,
    probe_native_verify,
    probe_shared_rows,
)
from workers.engine.startup.self_test import HeadHealth, settle_head, warm_up
from workers.engine.text.grammar import GrammarCompiler
from workers.engine.text.tokenizer import PromptRenderer

logger = logging.getLogger(__name__)


class Engine(ThreadedEngine):
    """One model, its lanes, and their thread; create it with `Engine.start`."""

    def __init__(
        self,
        settings: types.EngineSettings,
        parts: EngineParts,
        health: HeadHealth | None,
        thread: EngineThread,
        files: ModelFiles,
    ) -> None:
        """Serve lanes that are ready; those of `thread` from when it has loaded them.

        `files` are those of the model. While some have no digest, a thread reads them.
        """
        self.admission = parts.admission
        super().__init__(thread, self.admission.monitor)
        self.settings = settings
        self.checkpoint = checkpoint = parts.checkpoint
        self.prompts = parts.prompts
        self.lanes = tuple(parts.lanes)
        self.prefix_cache = self.admission.prefix_cache
        self.grammars = GrammarCompiler(checkpoint.processor, checkpoint.vocabulary, checkpoint.eos)
        self.card = _describe(settings, parts, health)
        self.exchange: PrefixExchange | None = None
        """None for a family whose caches cannot be stored."""
        if checkpoint.target.supports_prefix_cache:
            layout = probe_cache_layout(
                checkpoint.target, checkpoint.head, quantized=settings.prefix_cache_quantized
            )
            self.exchange = PrefixExchange(
                self.prefix_cache,
                thread,
                layout,
                cuttable=checkpoint.target.starts_anywhere,
            )
        self._relief: Future[None] | None = None
        """The last time that an idle engine was asked to give back caches."""
        self._stopped = threading.Event()
        parameters = tree_flatten(checkpoint.target.model.parameters())
        self._dtypes = ",".join(sorted({str(array.dtype) for _, array in parameters}))
        if (known := files.fingerprint()) is not None:
            self._identify(known)
        else:
            threading.Thread(
                target=self._read_files, args=(files,), name="paceline-fingerprint", daemon=True
            ).start()

    @classmethod
    def start(
        cls, settings: types.EngineSettings, progress: types.ProgressSink = lambda *_: None
    ) -> "Engine":
        """Load the model on a new thread and serve it; raise `ModelUnusable` if that fails.

        Blocks until the weights are in memory and the MTP head has been tested.
        """
        thread = EngineThread()

        def load() -> tuple[Engine, tuple[LaneScheduler, ...]]:
            with refusing(settings.model):
                engine = load_engine(settings, progress, thread)
            return engine, engine.lanes

        return thread.start(load)

    def _read_files(self, files: ModelFiles) -> None:
        lower_priority()
        try:
            known = files.read(self._stopped.is_set)
        except OSError:
            known = None
        if known is not None:
            self._identify(known)
        elif not self._stopped.is_set():
            logger.warning("model.unidentified reason=files have changed since the start")

    def _identify(self, known: Fingerprint) -> None:
        """Let the engine use files and nodes of the same model; safe from any thread."""
        files = _open_files(self.settings, f"{known.caches} {self._dtypes}")
        self.prefix_cache.use_files(files)
        if self.exchange is not None:
            self.exchange.identify(known.caches)
        self.card = replace(self.card, fingerprint=known.answers)

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return the counts of every lane; safe from any thread."""
        return tuple(lane.counters.report() for lane in self.lanes)

    def queue_place(self, generation: types.Generation) -> QueuePlace | None:
        """Return the place of a generation in the queue of its lane, if it waits there."""
        return self._lane(generation).queue_place(generation)

    def memory_reading(self) -> MemoryReading:
        """Return what the process takes of the memory; while that is short, give back caches.

        A lane does so in each step; this is for the time between requests.
        """
        reading = super().memory_reading()
        if reading.pressure is not Pressure.NORMAL and (not self._relief or self._relief.done()):
            with suppress(types.EngineStopped):
                self._relief = self.thread.call(self.admission.relieve)
        return reading

    def state(self) -> types.EngineState:
        """Return the memory in use, and the keys of the prefix cache; safe from any thread."""
        return replace(
            super().state(),
            failed_allocations=self.monitor.failed_allocations,
            prefix_cache_bytes=self.prefix_cache.size_bytes,
            prefixes=self.prefix_cache.keys,
            evicted_prefixes=self.prefix_cache.evicted_keys,
        )

    def open(self, query: PrefixQuery) -> AbstractAsyncContextManager[PrefixOffer]:
        """Offer nodes of the prefix cache to another engine; raise `TransferFailed` without any."""
        if self.exchange is None:
            raise TransferFailed("absent")
        return self.exchange.open(query)

    async def drop_prefixes(self, scope: str | None) -> None:
        """Delete all of an isolation scope from memory and disk; None: of all scopes.

        Running requests of it store nothing any more.
        """

        def drop() -> Future[None]:
            for lane in self.lanes:
                lane.stop_caching(scope)
            self.checkpoint.target.picture_features.drop(scope)
            return self.prefix_cache.drop(scope)

        await asyncio.wrap_future(await asyncio.wrap_future(self.thread.call(drop)))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; running generations raise `EngineStopped`."""
        self._stopped.set()
        super().stop(timeout_s)
        self.grammars.close()
        self.prefix_cache.close()

    async def check(self, generation: types.Generation) -> int:
        """Return the tokens of the prompt; raise an `EngineError` if it can never be answered."""
        row = await self._make_row(generation, self._lane(generation), lambda _: None)
        return len(row.prompt.tokens)

    async def generate(
        self, generation: types.Generation, prefix_sources: Sequence[PrefixSource] = ()
    ) -> AsyncGenerator[types.Event, None]:
        """Yield the events of one generation; raise an `EngineError` if it cannot continue.

        Closing the generator, or cancelling its task, drops the row within one step.
        """
        lane = self._lane(generation)
        lane.check_room(self.memory_reading())
        events: asyncio.Queue[types.Event | types.EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def enqueue(event: types.Event | types.EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        row = await self._make_row(generation, lane, enqueue)
        if generation.given is not None:
            for delta in await asyncio.to_thread(row.restore, generation.given):
                yield delta
            if row.finish_reason:
                yield row.finished_event()
                return
        try:
            await asyncio.to_thread(self._prefetch, row)
            if prefix_sources and self.exchange is not None:
                await self.exchange.fetch(row, lane, prefix_sources)
            self.thread.submit(partial(lane.add, row))
            while True:
                event = await events.get()
                if isinstance(event, types.EngineError):
                    raise event
                yield event
                if isinstance(event, types.Finished):
                    return
        finally:
            row.cancelled = True  # the lane drops it before the next step, if it still has it

    def _prefetch(self, row: Row) -> None:
        """Read from disk what memory lacks of a prompt; blocks.

        If memory has less than half of it when its turn comes, the row looks once more.
        """
        cache, prompt = self.prefix_cache, row.prompt
        if prompt.scope is None:
            return
        row.prefetched = cache.prefetch(prompt.scope, prompt.identity, lambda: row.cancelled)
        perhaps = not row.prefetched and cache.is_behind
        known = cache.known_tokens(prompt.scope, prompt.identity)
        row.held_tokens = (len(prompt.tokens) if perhaps else known) // 2

    def _lane(self, generation: types.Generation) -> LaneScheduler:
        lane = next((lane for lane in self.lanes if lane.name is generation.lane), None)
        if lane is None:
            raise types.InvalidGeneration("model", f"This worker has no {generation.lane} lane.")
        return lane

    async def _make_row(
        self, generation: types.Generation, lane: LaneScheduler, sink: EventSink
    ) -> Row:
        """Return a row to run; raise an `EngineError` if it can never be answered."""
        context, longest = self.card.context_tokens, self.admission.memory.max_row_tokens()
        prompt = await self.prompts.read(generation, min(context, longest))
        if generation.exact:  # what the prefix cache holds may have been read in other chunks
            prompt = replace(prompt, scope=None)
        prompt.check(context, self.checkpoint.vocabulary)
        count = len(prompt.tokens)
        if count >= longest:
            raise types.InvalidGeneration(
                "messages",
                f"The prompt has {count} tokens; this machine's memory holds {longest}.",
                code="prompt_exceeds_memory",
            )
        generation.check_tokens(self.checkpoint.vocabulary)
        max_tokens = generation.answer_limit(
            count, min(context, longest) - count, self.checkpoint.default_max_tokens
        )
        bypass, requested = lane.bypass_reasons(generation), generation.draft_tokens
        draft_tokens = self.settings.draft_tokens if requested is None else requested
        with_head = lane.has_head and Bypass.HEAD_UNHEALTHY not in bypass
        barred = generation.exact or any(one is not Bypass.HEAD_UNHEALTHY for one in bypass)
        # A request that names its draft length gets the head's drafts where there is a head.
        looks_up = lane.looks_up and not (with_head and requested is not None)
        if barred or not (with_head or looks_up):
            draft_tokens = 0
        seed = generation.sampling.seed
        row = Row(
            generation=generation,
            prompt=prompt,
            seed=secrets.randbits(63) if seed is None else seed,
            max_tokens=max_tokens,
            ends=(frozenset() if generation.ignore_eos else self.checkpoint.eos)
            | generation.stop_tokens,
            draft_tokens=draft_tokens,
            draft_tokens_fixed=requested is not None,
            with_head=with_head,
            looks_up=looks_up,
            bypass=bypass,
            text=self.prompts.stream(generation),
            reasoning=self.prompts.reasoning(generation, prompt.tokens),
            speculation=SpeculationCounter(draft_tokens if with_head else 0),
            sink=sink,
        )
        if generation.prompt_logprobs:
            row.prompt_logprobs = PromptLogprobs(
                prompt.tokens, generation.top_logprobs or 0, self.prompts.raw
            )
        if generation.constraint is not None:
            row.matcher = await self.grammars.matcher(
                generation.constraint, generation.call_marks, prompt.scope
            )
        return row


def load_engine(
    settings: types.EngineSettings,
    progress: types.ProgressSink = lambda *_: None,
    thread: EngineThread | None = None,
) -> Engine:
    """Load the model, create its lanes, and test its MTP head; runs on the engine thread."""
    progress(StartStage.WEIGHTS, 0, 0)
    kept = settings.prefix_cache_dir and settings.prefix_cache_dir / DIGESTS
    files = ModelFiles(settings.model, settings.adapter, settings.mtp, kept=kept)
    limit_memory()
    try:
        checkpoint = load_checkpoint(
            settings.model, mtp=settings.mtp, adapter=settings.adapter, dtype=settings.dtype
        )
    except HeadUnusable as error:
        raise types.ModelUnusable(str(error)) from error
    progress(StartStage.KERNELS, 0, 0)  # the first pass of a shape compiles them
    checkpoint = limit_context(checkpoint, settings.context_tokens)
    target, draft_tokens = checkpoint.target, _probe(checkpoint, settings.draft_tokens)
    head = checkpoint.head if draft_tokens else None
    restore = quantise_if_faster(head, target) if head is not None else None
    # One for all lanes and the warm-up: what is compiled once serves all.
    shares = target.explicit_positions or target.supports_batching
    graph = StepGraph(target, head) if shares else None
    if graph is not None:
        use_shortlist_if_faster(checkpoint, graph)
    longest_draft = max(draft_tokens, RUN_LENGTHS[0]) if draft_tokens else 0
    memory = measure_memory(target, checkpoint.head, longest_draft)
    monitor = MemoryMonitor(memory_reader(memory_limit_bytes()))
    limit_bytes = settings.prefix_cache_bytes
    if limit_bytes is None:
        limit_bytes = memory.room_bytes // 4
    limit_bytes = min(limit_bytes, memory.room_bytes // 2)
    prefix_cache = PrefixCache(limit_bytes, quantized=settings.prefix_cache_quantized)
    max_rows = 1 if target.stores_positions else settings.max_rows
    parts = EngineParts(
        settings=replace(settings, draft_tokens=draft_tokens, max_rows=max_rows),
        checkpoint=checkpoint,
        prompts=PromptRenderer(checkpoint.processor, checkpoint.context_tokens),
        admission=Admission(target, memory, prefix_cache, monitor),
        sparse_prefill=load_sparse_prefill(settings.spec_prefill, checkpoint),
        graph=graph,
    )
    for name in settings.lanes:
        # A text-mtp lane that cannot draft would promise the router a speculation that never comes.
        if name is not types.LaneName.TEXT_MTP or checkpoint.head is not None or draft_tokens:
            LaneScheduler(name, parts)
    if not parts.lanes:
        reason = checkpoint.mtp_unavailable_reason
        raise types.ModelUnusable(f"None of the configured lanes can run: {reason}.")

    def make_test_lane() -> LaneScheduler:
        alone = Admission(target, memory, PrefixCache(0), monitor)
        return LaneScheduler(parts.lanes[0].name, replace(parts, admission=alone, lanes=[]))

    warm_up(make_test_lane(), parts.prompts, draft_tokens, partial(progress, StartStage.KERNELS))
    health = None
    if head is not None:
        assert graph is not None, "a model that drafts has rows that share passes"
        health = settle_head(
            graph, make_test_lane, parts.prompts, partial(progress, StartStage.SELF_TEST), restore
        )
        for lane in parts.lanes:
            lane.counters.head_healthy = health.healthy
    limit_freed_buffers(memory.max_score_bytes if memory.score_bytes else 0)
    return Engine(settings, parts, health, thread or EngineThread(), files)


def _probe(checkpoint: Checkpoint, draft_tokens: int) -> int:
    """Probe what a model can do in a batch; return how many tokens its lanes draft."""
    target = checkpoint.target
    if target.supports_batching and not target.explicit_positions:
        target.supports_batching = probe_shared_rows(target)
    if not target.supports_batching:
        return 0
    if draft_tokens:
        target.native_verify = probe_native_verify(target)
    # On a CPU each fused kernel takes a C++ compiler a second, and some families have a hundred.
    if not target.compiles.plain and not on_cpu():
        target.compiles = probe_compiled_passes(target)
    return draft_tokens if target.native_verify or checkpoint.head is not None else 0


def _open_files(settings: types.EngineSettings, model: str) -> PrefixCacheFiles | None:
    """Return the files of the prefix cache, if there is a folder that takes some.

    What the caches hold depends on the model, and on the types of its arrays on this device.
    """
    if settings.prefix_cache_dir is None or not settings.prefix_cache_disk_bytes:
        return None
    try:
        return PrefixCacheFiles(
            settings.prefix_cache_dir,
            settings.prefix_cache_disk_bytes,
            model + " kv-8" * settings.prefix_cache_quantized,
            settings.prefix_cache_secret,
        )
    except OSError as error:
        logger.warning("prefix_cache.memory_only error=%s", error)
        return None


def _describe(
    settings: types.EngineSettings, parts: EngineParts, health: HeadHealth | None
) -> types.ModelCard:
    checkpoint, prompts = parts.checkpoint, parts.prompts
    modules = [checkpoint.target.model, *([checkpoint.head] if checkpoint.head else [])]
    parameters = [array for _, array in tree_flatten([one.parameters() for one in modules])]
    reports = [lane.counters.report() for lane in parts.lanes]
    return types.ModelCard(
        model=settings.served_name,
        lanes=tuple(lane.name for lane in parts.lanes),
        context_tokens=checkpoint.context_tokens,
        vision=prompts.has_vision,
        parameters=sum(array.size for array in parameters),
        weights_bytes=sum(array.nbytes for array in parameters),
        mtp=health is not None and health.healthy,
        looks_up=any(lane.looks_up for lane in parts.lanes),
        mtp_unavailable_reason=health.description
        if health and not health.healthy
        else checkpoint.mtp_unavailable_reason,
        draft_tokens_requested=settings.draft_tokens,
        draft_tokens_effective=max(report.effective_draft_tokens for report in reports),
        default_max_tokens=checkpoint.default_max_tokens,
        sampling=checkpoint.sampling,
        constrains_calls=bool(prompts.tool_format and prompts.tool_format.style),
        system_inside=prompts.limits.system_inside,
        spec_prefill=parts.sparse_prefill.description,
    )
