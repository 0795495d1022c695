"""One lane: a waiting line, at most one prompt being read, and the live rows.

A step reads as: drop who left, admit, prefill a chunk, run a round, emit. It never blocks on
anything but MLX, and whoever waits or leaves costs the others nothing. Rows that draft and rows
that must not are batches of their own: a verify is wider than a plain step, and who gains nothing
from it shall not pay for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx

from policies.profile import Bypass
from workers.engine.batch import Batch
from workers.engine.counters import LaneCounters
from workers.engine.draft_length import DraftLength
from workers.engine.logprobs import token_logprob
from workers.engine.memory import MemoryEstimate
from workers.engine.prefill import Prefill, begin_prefill, read_chunk, seed_head, take_snapshot
from workers.engine.prefill_pace import PrefillPace
from workers.engine.prompts import PromptRenderer
from workers.engine.requests import (
    EngineError,
    Generation,
    GenerationFailed,
    LaneName,
    TokenLogprob,
)
from workers.engine.round_graph import RoundGraph
from workers.engine.rounds import run_plain_round, run_round
from workers.engine.rows import Row
from workers.engine.sampling import choose
from workers.engine.seam import Checkpoint, MtpHead
from workers.engine.snapshots import Snapshots
from workers.engine.sparse_reading import OFF, SparseReading

logger = logging.getLogger(__name__)

SPECULATES = {
    LaneName.TEXT_MTP: frozenset({Bypass.NON_GREEDY_SAMPLING}),
    LaneName.VLM: frozenset({Bypass.MEDIA}),
}
"""What keeps a request out of the text-mtp pool and is drafted for all the same where it runs.

