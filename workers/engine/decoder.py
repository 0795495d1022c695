"""The live rows of a lane, in batches: one round of each at a time.

Rows that draft and rows that must not are batches of their own: a verify is wider than a plain
step, and who gains nothing from it shall not pay for it.

When a round fails, nobody knows whose row it was, and no cache of the batch can be trusted. All of
its rows are read again and fall back by one step: from drafting to plain, from there to a batch of
their own. A row that fails even there is the one that cannot be served.

One round of a batch: draft, verify, accept, commit, all rows at once and each for itself.

Speculative decoding by match (Leviathan et al. 2023, arXiv 2211.17192, for a draft of the likeliest
tokens): the target chooses a token at every position by the row's own rules, and a drafted token is
kept when it is that very choice. So every row gets exactly the tokens it would get without
speculation, whatever sampler it uses and whoever shares its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from workers.engine.batch import Batch
from workers.engine.draft_head import DraftHead
from workers.engine.draft_length import DraftLength
from workers.engine.metrics import LaneCounters
from workers.engine.model import MtpHead, Target
from workers.engine.prefill import Prefill, seed_head
from workers.engine.row import Row
from workers.engine.sampler import choose, token_logprobs
from workers.engine.step_graph import StepGraph
from workers.engine.types import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one round decided, row by row."""

    drafted: tuple[int, ...]
    """Draft tokens judged."""
    tokens: tuple[tuple[int, ...], ...]
    """The accepted drafts, then the one token that the target adds."""
    scores: mx.array
    """[rows, L, vocabulary]: the scores behind every token, for whoever reports them."""


def run_step(batch: Batch, graph: StepGraph, k: int) -> StepResult:
    """Advance every row by one verify of up to k drafted tokens, or of as many as it asked for.

    The host waits for the device once, for what was decided; what follows from it is computed while
    the host passes the tokens on.
    """
    limits = [row.draft_limit(k) if batch.has_head_caches else 0 for row in batch.rows]
    length = max(limits)
    batch.reserve(length + 1)
    drafts = _draft(batch, graph, length)
    offset = batch.offset
    verified = graph.verify(
        mx.concatenate([batch.last_tokens[:, None], drafts], axis=1),
        batch.state,
        offset,
        batch.position_shift,
    )
    chosen = choose(verified.scores, [row.sampling_context() for row in batch.rows], drafts)
    if length:
        settled = graph.commit(
            verified, chosen, (drafts, mx.array(limits)), (batch.head_state, offset)
        )
        accepted = settled.accepted
        batch.last_tokens, batch.state, batch.head_state = (
            settled.last,
            settled.state,
            settled.head_state,
        )
        batch.seed_hidden = settled.seed_hidden
    else:
        accepted = mx.zeros((len(batch),), dtype=mx.int32)
        batch.last_tokens, batch.state = chosen[:, 0], verified.state
        if batch.has_head_caches:
            batch.append_backlog(chosen, verified.hidden)
    decided = mx.concatenate([accepted[:, None], chosen], axis=1)
    mx.async_eval(decided)
    batch.set_offset(offset + accepted + 1)
    batch.evaluate_async()
    return _result(limits, decided, verified.scores)


def run_uncompiled_step(batch: Batch, target: Target) -> StepResult:
    """Advance every row by one token, for families whose rounds are no pure functions of arrays."""
    batch.reserve(1)
    positions = [[row.context_tokens + row.position_offset] for row in batch.rows]
    forward = target.forward(
        batch.last_tokens[:, None], batch.caches, mx.array(positions, dtype=mx.int32)
    )
    scores = target.scores(forward)
    chosen = choose(scores, [row.sampling_context() for row in batch.rows])
    batch.last_tokens = chosen[:, 0]
    decided = mx.concatenate([mx.zeros_like(chosen), chosen], axis=1)
    mx.async_eval(decided)
    batch.evaluate_async()
    return _result([0] * len(batch), decided, scores)


def _draft(batch: Batch, graph: StepGraph, length: int) -> mx.array:
    """Let the head guess the next `length` tokens of every row: [rows, length]."""
    if graph.head is not None and (length or batch.backlog_full):
        batch.read_backlog(graph.head)
    if not length:
        return mx.zeros((len(batch), 0), dtype=mx.int32)
    assert batch.seed_hidden is not None
    drafts, batch.head_state = graph.draft(
        batch.seed_hidden, batch.head_state, batch.offset, length
    )
    mx.async_eval(drafts)  # the head works while the host describes the verify
    return drafts


