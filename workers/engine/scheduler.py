"""One lane: a waiting line, at most one prompt being read, and the live rows.

A step reads as: drop who left, admit, make room, prefill a chunk, run a round, emit. It blocks on
MLX alone, and whoever waits or leaves costs the others nothing. What raises an error ends one row;
the others of its batch are read again, and so is who has written least where memory ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from policies.request.profile import Bypass
from workers.engine.decoder import Decoder, Outcome, check_device
from workers.engine.draft_head import DraftHead
from workers.engine.memory import GROWTH_TOKENS, MemoryEstimate
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint
from workers.engine.prefill import Prefill, make_cached_prefix, prefill_chunk, start_prefill
from workers.engine.prefill_budget import PrefillBudget
from workers.engine.prefix_cache import PrefixCache
from workers.engine.row import Row
from workers.engine.sampler import choose
from workers.engine.sparse_prefill import NO_SPARSE_PREFILL, SparsePrefill
from workers.engine.tokenizer import PromptRenderer
from workers.engine.types import (
    EngineError,
    Generation,
    GenerationFailed,
    InvalidGeneration,
    LaneName,
)

logger = logging.getLogger(__name__)

DRAFTABLE_BYPASSES = {
    LaneName.TEXT_MTP: frozenset(
        {Bypass.NON_GREEDY_SAMPLING, Bypass.LOGITS_PROCESSORS, Bypass.LOGPROBS}
    ),
    LaneName.VLM: frozenset({Bypass.MEDIA}),
}
"""What keeps a request out of the text-mtp pool and is drafted for all the same where it runs.

