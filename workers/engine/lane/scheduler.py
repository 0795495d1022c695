"""Scheduler of one lane: its queue, its prefills, and the decoding rows.

A step drops cancelled rows, admits what fits, evicts what exceeds the memory, reads prompts for a
bounded time, and decodes one step of every batch. Only MLX blocks it. An error ends one row; the
other rows of its batch are requeued, and so is the row with the shortest answer when the rows grow
beyond the memory. When an allocation fails, all rows of all lanes but the oldest are requeued, and
all caches are given back; when the memory of the machine is short, caches are given back and rows
wait (`admission.py`).

Several prompts are open at once; `prefill_queue.py` says which is read next.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice

import mlx.core as mx

from paceline.drain_rate import DrainRate, QueuePlace
from paceline.protocol import PrefixCounts, whole_scope
from paceline.request.profile import Bypass
from workers.engine import types
from workers.engine.decode.decoder import Decoder, Outcome, check_device
from workers.engine.decode.memory_pressure import MemoryReading, is_out_of_memory
from workers.engine.decode.metrics import LaneCounters
from workers.engine.decode.prefill import (
    Prefill,
    context_of,
    find_prefix,
    forward_chunk,
    start_prefill,
)
from workers.engine.decode.prompt_lookup import PromptLookup
from workers.engine.decode.row import Row
from workers.engine.decode.sampler import choose
from workers.engine.decode.step_graph import StepGraph
from workers.engine.lane.admission import Admission
from workers.engine.lane.prefill_budget import PrefillBudget
from workers.engine.lane.sparse_prefill import NO_SPARSE_PREFILL, SparsePrefill
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.prefix.cache import MIN_TOKENS
from workers.engine.prefix.tree import RowState
from workers.engine.text.grammar import allowed_tokens
from workers.engine.text.tokenizer import PromptRenderer

logger = logging.getLogger(__name__)

_LONG_PROMPT_TOKENS = 4096
"""Reading this many tokens leaves freed buffers of many sizes, which no step will use again."""
_RELOAD_WAIT_S = 0.01
_ESTIMATED_ROWS = 64
"""Queued rows whose cached tokens are counted anew when the prefix cache has grown."""
EXACT_CHUNK_TOKENS = 256
"""Chunk of a prompt whose answer must be exact; the measured time changes the size of others."""
DRAFTABLE_BYPASSES = frozenset(
    {
        Bypass.NON_GREEDY_SAMPLING,
        Bypass.LOGITS_PROCESSORS,
        Bypass.LOGPROBS,
        Bypass.MULTIPLE_CHOICES,
        Bypass.MEDIA,
    }
)
"""Bypass reasons that make a gateway avoid the text-mtp lane, though no lane has to.

