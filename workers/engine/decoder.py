"""Decode the rows of a lane in batches, one step at a time: draft, verify, accept, append.

Speculative decoding by match (Leviathan et al. 2023, arXiv 2211.17192, for a draft of the likeliest
tokens): the target chooses a token at every position by the row's own sampling rules, and accepts a
drafted token where it equals that choice. Every row therefore gets exactly the tokens that it would
get without speculation, whatever its sampler and whatever rows share its batch.

Drafts come from the MTP head, from prompt lookup (`prompt_lookup.py`), and from a grammar that
forces the next tokens; `draft_length.py` decides for each row and step.

Rows of the head, rows that draft without it, and rows that do not draft form separate batches: a
verify costs more than a plain step, and a row that gains nothing from it must not pay for it. So do
rows of different size classes (`batch.py`).

An error in a step does not name its row, and invalidates every cache of the batch. All rows of the
batch are requeued for a new prefill and degrade by one level: from the head to lookup, from drafts
to plain steps, from there to a batch of their own. A row that fails alone in its batch is the
cause, and ends with the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from workers.engine.batch import Batch, set_states, size_class, states_of
from workers.engine.draft_head import DraftHead
from workers.engine.draft_length import RUN_LENGTHS, DraftLength, Plan, Run
from workers.engine.grammar import allowed_tokens, given_drafts
from workers.engine.kv_cache import RowCache, state_after
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint, KVCache, Target
from workers.engine.prefill import Prefill, seed_head
from workers.engine.prefix_cache import RowState, state_of
from workers.engine.prompt_lookup import Found, Reliability
from workers.engine.row import Row
from workers.engine.sampler import choose, token_logprobs
from workers.engine.step_graph import Layers, State, StepGraph, VerifyResult
from workers.engine.tokenizer import PromptRenderer
from workers.engine.types import TokenLogprob
from workers.protocol import DraftSource

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
        # Another family drafts if rows of any length share its forward pass. That finds positions
        # in the caches, and is no pure function of arrays: its steps are not compiled.
        verifies = target.supports_batching and target.native_verify and draft_tokens > 0
        self._graph = (
            StepGraph(target, head.usable, compiled=target.explicit_positions)
            if target.explicit_positions or verifies
            else None
        )
        self._counters = counters
        self._token_bytes = prompts.raw
        # A verify takes the memory of a recurrent state for each token, which is measured for the
        # shortest of these lengths.
        lengths = RUN_LENGTHS[: draft_tokens > 0] if target.is_recurrent else RUN_LENGTHS
        if not target.native_verify or self._graph is None:
            lengths = ()
        self.looks_up = bool(lengths) and draft_tokens > 0
        """Whether rows draft by prompt lookup."""
        self._run_limit = max(lengths, default=0)
        self._draft_length = DraftLength(
            draft_tokens, lengths, has_head=head.usable is not None or not self.looks_up
        )
        self._reliability = Reliability()
        self._clock = clock
        # A family whose caches cannot hold rows of different lengths decodes row by row, and so
        # does a suspect row: both in the family's own caches, which a compiled step cannot take.
        self._shared = target.supports_batching
        self._shared_batches: dict[tuple[bool, bool, int], Batch] = {}
        """By whether their rows draft, and with the head, and by their size class."""
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
        with_head = any(row.uses_head for row in rows)
        if with_head and self._head.usable is None:
            return self._requeue(batch, RuntimeError("The MTP head became unhealthy."))
        k, representative = self._choose_k(batch) if with_head else (0, True)
        backlog = bool(batch.backlog)
        begun_s = self._clock()
        drafts = _Drafts(Plan(k), [()] * len(rows), [None] * len(rows))
        try:
            if self._graph is None or not batch.shared:
                result = run_uncompiled_step(batch, self._target)
            else:
                drafts = self._plan(batch, k)
                result = run_step(batch, self._graph, drafts.plan.head_tokens, drafts.runs)
        except Exception as error:  # noqa: BLE001  # it may be any row's: requeueing isolates it
            if with_head:
                self._head.record_error(error)
            _add_errors(rows, k, drafts.runs)
            return self._requeue(batch, error)
        outcome, fitted = self._append(rows, result, begun_s)
        self._observe_lookups(rows, result, drafts.found)
        representative &= not (backlog and any(drafts.runs))
        appended = sum(fitted)
        duration_s = self._clock() - begun_s
        self._counters.record_decode(sum(map(len, result.tokens)) / len(rows), duration_s)
        if with_head or any(row.lookup or row.matcher for row in rows):
            cost = drafts.plan.cost if representative else None
            self._record_cost(result, cost, appended, duration_s)
        if with_head:
            self._head.record_success()
            self._record_skipped(rows, k)
        for index, row in enumerate(rows):
            if row in outcome.finished:
                self._store(row, partial(self._state, batch, index, result, fitted[index]))
        ended = [*outcome.finished, *outcome.failed]
        batch.select([i for i, row in enumerate(rows) if row not in ended])
        return outcome

    def _plan(self, batch: Batch, k: int) -> _Drafts:
        """Decide what each row drafts: k tokens of the head, or some of its run."""
        rows = batch.rows
        if not self._run_limit or not any(row.lookup or row.matcher for row in rows):
            return _Drafts(Plan(k), [()] * len(rows), [None] * len(rows))
        runs: list[Run | None] = []
        found: list[Found | None] = []
        for row in rows:
            forced = row.forced_tokens()[: self._run_limit]
            looked_up = row.look_up(self._run_limit)
            found.append(looked_up)
            if looked_up is not None and row.lookup is not None:
                share = self._reliability.of(looked_up, row.lookup.shares)
                agrees = list(forced) == list(looked_up.tokens[: len(forced)])
                if agrees and len(forced) < len(looked_up.tokens):
                    runs.append(Run(looked_up.tokens, len(forced), share))
                    continue
            runs.append(Run(forced, len(forced)) if forced else None)
        fixed = [row.draft_tokens_fixed and row.draft_tokens > 0 for row in rows]
        plan = self._draft_length.plan(
            k, [None if own else run for own, run in zip(fixed, runs, strict=True)]
        )
        drafted: list[Sequence[int]] = [()] * len(rows)
        for index, run in enumerate(runs):
            if run is not None and fixed[index]:
                drafted[index] = run.tokens[: rows[index].draft_tokens]
            elif run is not None and plan.uses_run[index]:
                drafted[index] = run.tokens[: plan.run_tokens]
        return _Drafts(plan, drafted, found)

    def _observe_lookups(
        self, rows: list[Row], result: StepResult, found: Sequence[Found | None]
    ) -> None:
        """Compare what was looked up, whether drafted or not, with the tokens that came."""
        for row, tokens, looked_up in zip(rows, result.tokens, found, strict=True):
            if looked_up is not None and row.lookup is not None:
                self._reliability.observe(looked_up, tokens, row.lookup.shares)

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
        for index, (row, tokens, sources, scores) in enumerate(
            zip(rows, result.tokens, result.sources, result.scores, strict=True)
        ):
            try:
                logprobs = self._logprobs(row, scores, tokens)
                fitted = row.append_tokens(tokens, logprobs, sources, now_s=now_s)
            except Exception as error:  # noqa: BLE001  # one bad answer must not end the others
                outcome.failed.append(row)
                outcome.error = error
                continue
            appended[index] = fitted
            if sources and set(sources) == {DraftSource.HEAD}:
                self._draft_length.observe_acceptance(len(sources), len(tokens) - 1)
            if row.finish_reason:
                outcome.finished.append(row)
        return outcome, appended

    def _state(self, batch: Batch, index: int, result: StepResult, tokens: int) -> RowState:
        """Return the state of a row after the first `tokens` tokens that the last step read."""
        if batch.head_caches and batch.backlog and self._head.usable is not None:
            batch.read_backlog(self._head.usable)
        one = slice(index, index + 1)
        hidden = None if result.hidden is None else result.hidden[one, tokens - 1 : tokens]
        end = batch.rows[index].context_tokens
        state = state_of(batch.caches, batch.head_caches, hidden, index, end)
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
        self,
        result: StepResult,
        planned: tuple[int, int] | None,
        appended: int,
        duration_s: float,
    ) -> None:
        """Record the cost of a step, including that of appending its tokens.

        `planned` has the tokens that the head drafts and those that are verified; None if the cost
        is not representative. A step in which rows have draft lengths of their own is no sample
        either. A drafted step saves the difference to the plain steps that it replaced.
        """
        drafted = [len(sources) for sources in result.sources]
        rows = len(drafted)
        if planned is not None and max(drafted) == planned[1]:
            self._draft_length.observe_cost(rows, planned[1], duration_s, head_tokens=planned[0])
            self._counters.set_draft_tokens(
                [self._draft_length.best(size) for size in range(1, self._counters.slots + 1)]
            )
        plain_s = self._draft_length.plain_step_s(rows)
        if plain_s is not None and any(drafted):
            self._counters.record_decode_saving(plain_s * appended / rows - duration_s)

    def _requeue(self, batch: Batch, error: Exception) -> Outcome:
        """Empty a batch whose caches are invalid; requeue its rows degraded, fail a suspect one."""
        rows = list(batch.rows)
        batch.clear()
        requeued = [row for row in rows if not row.suspect]
        failed = [row for row in rows if row.suspect]
        for row in requeued:
            row.suspect = not row.draft_tokens
            if row.uses_head:
                self._head.disable_for(row)
            else:
                row.draft_tokens = 0
        return Outcome(failed=failed, requeued=requeued, error=error)

    def _batch_for(self, row: Row) -> Batch:
        if self._can_share(row):
            return self._shared_batches.setdefault(_batch_key(row), Batch(shared=True))
        batch = Batch(shared=self._target.explicit_positions)
        self._single.append(batch)
        return batch

    def _can_share(self, row: Row) -> bool:
        return self._shared and not row.suspect

    def _logprobs(
        self, row: Row, scores: mx.array, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        top = row.generation.top_logprobs
        return () if top is None else token_logprobs(scores, tokens, top, self._token_bytes)


def _batch_key(row: Row) -> tuple[bool, bool, int]:
    return row.draft_tokens > 0, row.uses_head, size_class(row.slots_used)


def _add_errors(rows: list[Row], k: int, runs: Sequence[Sequence[int]]) -> None:
    """Count the drafts of a step that failed."""
    for row, run in zip(rows, runs, strict=True):
        limit = row.draft_limit(k) if row.uses_head else 0
        row.speculation.add_errors(_sources(len(run) or limit, run, ()))


class _Drafts(NamedTuple):
    """What one step of a batch drafts, and what prompt lookup found for it."""

    plan: Plan
    runs: Sequence[Sequence[int]]
    """For each row the tokens of its run that it drafts; empty for the head, or nothing."""
    found: Sequence[Found | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens that one step of a batch decided, row by row."""

    sources: tuple[tuple[DraftSource, ...], ...]
    """Where each verified draft token comes from."""
    tokens: tuple[tuple[int, ...], ...]
    """The accepted draft tokens, then the one token that the target adds."""
    scores: mx.array
    """[rows, L, vocabulary]: the scores behind every token, for log-probabilities."""
    hidden: mx.array | None = None
    """[rows, L, width]: the hidden states of the tokens that the step has read."""
    layers: Layers = field(default_factory=list)
    """Layers of the verify, with the histories of recurrent layers where L > 1."""