Sampled text and text with penalties, biases or log-probabilities, since a policy that sends it to
this lane means it; pictures, since after its prefill a picture row is a text row with a position
offset."""


class LaneScheduler:
    """Runs generations side by side on the engine thread; no method is safe from another."""

    def __init__(
        self,
        name: LaneName,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        counters: LaneCounters,
        *,
        prefix_cache: PrefixCache,
        siblings: Sequence[LaneScheduler] = (),
        draft_tokens: int,
        max_rows: int,
        prefill_budget: PrefillBudget,
        memory: MemoryEstimate,
        sparse_prefill: SparsePrefill = NO_SPARSE_PREFILL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.counters = counters
        self._target = checkpoint.target
        self._head = DraftHead(checkpoint.head if draft_tokens else None, counters)
        self._clock = clock
        self._prefix_cache = prefix_cache
        self._siblings = siblings
        self._max_rows = max_rows
        self._prefill_budget = prefill_budget
        self._memory = memory
        self._sparse_prefill = sparse_prefill
        self._waiting: deque[Row] = deque()
        self._prefill: Prefill | None = None
        self._decoder = Decoder(
            checkpoint.target,
            self._head,
            counters,
            draft_tokens=draft_tokens,
            max_rows=max_rows,
            eos=checkpoint.eos,
            raw=prompts.raw,
            clock=clock,
        )

    @property
    def busy(self) -> bool:
        """Say whether a step has anything to do."""
        return bool(self._waiting or self._prefill or self.running_rows)

    @property
    def running_rows(self) -> int:
        """Count the rows that decode."""
        return len(self._decoder.rows)

    @property
    def waiting_rows(self) -> int:
        """Count the rows that no prompt is being read of yet."""
        return len(self._waiting)

    @property
    def rows_in_memory(self) -> list[Row]:
        """Name the rows that hold caches: those that decode, and the one that is being read."""
        rows = self._decoder.rows
        return rows if self._prefill is None else [*rows, self._prefill.row]

    def bypass_reasons(self, generation: Generation) -> tuple[Bypass, ...]:
        """Name what keeps a generation from speculating in this lane; safe from any thread."""
        if not self._head.exists:
            return generation.bypass
        allowed = DRAFTABLE_BYPASSES[self.name]
        stops = tuple(reason for reason in generation.bypass if reason not in allowed)
        return stops if self.counters.head_healthy else (*stops, Bypass.HEAD_UNHEALTHY)

    @property
    def has_head(self) -> bool:
        """Say whether the lane has a head to draft with."""
        return self._head.exists

    def add(self, row: Row) -> None:
        """Put a row at the end of the waiting line."""
        self.counters.record_admission(row)
        self._waiting.append(row)
        self._update_occupancy()

    def step(self) -> None:
        """Drop who left, read one chunk of the next prompt, advance every live row by one round."""
        self._drop_cancelled()
        self._admit()
        self._evict()
        if self._prefill is not None:
            self._advance_prefill(self._prefill)
        for outcome in self._decoder.step():
            self._apply(outcome)
        self._update_occupancy()

    def close(self, reason: EngineError) -> None:
        """End every row with this reason."""
        rows = [*self._waiting, *self.rows_in_memory]
        self._waiting.clear()
        self._prefill = None
        self._decoder.clear()
        for row in rows:
            self.counters.record_finish(row)
            row.sink(reason)

    def _drop_cancelled(self) -> None:
        gone = [row for row in self._waiting if row.cancelled]
        for row in gone:
            self._waiting.remove(row)
        if self._prefill is not None and self._prefill.row.cancelled:
            gone.append(self._prefill.row)
            self._prefill = None
        gone += self._decoder.drop_cancelled()
        for row in gone:
            self.counters.record_finish(row)

    @property
    def prefill_prefix_key(self) -> str | None:
        """Name the prefix that is being read now and will be kept."""
        prefill = self._prefill
        if prefill is None or not prefill.prefix_tokens or not prefill.row.prompt.prefix:
            return None
        return prefill.row.prompt.prefix.key

    def _admit(self) -> None:
        if self._prefill is None and self._waiting and self.running_rows < self._max_rows:
            prefix = self._waiting[0].prompt.prefix
            if prefix and any(lane.prefill_prefix_key == prefix.key for lane in self._siblings):
                return  # in a few steps it can be had instead of read
            if not self._fits(self._waiting[0]):
                return  # rows that end make room
            row = self._waiting.popleft()
            try:
                self._prefill = start_prefill(
                    row, self._target, self._head.usable, self._prefix_cache
                )
                if not row.answer and (row.cached_tokens or self._prefill.prefix_tokens):
                    self.counters.record_prefix_lookup(
                        row, self._prefill_budget.best_case_s(row.cached_tokens)
                    )
                self._sparse_prefill.start_scoring(self._prefill, self.counters)
            except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
                self._fail([row], error)

    def rows_by_batch(self, *newcomers: Row) -> list[list[Row]]:
        """Name the rows that hold caches, by the batch that they are in or will join."""
        reading = [] if self._prefill is None else [self._prefill.row]
        return self._decoder.rows_by_batch(*reading, *newcomers)

    def _fits(self, newcomer: Row) -> bool:
        # A row that is alone always runs: it was found to fit when it came.
        return not self._in_memory or self._free_bytes(newcomer, ahead_tokens=GROWTH_TOKENS) >= 0

    @property
    def _in_memory(self) -> int:
        return sum(len(lane.rows_in_memory) for lane in {self, *self._siblings})

    def _free_bytes(self, *newcomers: Row, ahead_tokens: int = 0) -> int:
        """Count what the rows of all lanes leave, once each has grown by so many tokens."""
        batches = self.rows_by_batch(*newcomers)
        batches += [
            rows for lane in self._siblings if lane is not self for rows in lane.rows_by_batch()
        ]
        tokens = [[row.slots_after(ahead_tokens) for row in rows] for rows in batches]
        return self._memory.room_bytes - self._memory.batch_cache_bytes(tokens)

    def _evict(self) -> None:
        """Let prefix_cache go where rows need the room, and rows where they outgrow it together."""
        # Never the last one: some answer always comes to its end.
        while (free_bytes := self._free_bytes()) < 0 and self.running_rows and self._in_memory > 1:
            self._waiting.appendleft(self._decoder.preempt())
        self._prefix_cache.evict_to(max(free_bytes, 0))

    def _advance_prefill(self, prefill: Prefill) -> None:
        row = prefill.row
        try:
            self._prefill_chunk(prefill)
        except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
            self._prefill = None
            self._fail([row], error)
            return
        if prefill.complete:
            self._prefill = None
            self._apply(
                Outcome(finished=[row]) if row.finish_reason else self._decoder.join(prefill)
            )

    def _prefill_chunk(self, prefill: Prefill) -> None:
        """Read one chunk, or let a draft model find out what to read; choose the first token."""
        row = prefill.row
        beside_decoding = any(lane.running_rows for lane in (self, *self._siblings))
        before, begun_s = prefill.read_count, self._clock()
        chunk_tokens = self._prefill_budget.chunk_tokens(beside_decoding=beside_decoding)
        if prefill.scoring is not None:
            self._sparse_prefill.score_chunk(prefill, chunk_tokens, self.counters)
            return
        prefill_chunk(prefill, self._target, chunk_tokens)
        duration_s = self._clock() - begun_s
        self._prefill_budget.observe(prefill.read_count - before, duration_s)
        self.counters.record_prefill(prefill.read_count - before, duration_s)
        if prefill.head_error is not None:
            self._head.record_error(prefill.head_error)
            self._head.disable_for(row)
            prefill.head_error = None
        self._store_prefix(prefill)
        if prefill.complete and not row.answer:
            assert prefill.scores is not None
            token = int(choose(prefill.scores, [row.sampling_context()]).item())
            self._decoder.append_first_token(row, prefill.scores[0], token)

    def _store_prefix(self, prefill: Prefill) -> None:
        """Keep the shared beginning that has just been read, if there is room for the copy."""
        prefix = prefill.row.prompt.prefix
        if prefix is None or prefill.read_count != prefill.prefix_tokens:
            return
        free_bytes = self._free_bytes() - self._memory.row_cache_bytes(prefill.read_count)
        if free_bytes < 0:
            prefill.prefix_tokens = 0
            return
        self._prefix_cache.evict_to(free_bytes)
        if (snapshot := make_cached_prefix(prefill)) is not None:
            self._prefix_cache.store(prefix.key, snapshot)

    def _apply(self, outcome: Outcome) -> None:
        """Tell whose answer has ended; put at the front of the line who must be read again."""
        for row in outcome.finished:
            self._finish(row)
        self._waiting.extendleft(reversed(outcome.again))
        if outcome.error is not None:
            self._fail(outcome.failed, outcome.error)

    def _finish(self, row: Row) -> None:
        """Count first, tell then: who asks for the sums after an answer finds it in them."""
        self.counters.record_finish(row)
        self._update_occupancy()
        row.sink(row.finished_event())

    def _fail(self, rows: list[Row], error: Exception) -> None:
        """End rows with an error; raise if not even one token can be computed any more."""
        logger.error("lane.failed lane=%s rows=%d", self.name, len(rows), exc_info=error)
        failed = GenerationFailed("The engine failed while it made this answer.")
        for row in rows:
            self.counters.record_finish(row)
            row.sink(error if isinstance(error, InvalidGeneration) else failed)
        check_device(self._target)

    def _update_occupancy(self) -> None:
        prefill = self._prefill
        unread = sum(map(self._unread_tokens, self._waiting)) if self._waiting else 0
        if prefill is not None:
            unread += len(prefill.read_indices) - prefill.read_count
        running = self.running_rows + (prefill is not None)
        self.counters.set_occupancy(
            running=running, waiting=len(self._waiting), pending_prefill_tokens=unread
        )

    def _unread_tokens(self, row: Row) -> int:
        """Count what is to be read of a prompt that waits, as far as can be told before."""
        prefix = row.prompt.prefix
        known = prefix.tokens if prefix and prefix.key in self._prefix_cache else 0
        return len(row.prompt.tokens) - known
