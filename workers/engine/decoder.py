"""Decode the rows of a lane in batches, one step at a time: draft, verify, accept, append.

Speculative decoding by match (Leviathan et al. 2023, arXiv 2211.17192, for a draft of the likeliest
tokens): the target chooses a token at every position by the row's own sampling rules, and accepts a
drafted token where it equals that choice. Every row therefore gets exactly the tokens that it would
get without speculation, whatever its sampler and whatever rows share its batch.

Rows that draft and rows that do not form separate batches: a verify costs more than a plain step,
and a row that gains nothing from it must not pay for it. So do rows of different size classes
(`batch.py`).

An error in a step does not name its row, and invalidates every cache of the batch. All rows of the
batch are requeued for a new prefill and degrade by one level: from drafting to plain, from plain to
a batch of their own. A row that fails alone in its batch is the cause, and ends with the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from workers.engine.batch import Batch, set_states, size_class, states_of
from workers.engine.draft_head import DraftHead
from workers.engine.draft_length import FORCED_LENGTHS, DraftLength
from workers.engine.grammar import allowed_tokens, forced_drafts
from workers.engine.kv_cache import RowCache, state_after
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint, KVCache, Target
from workers.engine.prefill import Prefill, seed_head
from workers.engine.prefix_cache import RowState, state_of
from workers.engine.row import Row
from workers.engine.sampler import choose, token_logprobs
from workers.engine.step_graph import Layers, StepGraph, VerifyResult
from workers.engine.tokenizer import PromptRenderer
from workers.engine.types import DraftStep, TokenLogprob

MAX_BACKLOG_STEPS = 32
"""Backlog at which the head reads it even though the batch drafts nothing."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Effect of one step of one batch, or of one join, on its rows."""

    finished: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    """Rows that `error` ends."""
    requeued: list[Row] = field(default_factory=list)
    """Rows whose caches were lost: they need a new prefill."""
    error: Exception | None = None