def run_step(
    batch: Batch, graph: StepGraph, k: int, runs: Sequence[Sequence[int]] = ()
) -> StepResult:
    """Advance every row by one verify of up to k draft tokens, or of its fixed draft length.

    `runs` has for each row the tokens that it drafts instead of asking the head.

    The host waits for the device once, for the chosen tokens; the device computes the new caches
    while the host emits them.
    """
    runs = runs or [()] * len(batch.rows)
    wanted = [row.draft_limit(k) if batch.head_caches else 0 for row in batch.rows]
    wanted = [0 if run else limit for limit, run in zip(wanted, runs, strict=True)]
    head_length = max(wanted)
    limits = [len(run) or limit for limit, run in zip(wanted, runs, strict=True)]
    length = max(limits)
    rules = [row.token_rules(length) for row in batch.rows]
    forced = [() if one is None or not length else one.forced() for one in rules]
    given = [_given(run, own, length) for run, own in zip(runs, forced, strict=True)]
    batch.reserve(length + 1)
    if graph.head is not None and (length or len(batch.backlog) >= MAX_BACKLOG_STEPS):
        batch.read_backlog(graph.head)
    offset = batch.offset
    drafts, head_state = _draft(batch, graph, head_length, given)
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
        assert verified.hidden is not None
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
            assert verified.hidden is not None
            batch.backlog.append((chosen, verified.hidden))
    decided = mx.concatenate([accepted[:, None], chosen], axis=1)
    mx.async_eval(decided)
    batch.set_offset(offset + accepted + 1)
    batch.evaluate_async()
    sources = [
        _sources(limit, run, own) for limit, run, own in zip(limits, runs, forced, strict=True)
    ]
    return _result(sources, decided, verified)