Sampled text, since a policy that sends it to this lane means it; pictures, since after its prefill
a picture row is a text row with a position offset."""


class Lane:
    """Runs generations side by side on the engine thread; no method is safe from another."""

    def __init__(
        self,
        name: LaneName,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        counters: LaneCounters,
        *,
        snapshots: Snapshots,
        siblings: Sequence[Lane] = (),
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
        self._head = checkpoint.head if draft_tokens else None
        # Families that find positions in their caches are no pure functions of arrays.
        explicit = checkpoint.target.explicit_positions
        self._graph = RoundGraph(checkpoint.target, self._head) if explicit else None
        self._draft_length = DraftLength(draft_tokens)
        self._clock = clock
        self._snapshots = snapshots
        self._siblings = siblings
        self._eos = checkpoint.eos
        self._prompts = prompts
        self._max_rows = max_rows
        self._pace = pace
        self._memory = memory
        self._sparse_reading = sparse_reading
        self._waiting: deque[Row] = deque()
        self._prefill: Prefill | None = None
        # A family whose caches cannot hold rows of different length decodes row by row.
        self._shared = checkpoint.target.batches_rows
        self._drafting, self._plain = Batch(shared=self._shared), Batch(shared=self._shared)
        self._batches = [self._drafting, self._plain]

    @property
    def busy(self) -> bool:
        """Say whether a step has anything to do."""
        return bool(self._waiting or self._prefill or self.live)

    @property
    def live(self) -> int:
        """Count the rows that decode."""
        return sum(len(batch) for batch in self._batches)

    @property
    def waiting(self) -> int:
        """Count the rows that no prompt is being read of yet."""
        return len(self._waiting)

    @property
    def rows_in_memory(self) -> list[Row]:
        """Name the rows that hold caches: those that decode, and the one that is being read."""
        rows = [row for batch in self._batches for row in batch.rows]
        return rows if self._prefill is None else [*rows, self._prefill.row]

    def bypasses(self, generation: Generation) -> tuple[Bypass, ...]:
        """Name what keeps a generation from speculating in this lane; safe from any thread."""
        if self._head is None:
            return generation.bypass
        named = dict.fromkeys(generation.bypass)
        if generation.top_logprobs is not None:
            named[Bypass.LOGPROBS] = None  # known of the first token of a step only
        if generation.sampling.reshapes_logits:
            named[Bypass.LOGITS_PROCESSORS] = None  # and so are penalties
        stops = tuple(reason for reason in named if reason not in SPECULATES[self.name])
        return stops if self.counters.head_healthy else (*stops, Bypass.HEAD_UNHEALTHY)

    @property
    def speculates(self) -> bool:
        """Say whether the lane has a head to draft with."""
        return self._head is not None

    def add(self, row: Row) -> None:
        """Put a row at the end of the waiting line."""
        self.counters.admit(row)
        self._waiting.append(row)
        self._note_occupancy()

    def step(self) -> None:
        """Drop who left, read one chunk of the next prompt, advance every live row by one round."""
        self._drop_cancelled()
        self._admit()
        if self._prefill is not None:
            self._read(self._prefill)
        for batch in self._batches:
            if batch.rows:
                self._round(batch)
        if not self._shared:
            self._batches = [batch for batch in self._batches if batch.rows]
        self._note_occupancy()

    def close(self, reason: EngineError) -> None:
        """End every row with this reason."""
        rows = [*self._waiting, *self.rows_in_memory]
        self._waiting.clear()
        self._prefill = None
        for batch in self._batches:
            batch.clear()
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
        for batch in self._batches:
            gone += [row for row in batch.rows if row.cancelled]
            batch.keep([i for i, row in enumerate(batch.rows) if not row.cancelled])
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
                self._prefill = begin_prefill(row, self._target, self._head, self._snapshots)
                self._sparse_reading.consider(self._prefill, self.counters)
            except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
                self._fail([row], error)

    def _fits(self, newcomer: Row) -> bool:
        rows = [row for lane in {self, *self._siblings} for row in lane.rows_in_memory]
        # A row that is alone always runs: it was found to fit when it came.
        return not rows or self._memory.fits(row.context for row in (*rows, newcomer))

    def _read(self, prefill: Prefill) -> None:
        row = prefill.row
        try:
            beside_others = any(lane.live for lane in (self, *self._siblings))
            before, begun_s = prefill.done, self._clock()
            chunk_tokens = self._pace.chunk_tokens(beside_others=beside_others)
            if prefill.scoring is not None:
                self._sparse_reading.score(prefill, chunk_tokens, self.counters)
                return
            read_chunk(prefill, self._target, self._head, chunk_tokens)
            self._pace.observe(prefill.done - before, self._clock() - begun_s)
            snapshot = take_snapshot(prefill)
            if snapshot is not None and row.prompt.prefix is not None:
                self._snapshots.keep(row.prompt.prefix.key, snapshot)
            if not prefill.complete:
                return
            self._prefill = None
            self._start(prefill)
        except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
            self._prefill = None
            self._fail([row], error)

    def _start(self, prefill: Prefill) -> None:
        """Choose the first token of a prefilled row and let it join the batch."""
        row = prefill.row
        assert prefill.scores is not None
        token = int(choose(prefill.scores, [row.chooser()]).item())
        row.accept([token], self._eos, self._logprobs(row, prefill.scores[0, 0], token))
        if row.finish:
            self._finish(row)
            return
        head = self._head_of(row)
        seed = seed_head(prefill, head, token) if head else None
        batch = self._batch_for(head)
        if head:
            batch.catch_up(head)
        batch.join(row, prefill.caches, prefill.head_caches if head else [], token, seed)

    def _head_of(self, row: Row) -> MtpHead | None:
        return self._head if row.draft_tokens else None

    def _batch_for(self, head: MtpHead | None) -> Batch:
        if self._shared:
            return self._drafting if head else self._plain
        alone = Batch(shared=False)
        self._batches.append(alone)
        return alone

    def _round(self, batch: Batch) -> None:
        rows = list(batch.rows)
        head = self._head_of(rows[0])
        k = 0
        if head:
            k = self._draft_length.choose(len(rows), min(row.tally.steps for row in rows))
        begun_s = self._clock()
        try:
            if self._graph is None:
                result = run_plain_round(batch, self._target)
            else:
                result = run_round(batch, self._graph, k)
        except Exception as error:  # noqa: BLE001  # nobody knows whose row it was: all of them end
            batch.clear()
            self._fail(rows, error)
            return
        if head and max(result.drafted) == k:
            self._draft_length.observe(len(rows), k, self._clock() - begun_s)
            self.counters.draft(self._draft_length.settled(len(rows)))
        for index, row in enumerate(rows):
            tokens = result.tokens[index]
            taken = row.accept(
                tokens, self._eos, self._logprobs(row, result.scores[index, 0], tokens[0])
            )
            drafted = result.drafted[index]
            if drafted:
                # A drafted token behind the end of the answer bought nothing: it counts as
                # rejected, so that the counts explain `completion_tokens`.
                row.tally.step(drafted, min(taken, len(tokens) - 1))
                self._draft_length.judge(drafted, len(tokens) - 1)
        batch.keep([i for i, row in enumerate(rows) if not row.finish])
        for row in rows:
            if row.finish:
                self._finish(row)

    def _logprobs(self, row: Row, scores: mx.array, token: int) -> tuple[TokenLogprob, ...]:
        top = row.generation.top_logprobs
        if top is None:
            return ()
        return (token_logprob(scores, token, top, self._prompts.spell),)

    def _finish(self, row: Row) -> None:
        """Count first, tell then: who asks for the sums after an answer finds it in them."""
        self.counters.finish(row)
        self._note_occupancy()
        row.sink(row.conclude())

    def _fail(self, rows: list[Row], error: Exception) -> None:
        logger.error("generation.failed lane=%s rows=%d", self.name, len(rows), exc_info=error)
        for row in rows:
            self.counters.finish(row)
            row.sink(GenerationFailed("The engine failed while it made this answer."))

    def _note_occupancy(self) -> None:
        running = self.live + (self._prefill is not None)
        self.counters.occupy(running=running, waiting=len(self._waiting))