class Decoder:
    """All decoding rows of a lane; used by the engine thread only."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        head: DraftHead,
        counters: LaneCounters,
        *,
        draft_tokens: int,
        clock: Callable[[], float],
        store: Callable[[Row, Callable[[], RowState]], None],
    ) -> None:
        """Create a decoder; it calls `store` with the state of each row whose answer has ended."""
        self._store = store
        self._target = target = checkpoint.target
        self._head = head
        # A family that finds positions in its caches is no pure function of arrays.
        self._graph = StepGraph(target, head.usable) if target.explicit_positions else None
        self._counters = counters
        self._draft_length = DraftLength(draft_tokens)
        self._token_bytes = prompts.raw
        # A verify takes the memory of a recurrent state for each token, which is measured for the
        # drafts of a head alone.
        lengths = FORCED_LENGTHS[: draft_tokens > 0] if target.is_recurrent else FORCED_LENGTHS
        if not target.native_verify or self._graph is None:
            lengths = ()
        self._forced_limit = max(lengths, default=0)
        self._clock = clock
        # A family whose caches cannot hold rows of different lengths decodes row by row, and so
        # does a suspect row: both in the family's own caches, which a compiled step cannot take.
        self._shared = target.supports_batching
        self._shared_batches: dict[tuple[bool, int], Batch] = {}
        """By whether their rows draft, and by their size class."""
        self._single: list[Batch] = []

    @property
    def rows(self) -> list[Row]:
        """Return all rows."""
        return [row for batch in self._batches for row in batch.rows]

    @property
    def _batches(self) -> list[Batch]:
        return [*self._shared_batches.values(), *self._single]

    def rows_by_batch(self, *newcomers: Row) -> list[list[Row]]:
        """Return the rows grouped by batch, as they will be after these newcomers have joined."""
        shared = {key: list(batch.rows) for key, batch in self._shared_batches.items()}
        single = [list(batch.rows) for batch in self._single]
        for row in newcomers:
            if self._can_share(row):
                shared.setdefault(_batch_key(row), []).append(row)
            else:
                single.append([row])
        return [rows for rows in (*shared.values(), *single) if rows]

    def clear(self) -> None:
        """Remove all rows."""
        for batch in self._batches:
            batch.clear()

    def drop_cancelled(self) -> list[Row]:
        """Remove and return the cancelled rows."""
        cancelled = [row for row in self.rows if row.cancelled]
        for batch in self._batches:
            batch.select([i for i, row in enumerate(batch.rows) if row not in cancelled])
        return cancelled

    def preempt(self) -> Row:
        """Remove and return the row with the shortest answer, to free its memory now."""
        preempted = min(self.rows, key=lambda row: len(row.answer))
        for batch in self._batches:
            batch.select([i for i, row in enumerate(batch.rows) if row is not preempted])
            batch.evaluate()  # without it the memory would stay in use until the next step
        return preempted

    def append_first_token(self, row: Row, scores: mx.array, token: int) -> None:
        """Append the token that follows a prompt, chosen from scores [1, vocabulary]."""
        logprobs = self._logprobs(row, scores, [token])
        row.append_tokens([token], logprobs, now_s=self._clock())

    def join(self, prefill: Prefill) -> Outcome:
        """Add a row whose prefill is complete and whose answer has at least one token."""
        row, token = prefill.row, prefill.row.answer[-1]
        head, seed, outcome = self._head.for_row(row), None, Outcome()
        if head is not None:
            drafting = self._batch_for(row)
            try:  # the row can join once the head has read the backlog of the others
                drafting.read_backlog(head)
            except Exception as error:  # noqa: BLE001  # only the head's caches are lost
                self._head.record_error(error)
                outcome = self._requeue(drafting, error)
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
        except Exception as error:  # noqa: BLE001  # a partial join leaves no cache intact
            batch.clear()
            return Outcome(failed=[row], requeued=[*others, *outcome.requeued], error=error)
        return outcome

    def step(self) -> Iterator[Outcome]:
        """Advance every row by one step, batch by batch."""
        for batch in self._batches:
            if batch.rows:
                yield self._step(batch)
        self._single = [batch for batch in self._single if batch.rows]

    def _step(self, batch: Batch) -> Outcome:
        rows = list(batch.rows)
        drafting = any(row.draft_tokens for row in rows)
        if drafting and self._head.usable is None:
            return self._requeue(batch, RuntimeError("The MTP head became unhealthy."))
        k, representative = self._choose_k(batch) if drafting else (0, True)
        backlog = bool(batch.backlog)
        begun_s = self._clock()
        try:
            forced = self._forced_tokens(batch, k)
            if self._graph is None:
                result = run_uncompiled_step(batch, self._target)
            else:
                result = run_step(batch, self._graph, k, forced)
        except Exception as error:  # noqa: BLE001  # it may be any row's: requeueing isolates it
            if drafting:
                self._head.record_error(error)
                for row in rows:
                    row.speculation.errors += row.draft_limit(k)
            return self._requeue(batch, error)
        outcome, fitted = self._append(rows, result, begun_s)
        if forced:
            k = max(result.drafted)
            representative &= not backlog
        appended = sum(fitted)
        duration_s = self._clock() - begun_s
        self._counters.record_decode(sum(map(len, result.tokens)) / len(rows), duration_s)
        if drafting or (self._forced_limit and any(row.matcher for row in rows)):
            self._record_cost(result, k if representative else None, appended, duration_s)
        if drafting:
            self._head.record_success()
            self._record_skipped(rows, k)
        for index, row in enumerate(rows):
            if row in outcome.finished:
                self._store(row, partial(self._state, batch, index, result, fitted[index]))
        ended = [*outcome.finished, *outcome.failed]
        batch.select([i for i, row in enumerate(rows) if row not in ended])
        return outcome

    def _forced_tokens(self, batch: Batch, k: int) -> list[Sequence[int]]:
        """Return the tokens that each row's grammar forces, as many as the next draft has of them.

        Empty if no row is forced to take more tokens than it drafts anyway.
        """
        if not self._forced_limit:
            return []
        runs = [row.forced_tokens()[: self._forced_limit] for row in batch.rows]
        lengths = [len(run) for run in runs]
        length = self._draft_length.choose_forced(len(runs), k, lengths)
        return [run[:length] for run in runs] if length > k else []

    def _choose_k(self, batch: Batch) -> tuple[int, bool]:
        """Return the draft length of the next step, and whether its duration is representative.

        A step that begins an answer, or in which the head reads its backlog, costs more for that
        reason alone: counting it would keep a lane from drafting where drafting pays.
        """
        count = len(batch.rows)
        fewest_steps = min(len(row.speculation.steps) for row in batch.rows)
        k = self._draft_length.choose(count, fewest_steps)
        exploring = self._draft_length.is_exploring(count, fewest_steps)
        return k, not (exploring or (k and batch.backlog))

    def _append(
        self, rows: list[Row], result: StepResult, now_s: float
    ) -> tuple[Outcome, list[int]]:
        """Append its tokens to every row; return the rows that ended, and the tokens appended.

        An error while a row takes its tokens belongs to that row alone.
        """
        outcome, appended = Outcome(), [0] * len(rows)
        for index, (row, tokens, drafted, scores) in enumerate(
            zip(rows, result.tokens, result.drafted, result.scores, strict=True)
        ):
            try:
                logprobs = self._logprobs(row, scores, tokens)
                fitted = row.append_tokens(tokens, logprobs, now_s=now_s)
            except Exception as error:  # noqa: BLE001  # one bad answer must not end the others
                outcome.failed.append(row)
                outcome.error = error
                continue
            appended[index] = fitted
            if drafted:
                # An accepted draft token behind the end of the answer counts as rejected, so that
                # the counts add up to `completion_tokens`.
                step = DraftStep(drafted=drafted, accepted=min(fitted, len(tokens) - 1))
                row.speculation.steps.append(step)
                if not result.forced[index]:
                    self._draft_length.observe_acceptance(drafted, len(tokens) - 1)
            if row.finish_reason:
                outcome.finished.append(row)
        return outcome, appended

    def _state(self, batch: Batch, index: int, result: StepResult, tokens: int) -> RowState:
        """Return the state of a row after the first `tokens` tokens that the last step read."""
        if batch.head_caches and batch.backlog and self._head.usable is not None:
            batch.read_backlog(self._head.usable)
        one = slice(index, index + 1)
        hidden = None if result.hidden is None else result.hidden[one, tokens - 1 : tokens]
        state = state_of(batch.caches, batch.head_caches, hidden, index)
        if tokens == len(result.tokens[index]):
            return state
        # The answer ended inside a draft, and the caches of the batch have read on.
        histories = [
            layer
            for cache, layer in zip(batch.caches, result.layers, strict=True)
            if not isinstance(cache, KVCache | RowCache)
        ]
        length, kept = result.scores.shape[1], mx.array([tokens])
        recurrent = [
            [state_after(tuple(part[one] for part in slot), kept, length) for slot in layer]
            for layer in histories
        ]
        return state._replace(recurrent=recurrent)

    def _record_skipped(self, rows: list[Row], k: int) -> None:
        """Record for each row whether a step drafted nothing since drafts do not pay."""
        if k == 0 and self._draft_length.best(len(rows)) == 0:
            for row in rows:
                row.drafting_skipped = True

    def _record_cost(
        self, result: StepResult, k: int | None, appended: int, duration_s: float
    ) -> None:
        """Record the cost of a step of draft length k, including that of appending its tokens.

        k is None if the cost is not representative. A step in which rows have draft lengths of
        their own is no sample either. A drafted step saves the difference to the plain steps that
        it replaced.
        """
        rows = len(result.drafted)
        if max(result.drafted) == k:
            self._draft_length.observe_cost(rows, k, duration_s)
            self._counters.set_draft_tokens(
                [self._draft_length.best(size) for size in range(1, self._counters.slots + 1)]
            )
        plain_s = self._draft_length.plain_step_s(rows)
        if plain_s is not None and any(result.drafted):
            self._counters.record_decode_saving(plain_s * appended / rows - duration_s)

    def _requeue(self, batch: Batch, error: Exception) -> Outcome:
        """Empty a batch whose caches are invalid; requeue its rows degraded, fail a suspect one."""
        rows = list(batch.rows)
        batch.clear()
        requeued = [row for row in rows if not row.suspect]
        failed = [row for row in rows if row.suspect]
        for row in requeued:
            row.suspect = not row.draft_tokens
            self._head.disable_for(row)
        return Outcome(failed=failed, requeued=requeued, error=error)

    def _batch_for(self, row: Row) -> Batch:
        if self._can_share(row):
            return self._shared_batches.setdefault(_batch_key(row), Batch(shared=True))
        batch = Batch(shared=self._graph is not None)
        self._single.append(batch)
        return batch

    def _can_share(self, row: Row) -> bool:
        return self._shared and not row.suspect

    def _logprobs(
        self, row: Row, scores: mx.array, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        top = row.generation.top_logprobs
        return () if top is None else token_logprobs(scores, tokens, top, self._token_bytes)


def _batch_key(row: Row) -> tuple[bool, int]:
    return row.draft_tokens > 0, size_class(row.slots_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens that one step of a batch decided, row by row."""

    drafted: tuple[int, ...]
    """Number of verified draft tokens."""
    forced: tuple[bool, ...]
    """Whether a grammar forced some of these, rather than the head drafted all."""
    tokens: tuple[tuple[int, ...], ...]
    """The accepted draft tokens, then the one token that the target adds."""
    scores: mx.array
    """[rows, L, vocabulary]: the scores behind every token, for log-probabilities."""
    hidden: mx.array | None = None
    """[rows, L, width]: the hidden states of the tokens that the step has read."""
    layers: Layers = field(default_factory=list)
    """Layers of the verify, with the histories of recurrent layers where L > 1."""


