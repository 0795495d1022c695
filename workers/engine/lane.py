"""One lane: a waiting line, at most one prompt being read, and a batch of live rows.

A step reads as: admit, prefill a chunk, run a round, emit, drop. It never blocks on anything but
MLX, and whoever waits or leaves costs the others nothing.
"""

from __future__ import annotations

import logging
from collections import deque

import mlx.core as mx

from workers.engine.batch import Batch
from workers.engine.counters import LaneCounters
from workers.engine.logprobs import token_logprob
from workers.engine.prefill import Prefill, begin_prefill, read_chunk, seed_head
from workers.engine.prompts import PromptRenderer
from workers.engine.requests import EngineError, GenerationFailed, LaneName, TokenLogprob
from workers.engine.rounds import run_round
from workers.engine.rows import Row
from workers.engine.sampling import choose
from workers.engine.seam import Checkpoint

logger = logging.getLogger(__name__)


class Lane:
    """Runs generations side by side on the engine thread; no method is safe from another."""

    def __init__(
        self,
        name: LaneName,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        counters: LaneCounters,
        *,
        speculates: bool,
        max_rows: int,
        chunk_tokens: int,
    ) -> None:
        self.name = name
        self.counters = counters
        self._target = checkpoint.target
        self._head = checkpoint.head if speculates else None
        self._eos = checkpoint.eos
        self._prompts = prompts
        self._max_rows = max_rows
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[Row] = deque()
        self._prefill: Prefill | None = None
        # A family whose caches cannot hold rows of different length decodes row by row.
        self._shared = checkpoint.target.batches_rows
        self._batches = [Batch(shared=True)] if self._shared else []

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

    def add(self, row: Row) -> None:
        """Put a row at the end of the waiting line."""
        self.counters.admit(row.generation.bypass)
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
        rows = [*self._waiting, *(row for batch in self._batches for row in batch.rows)]
        if self._prefill is not None:
            rows.append(self._prefill.row)
        self._waiting.clear()
        self._prefill = None
        for batch in self._batches:
            batch.clear()
        for row in rows:
            self.counters.finish(row.usage(), row.tally.total())
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
            self.counters.finish(row.usage(), row.tally.total())

    def _admit(self) -> None:
        if self._prefill is None and self._waiting and self.live < self._max_rows:
            row = self._waiting.popleft()
            try:
                self._prefill = begin_prefill(row, self._target, self._head)
            except Exception as error:  # noqa: BLE001  # one bad prompt must not end the lane
                self._fail([row], error)

    def _read(self, prefill: Prefill) -> None:
        row = prefill.row
        try:
            read_chunk(prefill, self._target, self._head, self._chunk_tokens)
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
        seed = seed_head(prefill, self._head, token) if self._head else None
        if not self._shared:
            self._batches.append(Batch(shared=False))
        self._batches[-1].join(row, prefill.caches, prefill.head_caches, token, seed)

    def _round(self, batch: Batch) -> None:
        rows = list(batch.rows)
        try:
            result = run_round(batch, self._target, self._head)
        except Exception as error:  # noqa: BLE001  # nobody knows whose row it was: all of them end
            batch.clear()
            self._fail(rows, error)
            return
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
        self.counters.finish(row.usage(), row.tally.total())
        self._note_occupancy()
        row.sink(row.conclude())

    def _fail(self, rows: list[Row], error: Exception) -> None:
        logger.error("generation.failed lane=%s rows=%d", self.name, len(rows), exc_info=error)
        for row in rows:
            self.counters.finish(row.usage(), row.tally.total())
            row.sink(GenerationFailed("The engine failed while it made this answer."))

    def _note_occupancy(self) -> None:
        running = self.live + (self._prefill is not None)
        self.counters.occupy(running=running, waiting=len(self._waiting))