def _draft(
    batch: Batch, graph: StepGraph, head_length: int, given: Sequence[Sequence[int]]
) -> tuple[mx.array, State]:
    """Return the drafts [rows, k], of which k tokens are given or -1, and the head's new caches."""
    head_state = states_of(batch.head_caches)
    drafts = mx.zeros((len(given), 0), dtype=mx.int32)
    if head_length:
        assert batch.seed_hidden is not None
        drafts, head_state = graph.draft(batch.seed_hidden, head_state, batch.offset, head_length)
    if length := len(given[0]):
        drafts = given_drafts(given, mx.pad(drafts, ((0, 0), (0, length - head_length))))
        mx.async_eval(drafts)  # the device drafts while the host describes the verify
    return drafts, head_state


def _given(run: Sequence[int], forced: Sequence[int], length: int) -> list[int]:
    """Return the tokens of a draft that are not the head's; -1 in place of one of those."""
    tokens = [*run, *[-1] * (length - len(run))][:length]
    for at, token in enumerate(forced[:length]):
        tokens[at] = token if token >= 0 else tokens[at]
    return tokens


def _sources(limit: int, run: Sequence[int], forced: Sequence[int]) -> tuple[DraftSource, ...]:
    """Return where each of the first `limit` tokens of a draft comes from."""
    drafted = DraftSource.LOOKUP if run else DraftSource.HEAD
    return tuple(
        DraftSource.FORCED if at < len(forced) and forced[at] >= 0 else drafted
        for at in range(limit)
    )


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
    return _result([()] * len(batch.rows), decided, VerifyResult(scores, None, []))


def _result(
    sources: Sequence[tuple[DraftSource, ...]], decided: mx.array, verified: VerifyResult
) -> StepResult:
    rows = decided.tolist()
    return StepResult(
        sources=tuple(sources),
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