def run_step(
    batch: Batch, graph: StepGraph, k: int, long_runs: Sequence[Sequence[int]] = ()
) -> StepResult:
    """Advance every row by one verify of up to k draft tokens, or of its fixed draft length.

    `long_runs` has for each row the tokens that its grammar forces, if any of them has more than k.

    The host waits for the device once, for the chosen tokens; the device computes the new caches
    while the host emits them.
    """
    limits = [row.draft_limit(k) if batch.head_caches else 0 for row in batch.rows]
    head_length = max(limits)
    if long_runs:
        limits = [max(limit, len(run)) for limit, run in zip(limits, long_runs, strict=True)]
    length = max(limits)
    rules = [row.token_rules(length) for row in batch.rows]
    forced = [() if one is None or not length else one.forced() for one in rules]
    batch.reserve(length + 1)
    if graph.head is not None and (length or len(batch.backlog) >= MAX_BACKLOG_STEPS):
        batch.read_backlog(graph.head)
    offset = batch.offset
    head_state = states_of(batch.head_caches)
    if head_length:
        assert batch.seed_hidden is not None
        drafts, head_state = graph.draft(batch.seed_hidden, head_state, offset, head_length)
    else:
        drafts = mx.zeros((len(limits), 0), dtype=mx.int32)
    if length:
        drafts = mx.pad(drafts, ((0, 0), (0, length - head_length)))
        drafts = forced_drafts(forced, drafts)
        mx.async_eval(drafts)  # the device drafts while the host describes the verify
    verified = graph.verify(
        mx.concatenate([batch.last_tokens[:, None], drafts], axis=1),
        states_of(batch.caches),
        offset,
        batch.position_shift,
    )
    allowed = None
    if any(rules):
        # The device verifies while the host reads the drafts and finds the tokens allowed after
        # each. The caches must not hold the old keys meanwhile, or MLX would copy all of them.
        set_states(batch.caches, graph.attention_state(verified.layers, batch.caches))
        mx.async_eval(verified.scores)
        allowed = allowed_tokens(rules, verified.scores.shape[-1], drafts)
    contexts = [row.sampling_context() for row in batch.rows]
    chosen = choose(verified.scores, contexts, drafts, allowed)
    drafted = (drafts, mx.array(limits))
    if length and batch.head_caches:
        committed = graph.commit(
            verified.layers, verified.hidden, chosen, drafted, (head_state, offset)
        )
        accepted, batch.last_tokens, state, head_state, batch.seed_hidden = committed
        set_states(batch.caches, state)
        set_states(batch.head_caches, head_state)
    elif length:
        accepted, batch.last_tokens, state = graph.settle(verified.layers, chosen, drafted)
        set_states(batch.caches, state)
    else:
        accepted = mx.zeros((len(limits),), dtype=mx.int32)
        batch.last_tokens = chosen[:, 0]
        set_states(batch.caches, verified.state)
        if batch.head_caches:
            batch.backlog.append((chosen, verified.hidden))
    decided = mx.concatenate([accepted[:, None], chosen], axis=1)
    mx.async_eval(decided)
    batch.set_offset(offset + accepted + 1)
    batch.evaluate_async()
    return _result(limits, decided, verified, forced)


