"""Engine: load a model with its lanes, generate answers, report counts, stop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

import mlx.core as mx
from mlx.utils import tree_flatten

from paceline.drain_rate import QueuePlace
from paceline.protocol import ANSWER_FIELD, LaneReport, StartStage
from paceline.request.profile import Bypass
from workers.engine import types
from workers.engine.decode.draft_length import RUN_LENGTHS
from workers.engine.decode.memory_pressure import (
    MemoryMonitor,
    MemoryReading,
    Pressure,
    memory_reader,
)
from workers.engine.decode.prefill import Prefill
from workers.engine.decode.row import EventSink, Row, SpeculationCounter
from workers.engine.decode.sampler import PromptLogprobs
from workers.engine.decode.step_graph import StepGraph
from workers.engine.lane.memory import MemoryEstimate, measure_memory
from workers.engine.lane.prefill_queue import PrefillQueue
from workers.engine.lane.prefix_exchange import PrefixExchange
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.lane.sparse_prefill import load_sparse_prefill
from workers.engine.lane.thread import EngineThread
from workers.engine.model.checkpoint import Checkpoint, limit_context, load_checkpoint
from workers.engine.model.device import (
    compiles_quickly,
    limit_freed_buffers,
    limit_memory,
    memory_limit_bytes,
)
from workers.engine.model.model_folder import refusing
from workers.engine.model.mtp_head import HeadUnusable, MtpHead
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import PrefixCacheFiles, fingerprint, model_fingerprint
from workers.engine.prefix.transfer import (
    CacheLayout,
    PrefixOffer,
    PrefixQuery,
    PrefixSource,
    TransferFailed,
)
from workers.engine.startup.head_precision import Restore, quantise_if_faster
from workers.engine.startup.head_shortlist import use_shortlist_if_faster
from workers.engine.startup.probes import (
    probe_cache_layout,
    probe_compiled_passes,
    probe_native_verify,
    probe_shared_rows,
)
from workers.engine.startup.self_test import HeadHealth, check_head, warm_up
from workers.engine.text.grammar import GrammarCompiler
from workers.engine.text.long_text import in_turn
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Engine:
    """One model, its lanes, and their thread; create it with `Engine.start`."""

    settings: types.EngineSettings
    checkpoint: Checkpoint
    prompts: PromptRenderer
    grammars: GrammarCompiler
    lanes: tuple[LaneScheduler, ...]
    prefix_cache: PrefixCache
    memory: MemoryEstimate
    monitor: MemoryMonitor
    health: InitVar[HeadHealth | None]
    spec_prefill: InitVar[str | None]
    cache_layout: CacheLayout | None
    """None for a family whose caches cannot be stored."""
    card: types.ModelCard = field(init=False)
    thread: EngineThread[Engine] = field(init=False)
    exchange: PrefixExchange | None = field(init=False, default=None)
    _relief: Future[None] | None = field(init=False, default=None)
    """The last time that an idle engine was asked to give back caches."""

    def __post_init__(self, health: HeadHealth | None, spec_prefill: str | None) -> None:
        parts = [self.checkpoint.target.model.parameters()]
        if self.checkpoint.head is not None:
            parts.append(self.checkpoint.head.parameters())
        parameters = [array for _, array in tree_flatten(parts)]
        reason = self.checkpoint.mtp_unavailable_reason
        if health and not health.healthy:
            reason = health.description
        reports, tool_format = self.lane_reports(), self.prompts.tool_format
        self.card = types.ModelCard(
            model=self.settings.served_name,
            family=self.checkpoint.family,
            lanes=tuple(lane.name for lane in self.lanes),
            context_tokens=self.checkpoint.context_tokens,
            vision=self.prompts.has_vision,
            parameters=sum(array.size for array in parameters),
            weights_bytes=sum(array.nbytes for array in parameters),
            native_verify=self.checkpoint.target.native_verify,
            mtp=health is not None and health.healthy,
            looks_up=any(lane.looks_up for lane in self.lanes),
            mtp_unavailable_reason=reason,
            draft_tokens_requested=self.settings.draft_tokens,
            draft_tokens_effective=max(report.effective_draft_tokens for report in reports),
            fingerprint=model_fingerprint(self.settings.model, self.settings.adapter),
            default_max_tokens=self.checkpoint.default_max_tokens,
            sampling=self.checkpoint.sampling,
            constrains_calls=bool(tool_format and tool_format.style),
            system_inside=self.prompts.limits.system_inside,
            spec_prefill=spec_prefill,
        )

    @classmethod
    def start(
        cls, settings: types.EngineSettings, progress: types.ProgressSink = lambda *_: None
    ) -> Engine:
        """Load the model on a new thread and serve it; raise `ModelUnusable` if that fails.

        Blocks until the weights are in memory and the MTP head has been tested.
        """

        def load() -> tuple[Engine, tuple[LaneScheduler, ...]]:
            with refusing(settings.model):
                engine = load_engine(settings, progress)
            return engine, engine.lanes

        thread = EngineThread(load)
        engine = thread.start()
        engine.thread = thread
        if engine.cache_layout is not None:
            engine.exchange = PrefixExchange(
                engine.prefix_cache,
                thread,
                engine.cache_layout,
                _fingerprint(settings),
                cuttable=engine.checkpoint.target.starts_anywhere,
            )
        return engine

    @property
    def alive(self) -> bool:
        """Return whether the engine accepts requests."""
        return self.thread.alive

    @property
    def ready(self) -> bool:
        """Return whether it serves now, as always while it is alive."""
        return self.alive

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return the counts of every lane; safe from any thread."""
        return tuple(lane.counters.report() for lane in self.lanes)

    def queue_place(self, generation: types.Generation) -> QueuePlace | None:
        """Return the place of a generation in the queue of its lane, if it waits there."""
        return self._lane(generation).queue_place(generation)

    def memory_bytes(self) -> int:
        """Return the memory in use by MLX: weights, caches, activations."""
        return int(mx.get_active_memory())

    def memory_limit_bytes(self) -> int:
        """Return the limit of that memory."""
        return self.memory.limit_bytes

    def memory_reading(self) -> MemoryReading:
        """Return what the process takes of the memory; while that is short, give back caches.

        A lane does so in each step; this is for the time between requests.
        """
        reading = self.monitor.reading()
        if reading.pressure is not Pressure.NORMAL and (not self._relief or self._relief.done()):
            with suppress(types.EngineStopped):
                self._relief = self.thread.call(self.lanes[0].relieve)
        return reading

    def failed_allocations(self) -> int:
        """Return how many allocations have failed since the start."""
        return self.monitor.failed_allocations

    def prefix_cache_bytes(self) -> int:
        """Return the memory in use by the prefix cache."""
        return self.prefix_cache.size_bytes

    def prefixes(self) -> tuple[str, ...]:
        """Return the keys of the cached prefixes, most recently used first."""
        return self.prefix_cache.keys

    def evicted_prefixes(self) -> tuple[str, ...]:
        """Return the keys of the last evicted prefixes that are not on disk, the last one first."""
        return self.prefix_cache.evicted_keys

    @asynccontextmanager
    async def open(self, query: PrefixQuery) -> AsyncIterator[PrefixOffer]:
        """Offer nodes of the prefix cache to another engine; raise `TransferFailed` without any."""
        if self.exchange is None:
            raise TransferFailed("absent")
        async with self.exchange.open(query) as offer:
            yield offer

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
        self.thread.stop(timeout_s)
        self.grammars.close()
        self.prefix_cache.close()

    async def check(self, generation: types.Generation) -> int:
        """Return the tokens of the prompt; raise an `EngineError` if it can never be answered."""
        prompt = await self._prepare(generation)
        self._make_row(generation, self._lane(generation), prompt, lambda _: None)
        if generation.constraint is not None:
            await self.grammars.matcher(generation.constraint, generation.call_marks, prompt.scope)
        return len(prompt.tokens)

    def _lane(self, generation: types.Generation) -> LaneScheduler:
        lane = next((lane for lane in self.lanes if lane.name is generation.lane), None)
        if lane is None:
            raise types.InvalidGeneration("model", f"This worker has no {generation.lane} lane.")
        return lane

    def _check_room(self, lane: LaneScheduler) -> None:
        """Raise `EngineBusy` for a full queue, or `MemoryShort` at critical pressure."""
        if lane.waiting_rows >= self.settings.queue_limit:
            raise types.EngineBusy(retry_after_s=lane.retry_after_s)
        reading = self.memory_reading()
        if reading.pressure is Pressure.CRITICAL:
            raise types.MemoryShort(reading.used_bytes, reading.limit_bytes)

    async def _prepare(self, generation: types.Generation) -> PreparedPrompt:
        limit = generation.prompt_limit
        if limit is not None and limit < 0:  # leave room for one token of the answer
            limit = min(self.card.context_tokens, self.memory.max_row_tokens()) - 1
        read = partial(self.prompts.prepare, generation.prompt, limit)
        prompt = await in_turn(len(generation.prompt.text), read)
        if generation.exact:  # what the prefix cache holds may have been read in other chunks
            prompt = replace(prompt, scope=None)
        return prompt

    async def generate(
        self, generation: types.Generation, prefix_sources: Sequence[PrefixSource] = ()
    ) -> AsyncGenerator[types.Event, None]:
        """Yield the events of one generation; raise an `EngineError` if it cannot continue.

        Closing the generator, or cancelling its task, drops the row within one step.
        """
        lane = self._lane(generation)
        self._check_room(lane)
        prompt = await self._prepare(generation)
        events: asyncio.Queue[types.Event | types.EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def enqueue(event: types.Event | types.EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        row = self._make_row(generation, lane, prompt, enqueue)
        if generation.constraint is not None:
            row.matcher = await self.grammars.matcher(
                generation.constraint, generation.call_marks, prompt.scope
            )
        if generation.given is not None:
            for delta in await asyncio.to_thread(row.restore, generation.given):
                yield delta
            if row.finish_reason:
                yield row.finished_event()
                return
        try:
            row.prefetched = await asyncio.to_thread(
                self.prefix_cache.prefetch, prompt.scope, prompt.identity, lambda: row.cancelled
            )
            if prefix_sources and self.exchange is not None:
                await self.exchange.fetch(row, lane, prefix_sources)
            self.thread.submit(lane, row)
            while True:
                event = await events.get()
                if isinstance(event, types.EngineError):
                    raise event
                yield event
                if isinstance(event, types.Finished):
                    return
        finally:
            row.cancelled = True  # the lane drops it before the next step, if it still has it

    def _make_row(
        self,
        generation: types.Generation,
        lane: LaneScheduler,
        prompt: PreparedPrompt,
        sink: EventSink,
    ) -> Row:
        room = self._validate(generation, prompt)
        wanted = generation.max_tokens
        if wanted is None:
            wanted = self.checkpoint.default_max_tokens or room
        max_tokens = min(wanted, room)
        tokens = len(prompt.tokens) + generation.choices * max_tokens + generation.further_tokens
        if generation.token_limit is not None and tokens > generation.token_limit:
            raise types.TokenLimitExceeded(tokens)
        bypass = lane.bypass_reasons(generation)
        requested = generation.draft_tokens
        draft_tokens = self.settings.draft_tokens if requested is None else requested
        with_head = lane.has_head and Bypass.HEAD_UNHEALTHY not in bypass
        barred = generation.exact or any(one is not Bypass.HEAD_UNHEALTHY for one in bypass)
        # A request that names its draft length gets the head's drafts where there is a head.
        looks_up = lane.looks_up and not (with_head and requested is not None)
        if barred or not (with_head or looks_up):
            draft_tokens = 0
        seed = generation.sampling.seed
        return Row(
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
            prompt_logprobs=PromptLogprobs(
                prompt.tokens, generation.top_logprobs or 0, self.prompts.raw
            )
            if generation.prompt_logprobs
            else None,
            speculation=SpeculationCounter(draft_tokens if with_head else 0),
            sink=sink,
        )

    def _validate(self, generation: types.Generation, prompt: PreparedPrompt) -> int:
        """Raise `InvalidGeneration` if the request can never run; return the room for its answer.

        The room is in tokens, limited by the context window and by the memory for one row.
        """
        count = len(prompt.tokens)
        context, longest = self.card.context_tokens, self.memory.max_row_tokens()
        prompt.check(context, self.checkpoint.vocabulary)
        if count >= longest:
            raise types.InvalidGeneration(
                "messages",
                f"The prompt has {count} tokens; this machine's memory holds {longest}.",
                code="prompt_exceeds_memory",
            )
        given = generation.given.steps if generation.given else ()
        named = {
            "logit_bias": [token for token, _ in generation.sampling.logit_bias],
            "stop_token_ids": generation.stop_tokens,
            ANSWER_FIELD: [token for step in given for token in step.tokens],
        }
        for field_name, tokens in named.items():
            for token in tokens:
                if token >= self.checkpoint.vocabulary:
                    raise types.InvalidGeneration(
                        field_name, f"Token {token} is not in the vocabulary."
                    )
        return min(context, longest) - count


def load_engine(
    settings: types.EngineSettings, progress: types.ProgressSink = lambda *_: None
) -> Engine:
    """Load the model, create its lanes, and test its MTP head; runs on the engine thread."""
    progress(StartStage.WEIGHTS, 0, 0)
    limit_memory()
    try:
        checkpoint = load_checkpoint(
            settings.model, mtp=settings.mtp, adapter=settings.adapter, dtype=settings.dtype
        )
    except HeadUnusable as error:
        raise types.ModelUnusable(str(error)) from error
    checkpoint = limit_context(checkpoint, settings.context_tokens)
    sparse_prefill = load_sparse_prefill(settings.spec_prefill, checkpoint)
    prompts = PromptRenderer(checkpoint.processor, checkpoint.context_tokens)
    grammars = GrammarCompiler(checkpoint.processor, checkpoint.vocabulary, checkpoint.eos)
    target = checkpoint.target
    draft_tokens = _probe(checkpoint, settings.draft_tokens)
    head = checkpoint.head if draft_tokens else None
    restore = quantise_if_faster(head, target) if head is not None else None
    # One for all lanes and the warm-up: what is compiled once serves all.
    shares = target.explicit_positions or target.supports_batching
    graph = StepGraph(target, head) if shares else None
    if graph is not None:
        use_shortlist_if_faster(checkpoint, graph)
    memory = measure_memory(
        target, checkpoint.head, max(draft_tokens, RUN_LENGTHS[0]) if draft_tokens else 0
    )
    monitor = MemoryMonitor(memory_reader(memory_limit_bytes()))
    make_lane = partial(
        LaneScheduler,
        checkpoint=checkpoint,
        prompts=prompts,
        draft_tokens=draft_tokens,
        max_rows=target.row_limit(settings.max_rows),
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        prefill_budget_s=settings.prefill_budget_s,
        memory=memory,
        monitor=monitor,
        graph=graph,
    )
    files = _open_files(settings, checkpoint)
    limit_bytes = settings.prefix_cache_bytes
    if limit_bytes is None:
        limit_bytes = memory.room_bytes // 4
    prefix_cache = PrefixCache(
        min(limit_bytes, memory.room_bytes // 2), files, quantized=settings.prefix_cache_quantized
    )
    lanes: list[LaneScheduler] = []
    prefill_queue: PrefillQueue[Prefill] = PrefillQueue()
    for name in settings.lanes:
        # A text-mtp lane that cannot draft would promise the router a speculation that never comes.
        if name is not types.LaneName.TEXT_MTP or checkpoint.head is not None or draft_tokens:
            lane = make_lane(
                name,
                prefix_cache=prefix_cache,
                siblings=lanes,
                sparse_prefill=sparse_prefill,
                prefill_queue=prefill_queue,
            )
            lanes.append(lane)
    if not lanes:
        reason = checkpoint.mtp_unavailable_reason
        raise types.ModelUnusable(f"None of the configured lanes can run: {reason}.")
    test_lane = make_lane(lanes[0].name, prefix_cache=PrefixCache(0))
    warm_up(test_lane, prompts, draft_tokens, partial(progress, StartStage.KERNELS))
    health = None
    if head is not None:
        progress_of_test = partial(progress, StartStage.SELF_TEST)
        health = check_head(test_lane, prompts, progress_of_test)
        if _undo_savings(head, health, restore) and graph is not None:
            graph.forget()
            test_lane = make_lane(lanes[0].name, prefix_cache=PrefixCache(0))
            health = check_head(test_lane, prompts, progress_of_test)
        logger.info("mtp_head.tested %s", health.description)
        for lane in lanes:
            lane.counters.head_healthy = health.healthy
    limit_freed_buffers(memory.max_score_bytes if memory.score_bytes else 0)
    return Engine(
        settings=settings,
        checkpoint=checkpoint,
        prompts=prompts,
        grammars=grammars,
        lanes=tuple(lanes),
        prefix_cache=prefix_cache,
        memory=memory,
        monitor=monitor,
        health=health,
        spec_prefill=sparse_prefill.description,
        cache_layout=probe_cache_layout(
            target, checkpoint.head, quantized=settings.prefix_cache_quantized
        )
        if target.supports_prefix_cache
        else None,
    )


def _undo_savings(head: MtpHead, health: HeadHealth, restore: Restore | None) -> bool:
    """Give a head that fails its test its own weights and the whole vocabulary back.

    Return whether it had others. A healthy head loses its shortlist alone, if that does not pay.
    """
    shortlist = head.shortlist
    if health.healthy:
        if shortlist and not shortlist.settle(health.first_token_acceptance, health.answers):
            head.shortlist = None
        return False
    head.shortlist = None
    if restore is not None:
        restore()
    return bool(restore or shortlist)


def _probe(checkpoint: Checkpoint, draft_tokens: int) -> int:
    """Probe what a model can do in a batch; return how many tokens its lanes draft."""
    target = checkpoint.target
    if target.supports_batching and not target.explicit_positions:
        target.supports_batching = probe_shared_rows(target)
    if not target.supports_batching:
        return 0
    if draft_tokens:
        target.native_verify = probe_native_verify(target)
    if not target.compiles.plain and compiles_quickly():
        target.compiles = probe_compiled_passes(target)
    return draft_tokens if target.native_verify or checkpoint.head is not None else 0


def _fingerprint(settings: types.EngineSettings) -> str:
    """Tell one model from another; what the prefix cache holds depends on the MTP head too."""
    model = fingerprint(settings.model, settings.adapter)
    return f"{model} {fingerprint(settings.mtp)}" if settings.mtp else model


def _open_files(settings: types.EngineSettings, checkpoint: Checkpoint) -> PrefixCacheFiles | None:
    """Return the prefix cache on disk; None without one, or if the folder is unusable.

    What the caches hold depends on the checkpoint, and on the types of its arrays on this device.
    """
    if settings.prefix_cache_dir is None or not settings.prefix_cache_disk_bytes:
        return None
    parameters = tree_flatten(checkpoint.target.model.parameters())
    dtypes = ",".join(sorted({str(array.dtype) for _, array in parameters}))
    dtypes += " kv-8" if settings.prefix_cache_quantized else ""
    try:
        return PrefixCacheFiles(
            settings.prefix_cache_dir,
            settings.prefix_cache_disk_bytes,
            f"{_fingerprint(settings)} {dtypes}",
            settings.prefix_cache_secret,
        )
    except OSError as error:
        logger.warning("prefix_cache.memory_only error=%s", error)
        return None
