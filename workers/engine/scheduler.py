"""Scheduler of one lane: its queue, its prefills, and the decoding rows.

A step drops cancelled rows, admits what fits, evicts what exceeds the memory, reads prompts for a
bounded time, and decodes one step of every batch. Only MLX blocks it. An error ends one row; the
other rows of its batch are requeued, and so is the row with the shortest answer when memory runs
out.

Several prompts are open at once; `prefill_queue.py` says which is read next.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from policies.request.profile import Bypass
from workers.drain_rate import DrainRate, QueuePlace
from workers.engine import types
from workers.engine.decoder import Decoder, Outcome, check_device
from workers.engine.draft_head import DraftHead
from workers.engine.grammar import allowed_tokens
from workers.engine.memory import GROWTH_TOKENS, MemoryEstimate
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint
from workers.engine.prefill import (
    Prefill,
    context_of,
    find_prefix,
    prefill_chunk,
    start_prefill,
)
from workers.engine.prefill_budget import PrefillBudget
from workers.engine.prefill_queue import PrefillQueue
from workers.engine.prefix_cache import MIN_TOKENS, PrefixCache, RowState
from workers.engine.prompt_lookup import PromptLookup
from workers.engine.row import Row
from workers.engine.sampler import choose
from workers.engine.sparse_prefill import NO_SPARSE_PREFILL, SparsePrefill
from workers.engine.tokenizer import PromptRenderer

logger = logging.getLogger(__name__)

_ESTIMATED_ROWS = 64
"""Queued rows whose cached tokens are counted anew when the prefix cache has grown."""
DRAFTABLE_BYPASSES = frozenset(
    {
        Bypass.NON_GREEDY_SAMPLING,
        Bypass.LOGITS_PROCESSORS,
        Bypass.LOGPROBS,
        Bypass.MULTIPLE_CHOICES,
        Bypass.MEDIA,
    }
)
"""Bypass reasons by which a gateway avoids the text-mtp lane, but which no lane needs to avoid.