def run_uncompiled_step(batch: Batch, target: Target) -> StepResult:
    """Advance every row by one token, for families whose steps are no pure functions of arrays."""
    batch.reserve(1)
    positions = [[row.context_tokens + row.position_offset] for row in batch.rows]
    output = target.forward(
        batch.last_tokens[:, None], batch.caches, mx.array(positions, dtype=mx.int32)
    )
    scores = target.scores(output)
    allowed = None
    rules = [row.token_rules(0) for row in batch.rows]
    if any(rules):
        mx.async_eval(scores)
        allowed = allowed_tokens(rules, scores.shape[-1])
    contexts = [row.sampling_context() for row in batch.rows]
    chosen = choose(scores, contexts, allowed=allowed)
    batch.last_tokens = chosen[:, 0]
    decided = mx.concatenate([mx.zeros_like(chosen), chosen], axis=1)
    mx.async_eval(decided)
    batch.evaluate_async()
    return _result([0] * len(batch.rows), decided, VerifyResult(scores, None, []))


def _result(
    limits: list[int],
    decided: mx.array,
    verified: VerifyResult,
    forced: Sequence[Sequence[int]] = (),
) -> StepResult:
    rows = decided.tolist()
    return StepResult(
        drafted=tuple(limits),
        forced=tuple(map(bool, forced)) or (False,) * len(limits),
        # An accepted draft token is the target's own choice, so the choices are the answer.
        tokens=tuple(tuple(row[1 : row[0] + 2]) for row in rows),
        scores=verified.scores,
        hidden=verified.hidden,
        layers=verified.layers,
    )


def check_device(target: Target) -> None:
    """Compute one token; raise if even that fails, since then the engine can serve nothing."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    mx.eval(target.scores(target.forward(token, target.new_caches(), token)))