A sampled row accepts a draft token that equals its own draw; each of several choices is a row; and
after its prefill a row with pictures is a text row with a position offset."""


@dataclass(kw_only=True, eq=False)
class EngineParts:
    """The parts that the lanes of an engine share."""

    settings: types.LaneSettings
    checkpoint: Checkpoint
    prompts: PromptRenderer
    admission: Admission
    sparse_prefill: SparsePrefill = NO_SPARSE_PREFILL
    graph: StepGraph | None = None
    """None lets each lane compile its own steps."""
    clock: Callable[[], float] = time.perf_counter
    lanes: list[LaneScheduler] = field(default_factory=list)
    decoder: Decoder = field(init=False)

    def __post_init__(self) -> None:
        """Create the decoder of these lanes."""
        self.decoder = self.admission.decoder = Decoder(
            self.checkpoint, self.prompts, draft_tokens=self.settings.draft_tokens,
            clock=self.clock, graph=self.graph,
        )  # fmt: skip


class LaneScheduler:
    """Generations of one lane; used by the engine thread only, unless a method says otherwise."""

    def __init__(self, name: types.LaneName, parts: EngineParts) -> None:
        """Create a lane, and add it to those of the engine."""
        settings, checkpoint = parts.settings, parts.checkpoint
        draft_tokens, slots = settings.draft_tokens, settings.max_rows
        self.name = name
        self.ends = checkpoint.eos
        """Tokens that end an answer of the model."""
        self.counters = LaneCounters(name, slots=slots, draft_tokens=draft_tokens)
        self.has_head = checkpoint.head is not None and draft_tokens > 0
        self._settings = settings
        self._lanes = parts.lanes
        self._admission = parts.admission
        self._clock = parts.clock
        self._sparse_prefill = parts.sparse_prefill
        self._target = checkpoint.target
        self._head = parts.decoder.head
        self._prefill_budget = PrefillBudget(
            settings.prefill_chunk_tokens, settings.prefill_budget_s
        )
        self._waiting: deque[Row] = deque()
        self._drain_rate = DrainRate()
        self._draining = False
        """Whether rows wait because the lane is full, so that its rate shows."""
        self._decoder = parts.decoder
        self._decoder.add_lane(name, self.counters, self._store_answer)
        self.looks_up = self._decoder.looks_up
        """Whether rows draft by prompt lookup."""
        parts.lanes.append(self)

    def owns(self, row: Row) -> bool:
        """Return whether a row is of this lane."""
        return row.generation.lane is self.name

    # --- state, which any thread may read ---------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether a step has anything to do."""
        return bool(self._waiting or self.prefills or self.running_rows)

    @property
    def prefills(self) -> list[Prefill]:
        """Return the open prefills."""
        return self._admission.prefills.of(self.name)

    @property
    def running_rows(self) -> int:
        """Return the number of decoding rows."""
        return sum(map(self.owns, self._decoder.rows))

    @property
    def waiting_rows(self) -> int:
        """Return the number of queued rows."""
        return len(self._waiting)

    @property
    def retry_after_s(self) -> float:
        """Return when a request that the full queue rejects may return."""
        waiting, slots = len(self._waiting), self.counters.slots
        return self._drain_rate.retry_after_s(waiting, self._clock(), slots)

    def check_room(self, reading: MemoryReading) -> None:
        """Raise `EngineBusy` for a full queue, or `MemoryShort` at critical pressure."""
        if self.waiting_rows >= self._settings.queue_limit:
            raise types.EngineBusy(self.retry_after_s)
        reading.check()

    def queue_place(self, generation: types.Generation) -> QueuePlace | None:
        """Return the place of a generation in the queue; None if it waits no more."""
        for number, row in enumerate(tuple(self._waiting), 1):
            if row.generation is generation:
                return self._drain_rate.place(number, self._clock(), self.counters.slots)
        return None

    def cached_tokens(self, row: Row) -> int:
        """Return how many tokens of a row are in the prefix cache."""
        match = find_prefix(row, self._target, self._head.usable, self._admission.prefix_cache)
        return match.tokens if match else 0

    def bypass_reasons(self, generation: types.Generation) -> tuple[Bypass, ...]:
        """Return why a generation must not speculate in this lane."""
        if not (self.has_head or self.looks_up):
            return generation.bypass
        reasons = tuple(one for one in generation.bypass if one not in DRAFTABLE_BYPASSES)
        if self.has_head and not self.counters.head_healthy:
            reasons = (*reasons, Bypass.HEAD_UNHEALTHY)
        return reasons

    # --- the steps of the engine thread -----------------------------------------------------------

    def rows_by_batch(self) -> list[list[Row]]:
        """Return the rows with caches, grouped by the batch that they are in or will join."""
        batches = self._admission.rows_by_batch()
        return [own for rows in batches if (own := list(filter(self.owns, rows)))]

    def add(self, row: Row) -> None:
        """Queue a row."""
        self.counters.record_bypass(row, *row.bypass)
        if not self._draining and self._full:
            self._draining = True
            self._drain_rate.begin(self._clock())
        self._waiting.append(row)
        row.expected_tokens = self.cached_tokens(row)
        row.held_tokens = max(row.held_tokens, row.expected_tokens)
        self._update_occupancy()

    def step(self) -> None:
        """Admit rows, read prompts for a while, and decode one step of every row of all lanes."""
        self._drop_cancelled()
        self._admission.relieve()
        self._admit()
        self._preempt()
        decoded = self._read_prompts()
        if not decoded:
            self._decode()
        self._admission.prefills.record_decode()
        self._update_occupancy()

    def stop_caching(self, scope: str | None) -> None:
        """Store nothing more of the rows of an isolation scope; None: of all rows."""
        for row in self._rows():
            if scope in (None, whole_scope(row.prompt.scope or "")):
                row.prompt = replace(row.prompt, scope=None)
                row.prefetched, row.reloading, row.cacheable = (), None, False
                row.lookup, row.looks_up = None, False  # it may hold other prompts of the scope
        for prefill in self.prefills:
            if prefill.row.prompt.scope is None:
                prefill.boundaries = []

    def close(self, reason: types.EngineError) -> None:
        """End every row with this error, and write the prefix cache to disk."""
        self._admission.prefix_cache.flush()
        rows = self._rows()
        self._waiting.clear()
        self._admission.prefills.remove(self.name)
        self._decoder.remove(self.owns)
        for row in rows:
            self.counters.record_finish(row)
            row.sink(reason)

    def _rows(self) -> list[Row]:
        return [*self._waiting, *chain(*self.rows_by_batch())]

    def _lane_of(self, row: Row) -> LaneScheduler:
        return next(lane for lane in self._lanes if lane.owns(row))

    @property
    def _full(self) -> bool:
        return len(self.prefills) + self.running_rows >= self.counters.slots

    def _drop_cancelled(self) -> None:
        cancelled = [row for row in self._waiting if row.cancelled]
        for row in cancelled:
            self._waiting.remove(row)
        removed = self._admission.prefills.remove(self.name, lambda one: one.row.cancelled)
        cancelled += [prefill.row for prefill in removed]
        cancelled += self._decoder.remove(lambda row: row.cancelled and self.owns(row))
        for row in cancelled:
            self.counters.record_finish(row)

    def _admit(self) -> None:
        """Open prefills of queued rows while there is room.

        A row whose beginning another prefill is about to read waits for it, or for its nodes from
        disk, and holds up nobody. A row that the memory has no room for holds up all behind it, or
        it would wait for ever.
        """
        reloading = 0
        for row in tuple(self._waiting):
            if len(self.prefills) + self.running_rows + reloading >= self.counters.slots:
                return
            in_prefill = max((one.tokens_for(row) for one in self._admission.prefills), default=0)
            if in_prefill - row.expected_tokens >= MIN_TOKENS:
                continue  # in a few steps the prefix cache will have it
            if not self._admission.has_room(row):
                return  # rows that end will free memory
            if self._reloads(row):
                reloading += 1
                continue
            self._waiting.remove(row)
            if self._draining:
                self._drain_rate.record(self._clock(), self.counters.slots)
                self._draining = bool(self._waiting)
            self._open_prefill(row)

    def _reloads(self, row: Row) -> bool:
        """Return whether a row waits for nodes that others have evicted while it waited."""
        cache, reading = self._admission.prefix_cache, row.reloading
        if not row.held_tokens:
            return False
        if reading is None:
            match = find_prefix(row, self._target, self._head.usable, cache)
            if (match.tokens if match else 0) >= row.held_tokens:
                return False
            if any(other.reloading for other in self._waiting):
                return True  # one after another, since together they may hold little
            cache.touch(match.nodes if match else ())
            row.prefetched, prompt = (), row.prompt
            reading = cache.reload(prompt.scope, prompt.identity, lambda: row.cancelled)
        if not self._admission.rows():
            wait([reading], _RELOAD_WAIT_S)  # the thread has nothing else to do
        row.reloading = reading
        if reading.done():
            row.prefetched, row.reloading, row.held_tokens = reading.result(), None, 0
        return row.reloading is not None

    def _open_prefill(self, row: Row) -> None:
        if row.generation.exact:
            row.replay()
        try:
            head = None if row.generation.exact else self._head.usable
            prefill = start_prefill(row, self._target, head, self._admission.prefix_cache)
            if not row.begun and (row.cached_tokens or prefill.boundaries):
                saved_s = self._prefill_budget.best_case_s(row.cached_tokens)
                self.counters.record_prefix_lookup(row, saved_s)
            self._sparse_prefill.start_scoring(prefill, self.counters)
            self._admission.prefills.add(self.name, prefill)
        except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
            self._end_or_requeue([row], error)

    def _preempt(self) -> None:
        """Preempt rows that together exceed the memory, and evict cached prefixes for the rest."""
        # One row always stays, so that some answer completes.
        while (
            (free_bytes := self._admission.free_bytes()) < 0
            and self.running_rows
            and len(self._admission.rows()) > 1
        ):
            self._waiting.appendleft(self._decoder.preempt(self.name))
        self._admission.prefix_cache.evict_to(max(free_bytes, 0))

    def _read_prompts(self) -> bool:
        """Read prompts until the budget of a step is spent, or one needs further steps.

        The rows decode before, and their next steps begin: the host describes the first chunk
        while the device computes them. But before the rest of a prompt the steps are finished,
        since its row joins then. Returns whether the rows have decoded.
        """
        queue, memory = self._admission.prefills, self._admission.memory
        begun_s = spent_s = 0.0
        has_read = decoded = whole = False
        decoding = bool(self._decoder.rows)
        budget = partial(self._prefill_budget.chunk_tokens, others_decode=decoding)
        while not whole and (prefill := queue.next(self.name, decoding=decoding)) is not None:
            most = memory.max_chunk_tokens(prefill.read_count)
            chunk_tokens = min(budget(context_tokens=prefill.read_count, spent_s=spent_s), most)
            cut_short, begun = chunk_tokens < prefill.next_tokens, self._decoder.begun
            if prefill.row.generation.exact:  # in the same chunks whatever else runs
                chunk_tokens = min(most, self._settings.prefill_chunk_tokens, EXACT_CHUNK_TOKENS)
            rest = chunk_tokens >= prefill.remaining_tokens
            if has_read and (cut_short or (rest and any(begun))):
                break
            if not has_read:
                decoded = bool(begun) and all(begun)
                if decoded and not rest:
                    self._decode()
                else:
                    self.finish_open_steps()
                begun_s = self._clock()
            if prefill not in self.prefills:
                break  # a step found too little memory
            queue.record_chunk(prefill)
            whole = self._advance_prefill(prefill, chunk_tokens)
            has_read, spent_s = True, self._clock() - begun_s
        if has_read:
            queue.end_reading()
        return decoded

    def finish_open_steps(self) -> None:
        """Finish the steps of all lanes that have begun."""
        for outcome in self._decoder.finish_open_steps():
            self._apply(outcome)

    def _decode(self) -> None:
        reading = any(self._admission.prefills)
        for outcome in self._decoder.step(ahead=True, reading=reading):
            self._apply(outcome)

    def _advance_prefill(self, prefill: Prefill, chunk_tokens: int) -> bool:
        """Read a chunk of a prompt; return whether it needs further ones of this size."""
        row, whole = prefill.row, chunk_tokens < prefill.next_tokens
        try:
            self._read_chunk(prefill, chunk_tokens, whole=whole)
        except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
            self._close_prefill(prefill)
            self._end_or_requeue([row], error)
            return whole
        if prefill.complete:
            self._close_prefill(prefill)
            if prefill.read_count - row.cached_tokens >= _LONG_PROMPT_TOKENS:
                mx.clear_cache()
            if row.finish_reason:
                self._store_answer(row, prefill.state)
                self.finish(row)
            else:
                self._index(row)
                self.finish_open_steps()  # a picture's prompt is read in one chunk of any size
                self._apply(self._decoder.join(prefill))
        elif not row.begun:
            row.sink(
                types.PrefillProgress(
                    read_tokens=prefill.read_count, prompt_tokens=len(prefill.read_indices)
                )
            )
        return whole

    def _close_prefill(self, prefill: Prefill) -> None:
        self._admission.prefills.remove(self.name, lambda other: other is prefill)

    def _read_chunk(self, prefill: Prefill, chunk_tokens: int, *, whole: bool) -> None:
        """Read one chunk, or let the draft model score one; choose the first token at the end."""
        row = prefill.row
        before, begun_s = prefill.read_count, self._clock()
        if prefill.scoring is not None:
            self._sparse_prefill.score_chunk(prefill, chunk_tokens, self.counters)
            return
        head_error = forward_chunk(prefill, self._target, chunk_tokens)
        described_s = self._clock()
        if any(self._decoder.begun):
            mx.synchronize()  # the time of a step is no cost of the chunk
        begun_s += self._clock() - described_s
        mx.eval(prefill.arrays)
        duration_s = self._clock() - begun_s
        tokens = prefill.read_count - before
        self._prefill_budget.observe(tokens, duration_s, context_tokens=before, whole=whole)
        self.counters.record_prefill(tokens, duration_s)
        if head_error is not None:
            self._head.record_error(head_error)
            self._head.disable_for(row)
        if prefill.boundaries and prefill.boundaries[0] == prefill.read_count:
            end = prefill.boundaries.pop(0)
            prefix = row.prompt.prefix
            key = prefix.key if prefix and prefix.tokens == end else ""
            self._store(row, end, prefill.state, key)
        if prefill.complete and not row.answer:
            self._begin_answer(prefill)

    def _begin_answer(self, prefill: Prefill) -> None:
        """Choose the token that follows a prompt."""
        row, scores = prefill.row, prefill.scores
        if row.prompt_logprobs is not None:
            row.sink(types.PromptScored(logprobs=tuple(row.prompt_logprobs.logprobs)))
        if not row.max_tokens:
            row.finish_reason = types.FinishReason.LENGTH
            return
        assert scores is not None
        allowed = allowed_tokens([row.token_rules(0)], scores.shape[-1])
        token = int(choose(scores, [row.sampling_context()], allowed=allowed).item())
        logprobs = self._decoder.logprobs(row, scores[0], [token])
        row.append_tokens([token], logprobs, now_s=self._clock())

    def _index(self, row: Row) -> None:
        """Index the texts for prompt lookup: the scope's other texts, prompt and answer."""
        if row.looks_up and row.draft_tokens and row.lookup is None:
            prompt = row.prompt
            others = self._admission.prefix_cache.other_texts(prompt.scope, prompt.identity)
            row.lookup = PromptLookup([*others, prompt.identity])
            row.lookup.extend(row.answer)

    def _store_answer(self, row: Row, state: Callable[[], RowState]) -> None:
        """Store the caches of a row whose answer has ended."""
        row.stored = True
        if not row.skipped_tokens:
            self._store(row, row.context_tokens, state)
            prompt = row.prompt
            if row.cacheable and prompt.turn_tokens:
                turn = prompt.identity[: prompt.turn_tokens]
                self._admission.prefix_cache.name_turn(prompt.scope, turn, prompt.turn_key)

    def _store(self, row: Row, tokens: int, state: Callable[[], RowState], key: str = "") -> None:
        if not row.cacheable or self._admission.short:
            return
        try:
            stored = self._admission.prefix_cache.store(
                row.prompt.scope,
                context_of(row)[:tokens],
                state(),
                room_bytes=max(self._admission.free_bytes(), 0),
                key=key,
            )
            if stored:
                row.stored_tokens = max(row.stored_tokens, min(tokens, len(row.prompt.tokens)))
            else:
                self.counters.add(prefix=PrefixCounts(too_large=1))
        except Exception:  # an answer does not depend on what the cache can store of it
            logger.exception("prefix_cache.store_failed lane=%s", self.name)
        for waiting in islice(self._waiting, _ESTIMATED_ROWS):
            waiting.expected_tokens = self.cached_tokens(waiting)
            waiting.held_tokens = max(waiting.held_tokens, waiting.expected_tokens)

    # --- the ends of rows -------------------------------------------------------------------------

    def _apply(self, outcome: Outcome) -> None:
        """Finish and fail the rows that ended; requeue the others first in the queue."""
        for row in outcome.finished:
            self._lane_of(row).finish(row)
        if outcome.error is not None and is_out_of_memory(outcome.error):
            self._end_or_requeue([*outcome.requeued, *outcome.failed], outcome.error)
            return
        for row in reversed(outcome.requeued):
            self._lane_of(row).requeue(row)
        if outcome.error is not None:
            self._fail(outcome.failed, outcome.error)

    def _end_or_requeue(self, rows: list[Row], error: Exception) -> None:
        """End rows with an error; if an allocation has failed, make room and requeue them.

        All rows of all lanes but the oldest are sent back. A row that fails twice without others
        has not enough memory by itself, and ends.
        """
        if not is_out_of_memory(error):
            self._fail(rows, error)
            return
        admission = self._admission
        held = [*rows, *(row for row in admission.rows() if row not in rows)]
        logger.warning("lane.out_of_memory lane=%s rows=%d error=%s", self.name, len(held), error)
        admission.monitor.record_failed_allocation(admission.used_bytes(*rows))
        oldest = min(held, key=lambda row: row.arrival)
        alone = len(held) == 1
        ended = rows if alone and oldest.starved else []
        oldest.starved = alone
        for lane in self._lanes:
            lane.send_back(oldest, lost=() if ended else filter(lane.owns, rows))
        admission.give_back(0)
        if ended:
            self._fail(ended, error)

    def send_back(self, kept: Row, lost: Iterable[Row] = ()) -> None:
        """Requeue all rows but one, and those whose caches are lost.

        A batch that keeps the one frees the memory of the others in its next step.
        """
        prefills = self._admission.prefills.remove(self.name, lambda one: one.row is not kept)
        decoding = self._decoder.remove(lambda row: row is not kept and self.owns(row))
        rows = [*lost, *(prefill.row for prefill in prefills), *decoding]
        self._waiting.extendleft(sorted(rows, key=lambda row: -row.arrival))

    def requeue(self, row: Row) -> None:
        """Put a row that has lost its caches first in the queue."""
        self._waiting.appendleft(row)

    def finish(self, row: Row) -> None:
        """Count an answer that has ended, and send its end."""
        self._admission.monitor.record_answer(self._admission.memory.room_bytes)
        # The counts come first: a client may read them as soon as its answer has ended.
        self.counters.record_finish(row)
        self._update_occupancy()
        row.sink(row.finished_event())

    def _fail(self, rows: list[Row], error: Exception) -> None:
        """End rows with an error; raise if the device can compute nothing any more."""
        if isinstance(error, types.InvalidGeneration):
            logger.info("lane.rejected lane=%s rows=%d", self.name, len(rows))
        else:
            logger.error("lane.failed lane=%s rows=%d", self.name, len(rows), exc_info=error)
        failed = types.GenerationFailed("The engine failed while it generated this answer.")
        for row in rows:
            self._lane_of(row).counters.record_finish(row)
            row.sink(error if isinstance(error, types.InvalidGeneration) else failed)
        check_device(self._target)

    def _update_occupancy(self) -> None:
        prefills = self.prefills
        pending = sum(row.context_tokens - row.expected_tokens for row in self._waiting)
        pending += sum(prefill.remaining_tokens for prefill in prefills)
        running = self.running_rows + len(prefills)
        self.counters.set_occupancy(
            running=running, waiting=len(self._waiting), pending_prefill_tokens=pending
        )