A sampled row accepts a draft token that equals its own draw; each of several choices is a row; and
after its prefill a row with pictures is a text row with a position offset."""


class LaneScheduler:
    """Generations of one lane; used by the engine thread only, unless a method says otherwise."""

    def __init__(
        self,
        name: types.LaneName,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        *,
        prefix_cache: PrefixCache,
        siblings: Sequence[LaneScheduler] = (),
        draft_tokens: int,
        max_rows: int,
        prefill_chunk_tokens: int,
        prefill_budget_s: float,
        memory: MemoryEstimate,
        sparse_prefill: SparsePrefill = NO_SPARSE_PREFILL,
        prefill_queue: PrefillQueue[Prefill] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.ends = checkpoint.eos
        """Tokens by which the model ends an answer."""
        self.counters = LaneCounters(name, slots=max_rows, draft_tokens=draft_tokens)
        self._target = checkpoint.target
        head = checkpoint.head if draft_tokens else None
        self.has_head = head is not None
        self._head = DraftHead(head, self.counters)
        self._clock = clock
        self._prefix_cache = prefix_cache
        self._siblings = siblings
        self._max_rows = max_rows
        self._prefill_budget = PrefillBudget(prefill_chunk_tokens, prefill_budget_s)
        self._memory = memory
        self._sparse_prefill = sparse_prefill
        self._waiting: deque[Row] = deque()
        self._drain_rate = DrainRate()
        self._draining = False
        """Whether rows wait because the lane is full, so that its rate shows."""
        self._prefill_queue = prefill_queue or PrefillQueue()
        self._decoder = Decoder(
            checkpoint, prompts, self._head, self.counters,
            draft_tokens=draft_tokens, clock=clock,
            store=self._store_answer,
        )  # fmt: skip

    @property
    def looks_up(self) -> bool:
        """Return whether rows draft by prompt lookup."""
        return self._decoder.looks_up

    @property
    def busy(self) -> bool:
        """Return whether a step has anything to do."""
        return bool(self._waiting or self.prefills or self.running_rows)

    @property
    def prefills(self) -> list[Prefill]:
        """Return the open prefills."""
        return self._prefill_queue.of(self.name)

    @property
    def running_rows(self) -> int:
        """Return the number of decoding rows."""
        return len(self._decoder.rows)

    @property
    def waiting_rows(self) -> int:
        """Return the number of queued rows; safe from any thread."""
        return len(self._waiting)

    @property
    def retry_after_s(self) -> float:
        """Return when a request that the full queue rejects may return; safe from any thread."""
        return self._drain_rate.retry_after_s(len(self._waiting), self._clock())

    def queue_place(self, generation: types.Generation) -> QueuePlace | None:
        """Return the place of a generation in the queue; None if it waits no more.

        Safe from any thread.
        """
        waiting = enumerate(tuple(self._waiting), 1)
        number = next((at for at, row in waiting if row.generation is generation), None)
        return None if number is None else self._drain_rate.place(number, self._clock())

    @property
    def _full(self) -> bool:
        return len(self.prefills) + self.running_rows >= self._max_rows

    def tokens_in_prefill(self, row: Row) -> int:
        """Return how many tokens of a queued row a prefill will soon add to the prefix cache."""
        return max((prefill.tokens_for(row) for prefill in self.prefills), default=0)

    def cached_tokens(self, row: Row) -> int:
        """Return how many tokens of a row are in the prefix cache; safe from any thread."""
        match = find_prefix(row, self._target, self._head.usable, self._prefix_cache)
        return match.tokens if match else 0

    def bypass_reasons(self, generation: types.Generation) -> tuple[Bypass, ...]:
        """Return why a generation must not speculate in this lane; safe from any thread."""
        if not (self.has_head or self.looks_up):
            return generation.bypass
        reasons = tuple(one for one in generation.bypass if one not in DRAFTABLE_BYPASSES)
        if self.has_head and not self.counters.head_healthy:
            reasons = (*reasons, Bypass.HEAD_UNHEALTHY)
        return reasons

    def rows_by_batch(self, *newcomers: Row) -> list[list[Row]]:
        """Return the rows with caches, grouped by the batch that they are in or will join."""
        in_prefill = (prefill.row for prefill in self.prefills)
        return self._decoder.rows_by_batch(*in_prefill, *newcomers)

    def add(self, row: Row) -> None:
        """Queue a row."""
        self.counters.record_bypass(row, *row.bypass)
        if not self._draining and self._full:
            self._draining = True
            self._drain_rate.begin(self._clock())
        self._waiting.append(row)
        self._estimate(row)
        self._update_occupancy()

    def stop_caching(self, scope: str | None) -> None:
        """Store nothing more of the rows of an isolation scope; None: of all rows."""
        rows = [*self._waiting, *chain(*self.rows_by_batch())]
        for row in rows:
            if scope in (None, row.prompt.scope):
                row.prompt = replace(row.prompt, scope=None)
                row.prefetched, row.cacheable = (), False
                row.lookup, row.looks_up = None, False  # it may hold other prompts of the scope
        for prefill in self.prefills:
            if prefill.row.prompt.scope is None:
                prefill.boundaries = []

    def step(self) -> None:
        """Drop cancelled rows, read prompts for a while, and decode one step of every row."""
        self._drop_cancelled()
        self._admit()
        self._evict()
        self._read_prompts()
        for outcome in self._decoder.step():
            self._apply(outcome)
        self._prefill_queue.record_decode(self.name)
        self._update_occupancy()

    def close(self, reason: types.EngineError) -> None:
        """End every row with this error, and write the prefix cache to disk."""
        self._prefix_cache.flush()
        rows = [*self._waiting, *chain(*self.rows_by_batch())]
        self._waiting.clear()
        self._prefill_queue.remove(self.name)
        self._decoder.clear()
        for row in rows:
            self.counters.record_finish(row)
            row.sink(reason)

    def _drop_cancelled(self) -> None:
        cancelled = [row for row in self._waiting if row.cancelled]
        for row in cancelled:
            self._waiting.remove(row)
        removed = self._prefill_queue.remove(self.name, lambda prefill: prefill.row.cancelled)
        cancelled += [prefill.row for prefill in removed]
        cancelled += self._decoder.drop_cancelled()
        for row in cancelled:
            self.counters.record_finish(row)

    def _admit(self) -> None:
        """Open prefills of queued rows while there is room.

        A row whose beginning another prefill is about to read waits for it, and holds up nobody. A
        row that the memory has no room for holds up all behind it, or it would wait for ever.
        """
        for row in tuple(self._waiting):
            if self._full:
                return
            in_prefill = max(lane.tokens_in_prefill(row) for lane in self._lanes)
            if in_prefill - row.expected_tokens >= MIN_TOKENS:
                continue  # in a few steps the prefix cache will have it
            # A row alone always fits: the engine has rejected prompts that exceed the memory.
            if self._rows_in_all_lanes and self._free_bytes(row, growth_tokens=GROWTH_TOKENS) < 0:
                return  # rows that end will free memory
            self._waiting.remove(row)
            if self._draining:
                self._drain_rate.record(self._clock())
                self._draining = bool(self._waiting)
            self._open_prefill(row)

    def _open_prefill(self, row: Row) -> None:
        try:
            prefill = start_prefill(row, self._target, self._head.usable, self._prefix_cache)
            if not row.begun and (row.cached_tokens or prefill.boundaries):
                saved_s = self._prefill_budget.best_case_s(row.cached_tokens)
                self.counters.record_prefix_lookup(row, saved_s)
            self._sparse_prefill.start_scoring(prefill, self.counters)
            self._prefill_queue.add(self.name, prefill)
        except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
            self._fail([row], error)

    @property
    def _lanes(self) -> list[LaneScheduler]:
        """Return this lane and its siblings."""
        return [self, *(lane for lane in self._siblings if lane is not self)]

    @property
    def _rows_in_all_lanes(self) -> int:
        return sum(len(rows) for lane in self._lanes for rows in lane.rows_by_batch())

    def _free_bytes(self, *newcomers: Row, growth_tokens: int = 0) -> int:
        """Return the bytes that the rows of all lanes leave, each grown by `growth_tokens`."""
        batches = self.rows_by_batch(*newcomers)
        for lane in self._lanes[1:]:
            batches += lane.rows_by_batch()
        tokens = [[row.slots_after(growth_tokens) for row in rows] for rows in batches]
        drafting = sum(row.draft_tokens > 0 for rows in batches for row in rows)
        unread = [prefill.row for lane in self._lanes for prefill in lane.prefills]
        longest = max((row.slots_used for row in (*unread, *newcomers)), default=0)
        memory = self._memory
        used_bytes = memory.batch_cache_bytes(tokens) + drafting * memory.draft_bytes
        return memory.room_bytes - used_bytes - memory.reading_bytes(longest)

    def _evict(self) -> None:
        """Preempt rows that together exceed the memory, and evict cached prefixes for the rest."""
        # One row always stays, so that some answer completes.
        while (
            (free_bytes := self._free_bytes()) < 0
            and self.running_rows
            and self._rows_in_all_lanes > 1
        ):
            self._waiting.appendleft(self._decoder.preempt())
        self._prefix_cache.evict_to(max(free_bytes, 0))

    def _read_prompts(self) -> None:
        """Read prompts until the budget of a step is spent, or one needs further steps."""
        begun_s, spent_s, has_read = self._clock(), 0.0, False
        decoding = [lane.name for lane in self._lanes if lane.running_rows]
        budget = partial(self._prefill_budget.chunk_tokens, others_decode=bool(decoding))
        whole = False
        while not whole:
            prefill = self._prefill_queue.next(self.name, decoding)
            if prefill is None:
                break
            chunk_tokens = min(
                budget(context_tokens=prefill.read_count, spent_s=spent_s),
                self._memory.max_chunk_tokens(prefill.read_count),
            )
            if has_read and chunk_tokens < prefill.next_tokens:
                break
            self._prefill_queue.record_chunk(prefill)
            whole = self._advance_prefill(prefill, chunk_tokens)
            has_read, spent_s = True, self._clock() - begun_s
        if has_read:
            self._prefill_queue.end_reading(lane.name for lane in self._lanes)

    def _advance_prefill(self, prefill: Prefill, chunk_tokens: int) -> bool:
        """Read a chunk of a prompt; return whether it needs further ones of this size."""
        row, whole = prefill.row, chunk_tokens < prefill.next_tokens
        try:
            self._prefill_chunk(prefill, chunk_tokens, whole=whole)
        except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
            self._close_prefill(prefill)
            self._fail([row], error)
            return whole
        if prefill.complete:
            self._close_prefill(prefill)
            if row.finish_reason:
                self._store_answer(row, prefill.state)
                self._finish(row)
            else:
                self._index(row)
                self._apply(self._decoder.join(prefill))
        elif not row.begun:
            row.sink(
                types.PrefillProgress(
                    read_tokens=prefill.read_count, prompt_tokens=len(prefill.read_indices)
                )
            )
        return whole

    def _index(self, row: Row) -> None:
        """Index what prompt lookup may draft from: the scope's other texts, prompt and answer."""
        if row.looks_up and row.draft_tokens and row.lookup is None:
            prompt = row.prompt
            others = self._prefix_cache.other_texts(prompt.scope, prompt.identity)
            row.lookup = PromptLookup([*others, prompt.identity])
            row.lookup.extend(row.answer)

    def _close_prefill(self, prefill: Prefill) -> None:
        self._prefill_queue.remove(self.name, lambda other: other is prefill)

    def _prefill_chunk(self, prefill: Prefill, chunk_tokens: int, *, whole: bool) -> None:
        """Read one chunk, or let the draft model score one; choose the first token at the end."""
        row = prefill.row
        before, begun_s = prefill.read_count, self._clock()
        if prefill.scoring is not None:
            self._sparse_prefill.score_chunk(prefill, chunk_tokens, self.counters)
            return
        head_error = prefill_chunk(prefill, self._target, chunk_tokens)
        duration_s = self._clock() - begun_s
        tokens = prefill.read_count - before
        self._prefill_budget.observe(tokens, duration_s, context_tokens=before, whole=whole)
        self.counters.record_prefill(tokens, duration_s)
        if head_error is not None:
            self._head.record_error(head_error)
            self._head.disable_for(row)
        self._store_prefix(prefill)
        if prefill.complete and not row.answer:
            if row.prompt_logprobs is not None:
                row.sink(types.PromptScored(logprobs=tuple(row.prompt_logprobs.logprobs)))
            if not row.max_tokens:
                row.finish_reason = types.FinishReason.LENGTH
                return
            assert prefill.scores is not None
            allowed = allowed_tokens([row.token_rules(0)], prefill.scores.shape[-1])
            token = int(choose(prefill.scores, [row.sampling_context()], allowed=allowed).item())
            self._decoder.append_first_token(row, prefill.scores[0], token)

    def _store_prefix(self, prefill: Prefill) -> None:
        """Store what has been read up to a boundary."""
        if prefill.boundaries and prefill.boundaries[0] == prefill.read_count:
            tokens = prefill.boundaries.pop(0)
            prefix = prefill.row.prompt.prefix
            key = prefix.key if prefix and prefix.tokens == tokens else ""
            self._store(prefill.row, tokens, prefill.state, key)

    def _store_answer(self, row: Row, state: Callable[[], RowState]) -> None:
        """Store what the caches hold of a row whose answer has ended."""
        if not row.skipped_tokens:
            self._store(row, row.context_tokens, state)
            prompt = row.prompt
            if row.cacheable and prompt.turn_tokens:
                turn = prompt.identity[: prompt.turn_tokens]
                self._prefix_cache.name_turn(prompt.scope, turn, prompt.turn_key)

    def _store(self, row: Row, tokens: int, state: Callable[[], RowState], key: str = "") -> None:
        if not row.cacheable:
            return
        try:
            stored = self._prefix_cache.store(
                row.prompt.scope,
                context_of(row)[:tokens],
                state(),
                room_bytes=max(self._free_bytes(), 0),
                key=key,
            )
            if stored:
                row.stored_tokens = max(row.stored_tokens, min(tokens, len(row.prompt.tokens)))
            else:
                self.counters.record_too_large()
        except Exception:
            logger.exception("prefix_cache.store_failed lane=%s", self.name)
        for waiting in islice(self._waiting, _ESTIMATED_ROWS):
            self._estimate(waiting)

    def _estimate(self, row: Row) -> None:
        """Count the tokens of a queued row that are in the prefix cache."""
        row.expected_tokens = self.cached_tokens(row)

    def _apply(self, outcome: Outcome) -> None:
        """Finish and fail the rows that ended; requeue the others first in the queue."""
        for row in outcome.finished:
            self._finish(row)
        self._waiting.extendleft(reversed(outcome.requeued))
        if outcome.error is not None:
            self._fail(outcome.failed, outcome.error)

    def _finish(self, row: Row) -> None:
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
            self.counters.record_finish(row)
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