def _result(limits: list[int], decided: mx.array, scores: mx.array) -> StepResult:
    rows = decided.tolist()
    return StepResult(
        drafted=tuple(limits),
        # An accepted draft is the target's own choice, so the choices are the answer.
        tokens=tuple(tuple(row[1 : row[0] + 2]) for row in rows),
        scores=scores,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one round of one batch, or one join, did to its rows."""

    finished: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    """Those that `error` ends."""
    again: list[Row] = field(default_factory=list)
    """Those whose caches are lost with it: to be read again."""
    error: Exception | None = None


class Decoder:
    """All rows of a lane that decode; the engine thread alone touches it."""

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        counters: LaneCounters,
        *,
        draft_tokens: int,
        max_rows: int,
        eos: frozenset[int],
        raw: Callable[[int], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._head = head
        # Families that find positions in their caches are no pure functions of arrays.
        self._graph = StepGraph(target, head.usable) if target.explicit_positions else None
        self._counters = counters
        self._draft_length = DraftLength(draft_tokens)
        self._max_rows = max_rows
        self._eos = eos
        self._raw = raw
        self._clock = clock
        # A family whose caches cannot hold rows of different length decodes row by row, and so
        # does a row that no batch could hold: both in the caches that the family makes itself,
        # which a compiled round cannot take.
        self._shared = target.supports_batching
        self._drafting, self._plain = Batch(shared=self._shared), Batch(shared=self._shared)
        self._alone: list[Batch] = []

    @property
    def rows(self) -> list[Row]:
        """Name all rows."""
        return [row for batch in self._batches for row in batch.rows]

    @property
    def _batches(self) -> list[Batch]:
        return [self._drafting, self._plain, *self._alone]

    def clear(self) -> None:
        """Drop all rows."""
        for batch in self._batches:
            batch.clear()

    def drop_cancelled(self) -> list[Row]:
        """Drop the rows that nobody reads any more, and name them."""
        gone = [row for row in self.rows if row.cancelled]
        for batch in self._batches:
            batch.select([i for i, row in enumerate(batch.rows) if not row.cancelled])
        return gone

    def rows_by_batch(self, *newcomers: Row) -> list[list[Row]]:
        """Name the rows by batch, as they will be once these have joined."""
        drafting, plain, *alone = [list(batch.rows) for batch in self._batches]
        for row in newcomers:
            if not self._may_share(row):
                alone.append([row])
            else:
                (drafting if row.draft_tokens else plain).append(row)
        return [rows for rows in (drafting, plain, *alone) if rows]

    def preempt(self) -> Row:
        """Drop the row that has written least, to be read again when there is room for it."""
        sent = min(self.rows, key=lambda row: len(row.answer))
        for batch in self._batches:
            batch.select([i for i, row in enumerate(batch.rows) if row is not sent])
            batch.evaluate()  # room is what it was sent back for
        return sent

    def append_first_token(self, row: Row, scores: mx.array, token: int) -> None:
        """Take the token that follows a prompt, chosen from scores [1, vocabulary]."""
        logprobs = self._logprobs(row, scores, [token])
        row.append_tokens([token], self._eos, logprobs, now_s=self._clock())

    def join(self, prefill: Prefill) -> Outcome:
        """Take a row that has been read, with the first token of its answer at least."""
        row, token = prefill.row, prefill.row.answer[-1]
        head, seed, outcome = self._head.for_row(row), None, Outcome()
        if head is not None:
            outcome = self._catch_up(head)
            try:
                seed = seed_head(prefill, head, token)
            except Exception as error:  # noqa: BLE001  # the target needs no head to go on
                self._head.record_error(error)
                self._head.disable_for(row)
        batch = self._batch_for(row)
        others = list(batch.rows)
        try:
            head_caches = prefill.head_caches if seed is not None else []
            batch.join(row, prefill.caches, head_caches, token, seed)
        except Exception as error:  # noqa: BLE001  # half joined: no row's caches are whole
            batch.clear()
            return Outcome(failed=[row], again=[*others, *outcome.again], error=error)
        return outcome

    def _catch_up(self, head: MtpHead) -> Outcome:
        """Bring the head up to date with the rows that it drafts for, so that others can join."""
        try:
            self._drafting.read_backlog(head)
        except Exception as error:  # noqa: BLE001  # its state is lost, and with it only drafts
            self._head.record_error(error)
            return self._fall_back(self._drafting, error)
        return Outcome()

    def step(self) -> Iterator[Outcome]:
        """Advance every row by one round, batch by batch."""
        for batch in self._batches:
            if batch.rows:
                yield self._round(batch)
        self._alone = [batch for batch in self._alone if batch.rows]

    def _round(self, batch: Batch) -> Outcome:
        rows = list(batch.rows)
        drafts = any(row.draft_tokens for row in rows)
        head = self._head.usable if drafts else None
        if drafts and head is None:
            return self._fall_back(batch, RuntimeError("The head was found unhealthy meanwhile."))
        k, usual = 0, True
        if head:
            fewest_steps = min(row.speculation.step_count for row in rows)
            k = self._draft_length.choose(len(rows), fewest_steps)
            usual = not (
                self._draft_length.is_exploring(len(rows), fewest_steps)
                or (k and batch.has_backlog)
            )
        begun_s = self._clock()
        try:
            if self._graph is None:
                result = run_uncompiled_step(batch, self._target)
            else:
                result = run_step(batch, self._graph, k)
        except Exception as error:  # noqa: BLE001  # whose row it was is found out by falling back
            if head:
                self._head.record_error(error)
                for row in rows:
                    row.speculation.record_errors(row.draft_limit(k))
            return self._fall_back(batch, error)
        failed, raised, taken = [], None, 0
        for index, row in enumerate(rows):
            try:
                taken += self._take(row, result, index, begun_s)
            except Exception as error:  # noqa: BLE001  # one bad answer must not end the others
                failed.append(row)
                raised = error
        written = sum(map(len, result.tokens)) / len(rows)
        duration_s = self._clock() - begun_s
        self._counters.record_decode(written, duration_s)
        if head:
            self._head.record_success()
            if k == self._draft_length.best(len(rows)) == 0:
                for row in rows:
                    row.drafting_skipped = True
            self._learn(rows, result, k if usual else None, duration_s)
            self._note_saving(rows, result, taken, duration_s)
        batch.select(
            [i for i, row in enumerate(rows) if not row.finish_reason and row not in failed]
        )
        finished = [row for row in rows if row.finish_reason and row not in failed]
        return Outcome(finished=finished, failed=failed, error=raised)

    def _fall_back(self, batch: Batch, error: Exception) -> Outcome:
        """Empty a batch whose caches cannot be trusted any more; say who may try again."""
        rows = list(batch.rows)
        batch.clear()
        failed = [row for row in rows if row.suspect]
        again = [row for row in rows if not row.suspect]
        for row in again:
            row.suspect = not row.draft_tokens
            self._head.disable_for(row)
        return Outcome(failed=failed, again=again, error=error)

    def _learn(self, rows: list[Row], result: StepResult, k: int | None, duration_s: float) -> None:
        """Note what a round of k cost, if that is what it was.

        Writing the tokens out is a part of it: a longer draft has more of them. k is None for a
        round that costs more for another reason: it began an answer, or brought the head up to date
        with rounds that drafted nothing. Either would keep a lane from drafting where it pays.
        """
        if k is None or max(result.drafted) != k:
            return  # the rows asked for other lengths
        self._draft_length.observe_cost(len(rows), k, duration_s)
        self._counters.set_draft_tokens(
            [self._draft_length.best(size) for size in range(1, self._max_rows + 1)]
        )

    def _note_saving(
        self, rows: list[Row], result: StepResult, taken: int, duration_s: float
    ) -> None:
        """Note the time that a drafted round has saved, where the cost of a plain one is known."""
        plain_s = self._draft_length.plain_step_s(len(rows))
        if plain_s is not None and any(result.drafted):
            # One by one, these tokens would have been so many plain rounds of these rows.
            self._counters.record_decode_saving(plain_s * taken / len(rows) - duration_s)

    def _take(self, row: Row, result: StepResult, index: int, now_s: float) -> int:
        """Give a row its tokens of a round; say how many it took."""
        tokens, drafted = result.tokens[index], result.drafted[index]
        logprobs = self._logprobs(row, result.scores[index], tokens)
        taken = row.append_tokens(tokens, self._eos, logprobs, now_s=now_s)
        if drafted:
            # A drafted token behind the end of the answer bought nothing: it counts as
            # rejected, so that the counts explain `completion_tokens`.
            row.speculation.record_step(drafted, min(taken, len(tokens) - 1))
            self._draft_length.observe_acceptance(drafted, len(tokens) - 1)
        return taken

    def _may_share(self, row: Row) -> bool:
        return self._shared and not row.suspect

    def _batch_for(self, row: Row) -> Batch:
        if self._may_share(row):
            return self._drafting if row.draft_tokens else self._plain
        batch = Batch(shared=self._graph is not None)
        self._alone.append(batch)
        return batch

    def _logprobs(
        self, row: Row, scores: mx.array, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        top = row.generation.top_logprobs
        return () if top is None else token_logprobs(scores, tokens, top, self._raw)


def check_device(target: Target) -> None:
    """Run one token; an error means that nothing can be served any more, whoever asks."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    mx.eval(target.scores(target.forward(token, target.new_caches(), token)))
