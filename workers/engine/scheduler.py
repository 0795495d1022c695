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
from workers.engine.decoder import Decoder, Outcome, prove_alive
from workers.engine.draft_head import DraftingHead
from workers.engine.memory import ROOM_TOKENS, MemoryEstimate
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint
from workers.engine.prefill import Prefill, begin_prefill, read_chunk, take_snapshot
from workers.engine.prefill_budget import PrefillPace
from workers.engine.prefix_cache import PrefixCache
from workers.engine.row import Row
from workers.engine.sampler import choose
from workers.engine.sparse_prefill import OFF, SparseReading
from workers.engine.tokenizer import PromptRenderer
from workers.engine.types import (
    EngineError,
    Generation,
    GenerationFailed,
    InvalidGeneration,
    LaneName,
)

logger = logging.getLogger(__name__)

SPECULATES = {
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
        snapshots: PrefixCache,
        siblings: Sequence[LaneScheduler] = (),
        draft_tokens: int,
        max_rows: int,
        pace: PrefillPace,
        memory: MemoryEstimate,
        sparse_reading: SparseReading = OFF,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.counters = counters
        self._target = checkpoint.target
        self._head = DraftingHead(checkpoint.head if draft_tokens else None, counters)
        self._clock = clock
        self._snapshots = snapshots
        self._siblings = siblings
        self._max_rows = max_rows
        self._pace = pace
        self._memory = memory
        self._sparse_reading = sparse_reading
        self._waiting: deque[Row] = deque()
        self._prefill: Prefill | None = None
        self._decoding = Decoder(
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
        return bool(self._waiting or self._prefill or self.live)

    @property
    def live(self) -> int:
        """Count the rows that decode."""
        return len(self._decoding.rows)

    @property
    def waiting(self) -> int:
        """Count the rows that no prompt is being read of yet."""
        return len(self._waiting)

    @property
    def rows_in_memory(self) -> list[Row]:
        """Name the rows that hold caches: those that decode, and the one that is being read."""
        rows = self._decoding.rows
        return rows if self._prefill is None else [*rows, self._prefill.row]

    def bypasses(self, generation: Generation) -> tuple[Bypass, ...]:
        """Name what keeps a generation from speculating in this lane; safe from any thread."""
        if not self._head.present:
            return generation.bypass
        allowed = SPECULATES[self.name]
        stops = tuple(reason for reason in generation.bypass if reason not in allowed)
        return stops if self.counters.head_healthy else (*stops, Bypass.HEAD_UNHEALTHY)

    @property
    def speculates(self) -> bool:
        """Say whether the lane has a head to draft with."""
        return self._head.present

    def add(self, row: Row) -> None:
        """Put a row at the end of the waiting line."""
        self.counters.admit(row)
        self._waiting.append(row)
        self._note_occupancy()

    def step(self) -> None:
        """Drop who left, read one chunk of the next prompt, advance every live row by one round."""
        self._drop_cancelled()
        self._admit()
        self._make_room()
        if self._prefill is not None:
            self._read(self._prefill)
        for outcome in self._decoding.rounds():
            self._settle(outcome)
        self._note_occupancy()

    def close(self, reason: EngineError) -> None:
        """End every row with this reason."""
        rows = [*self._waiting, *self.rows_in_memory]
        self._waiting.clear()
        self._prefill = None
        self._decoding.clear()
        for row in rows:
            self.counters.finish(row)
            row.sink(reason)

    def _drop_cancelled(self) -> None:
        gone = [row for row in self._waiting if row.cancelled]
        for row in gone:
            self._waiting.remove(row)
        if self._prefill is not None and self._prefill.row.cancelled:
            gone.append(self._prefill.row)
            self._prefill = None
        gone += self._decoding.drop_cancelled()
        for row in gone:
            self.counters.finish(row)

    @property
    def prefix_being_read(self) -> str | None:
        """Name the prefix that is being read now and will be kept."""
        prefill = self._prefill
        if prefill is None or not prefill.prefix_tokens or not prefill.row.prompt.prefix:
            return None
        return prefill.row.prompt.prefix.key

    def _admit(self) -> None:
        if self._prefill is None and self._waiting and self.live < self._max_rows:
            prefix = self._waiting[0].prompt.prefix
            if prefix and any(lane.prefix_being_read == prefix.key for lane in self._siblings):
                return  # in a few steps it can be had instead of read
            if not self._fits(self._waiting[0]):
                return  # rows that end make room
            row = self._waiting.popleft()
            try:
                self._prefill = begin_prefill(row, self._target, self._head.usable, self._snapshots)
                if not row.answer and (row.cached_tokens or self._prefill.prefix_tokens):
                    self.counters.look_up(row, self._pace.at_best_s(row.cached_tokens))
                self._sparse_reading.consider(self._prefill, self.counters)
            except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
                self._fail([row], error)

    def batches(self, *newcomers: Row) -> list[list[Row]]:
        """Name the rows that hold caches, by the batch that they are in or will join."""
        reading = [] if self._prefill is None else [self._prefill.row]
        return self._decoding.batches(*reading, *newcomers)

    def _fits(self, newcomer: Row) -> bool:
        # A row that is alone always runs: it was found to fit when it came.
        return not self._in_memory or self._free_bytes(newcomer, ahead_tokens=ROOM_TOKENS) >= 0

    @property
    def _in_memory(self) -> int:
        return sum(len(lane.rows_in_memory) for lane in {self, *self._siblings})

    def _free_bytes(self, *newcomers: Row, ahead_tokens: int = 0) -> int:
        """Count what the rows of all lanes leave, once each has grown by so many tokens."""
        batches = self.batches(*newcomers)
        batches += [rows for lane in self._siblings if lane is not self for rows in lane.batches()]
        tokens = [[row.slots_after(ahead_tokens) for row in rows] for rows in batches]
        return self._memory.room_bytes - self._memory.takes_bytes(tokens)

    def _make_room(self) -> None:
        """Let snapshots go where rows need the room, and rows where they outgrow it together."""
        # Never the last one: some answer always comes to its end.
        while (free_bytes := self._free_bytes()) < 0 and self.live and self._in_memory > 1:
            self._waiting.appendleft(self._decoding.send_back())
        self._snapshots.shrink(max(free_bytes, 0))

    def _read(self, prefill: Prefill) -> None:
        row = prefill.row
        try:
            self._read_on(prefill)
        except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
            self._prefill = None
            self._fail([row], error)
            return
        if prefill.complete:
            self._prefill = None
            self._settle(Outcome(finished=[row]) if row.finish else self._decoding.join(prefill))

    def _read_on(self, prefill: Prefill) -> None:
        """Read one chunk, or let a draft model find out what to read; choose the first token."""
        row = prefill.row
        beside_others = any(lane.live for lane in (self, *self._siblings))
        before, begun_s = prefill.done, self._clock()
        chunk_tokens = self._pace.chunk_tokens(beside_others=beside_others)
        if prefill.scoring is not None:
            self._sparse_reading.score(prefill, chunk_tokens, self.counters)
            return
        read_chunk(prefill, self._target, chunk_tokens)
        duration_s = self._clock() - begun_s
        self._pace.observe(prefill.done - before, duration_s)
        self.counters.read(prefill.done - before, duration_s)
        if prefill.head_error is not None:
            self._head.failed(prefill.head_error)
            self._head.give_up(row)
            prefill.head_error = None
        self._keep_prefix(prefill)
        if prefill.complete and not row.answer:
            assert prefill.scores is not None
            token = int(choose(prefill.scores, [row.chooser()]).item())
            self._decoding.choose_first(row, prefill.scores[0], token)

    def _keep_prefix(self, prefill: Prefill) -> None:
        """Keep the shared beginning that has just been read, if there is room for the copy."""
        prefix = prefill.row.prompt.prefix
        if prefix is None or prefill.done != prefill.prefix_tokens:
            return
        free_bytes = self._free_bytes() - self._memory.row_takes_bytes(prefill.done)
        if free_bytes < 0:
            prefill.prefix_tokens = 0
            return
        self._snapshots.shrink(free_bytes)
        if (snapshot := take_snapshot(prefill)) is not None:
            self._snapshots.keep(prefix.key, snapshot)

    def _settle(self, outcome: Outcome) -> None:
        """Tell whose answer has ended; put at the front of the line who must be read again."""
        for row in outcome.finished:
            self._finish(row)
        self._waiting.extendleft(reversed(outcome.again))
        if outcome.error is not None:
            self._fail(outcome.failed, outcome.error)

    def _finish(self, row: Row) -> None:
        """Count first, tell then: who asks for the sums after an answer finds it in them."""
        self.counters.finish(row)
        self._note_occupancy()
        row.sink(row.conclude())

    def _fail(self, rows: list[Row], error: Exception) -> None:
        """End rows with an error; raise if not even one token can be computed any more."""
        logger.error("lane.failed lane=%s rows=%d", self.name, len(rows), exc_info=error)
        failed = GenerationFailed("The engine failed while it made this answer.")
        for row in rows:
            self.counters.finish(row)
            row.sink(error if isinstance(error, InvalidGeneration) else failed)
        prove_alive(self._target)

    def _note_occupancy(self) -> None:
        prefill = self._prefill
        unread = sum(map(self._unread_tokens, self._waiting)) if self._waiting else 0
        if prefill is not None:
            unread += len(prefill.reads) - prefill.done
        running = self.live + (prefill is not None)
        self.counters.occupy(running=running, waiting=len(self._waiting), unread_tokens=unread)

    def _unread_tokens(self, row: Row) -> int:
        """Count what is to be read of a prompt that waits, as far as can be told before."""
        prefix = row.prompt.prefix
        known = prefix.tokens if prefix and prefix.key in self._snapshots else 0
        return len(row.prompt.tokens) - known
