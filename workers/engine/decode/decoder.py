"""Decode the rows of a lane in batches, one step at a time: draft, verify, accept, append.

Speculative decoding by match (Leviathan et al. 2023, arXiv 2211.17192, for a draft of the likeliest
tokens): the target chooses a token at every position by the row's own sampling rules, and accepts a
drafted token where it equals that choice. Every row therefore gets the tokens that it would get
without speculation, whatever its sampler and whatever rows share its batch; kernels round scores in
their last bits by the shape of the batch, so two tokens may change places that are as likely.

Drafts come from the MTP head, from prompt lookup (`prompt_lookup.py`), and from a grammar that
forces the next tokens; `draft_length.py` decides for each row and step.

Rows of the head, rows that draft without it, and rows that do not draft form separate batches: a
verify costs more than a plain step, and a row that gains nothing from it must not pay for it. So do
rows of different size classes (`batch.py`). A row whose answer must be exact has a batch of its
own: how kernels round depends on the shape of a batch.

An error in a step does not name its row, and invalidates every cache of the batch. All rows of the
batch are requeued for a new prefill and degrade by one level: from the head to lookup, from drafts
to plain steps, from there to a batch of their own. A row that fails alone in its batch is the
cause, and ends with the error. An allocation that fails degrades nothing: the scheduler makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from paceline.protocol import DraftSource
from workers.engine.decode.batch import Batch, OpenStep, size_class
from workers.engine.decode.draft_head import DraftHead
from workers.engine.decode.draft_length import RUN_LENGTHS, DraftLength, Plan, Run
from workers.engine.decode.memory_pressure import is_out_of_memory
from workers.engine.decode.metrics import LaneCounters
from workers.engine.decode.prefill import Prefill, seed_head
from workers.engine.decode.prompt_lookup import Found, Reliability
from workers.engine.decode.row import Row
from workers.engine.decode.sampler import token_logprobs
from workers.engine.decode.step import (
    StepResult,
    begin_step,
    draft_sources,
    finish_step,
    run_uncompiled_step,
)
from workers.engine.decode.step_graph import StepGraph
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.kv_cache import STEP_TOKENS, state_after
from workers.engine.model.target import Target
from workers.engine.prefix.tree import RowState, state_of
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import TokenLogprob


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
        graph: StepGraph | None = None,
    ) -> None:
        """Create a decoder; it calls `store` with the state of each row whose answer has ended.

        Without a graph it creates one, if rows can share a pass.
        """
        self._store = store
        self._target = target = checkpoint.target
        self._head = head
        # A graph needs rows that share a pass, or positions that no cache has to know.
        if graph is None and (target.explicit_positions or target.supports_batching):
            graph = StepGraph(target, head.usable)
        self._graph = graph
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

    def remove(self, unwanted: Callable[[Row], bool]) -> list[Row]:
        """Remove and return the rows that are not wanted any more."""
        removed = [row for row in self.rows if unwanted(row)]
        for batch in self._batches:
            batch.select([i for i, row in enumerate(batch.rows) if row not in removed])
        return removed

    def preempt(self) -> Row:
        """Remove and return the row with the shortest answer, to free its memory now.

        A row whose answer is exact is the last resort: it cannot go on.
        """
        preempted = min(self.rows, key=lambda row: (row.exact, len(row.answer)))
        self.remove(lambda row: row is preempted)
        for batch in self._batches:
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

    def step(self, *, ahead: bool = False) -> Iterator[Outcome]:
        """Advance every row by one step, batch by batch.

        With `ahead`, the next step of a batch that is alone begins before this one is read.
        """
        batches = [batch for batch in self._batches if batch.rows]
        for batch in batches:
            yield self._step(batch, ahead=ahead and len(batches) == 1)
        self._single = [batch for batch in self._single if batch.rows]

    def finish_open_steps(self) -> Iterator[Outcome]:
        """Finish the steps that have begun, so that rows can join and nothing else is computed."""
        for batch in self._batches:
            if batch.opened is not None:
                yield self._step(batch, ahead=False)

    def _step(self, batch: Batch, *, ahead: bool) -> Outcome:
        rows = list(batch.rows)
        with_head = any(row.uses_head for row in rows)
        if with_head and self._head.usable is None:
            return self._requeue(batch, RuntimeError("The MTP head became unhealthy."))
        opened, batch.opened = batch.opened, None
        backlog = bool(batch.backlog)
        if opened is not None:
            k, representative = opened.k, opened.representative
        else:
            k, representative = self._choose_k(batch) if with_head else (0, True)
        begun_s = self._clock()
        drafts = _Drafts.of_head(k, len(rows))
        try:
            drafts = self._plan(batch, k) if self._graph and batch.shared else drafts
            result, unopened = self._compute(batch, opened, drafts, ahead=ahead)
        except Exception as error:  # noqa: BLE001  # it may be any row's: requeueing isolates it
            if with_head:
                self._head.record_error(error)
            _add_errors(rows, k, drafts.runs if opened is None else ())
            return self._requeue(batch, error)
        outcome, fitted = self._append(rows, result, begun_s)
        self._observe_lookups(rows, result, drafts.found)
        if opened is None:
            representative &= not (backlog and drafts.plan.head_tokens)
        # Else it also took a part of the next step, or the step before took one of this.
        representative &= (opened is None) == (batch.opened is None)
        appended = sum(fitted)
        duration_s = self._clock() - begun_s
        self._counters.record_decode(sum(map(len, result.tokens)) / len(rows), duration_s)
        if with_head or any(row.lookup or row.matcher for row in rows):
            plan = drafts.plan if opened is None else Plan(k)
            self._record_cost(result, plan.cost if representative else None, appended, duration_s)
        if with_head:
            self._head.record_success()
            self._record_skipped(rows, k)
        for index, row in enumerate(rows):
            if row in outcome.finished and unopened is None:
                self._store(row, partial(self._state, batch, index, result, fitted[index]))
        ended = [*outcome.finished, *outcome.failed]
        batch.select([i for i, row in enumerate(rows) if row not in ended])
        return outcome if unopened is None else self._requeue_ahead(batch, unopened, outcome)

    def _compute(
        self, batch: Batch, opened: OpenStep | None, drafts: _Drafts, *, ahead: bool
    ) -> tuple[StepResult, _Unopened | None]:
        """Begin the next step unless it is open, finish and read it.

        Also return the step after it if that was to begin before this one is read, and failed.
        """
        if self._graph is None or not batch.shared:
            return run_uncompiled_step(batch, self._target), None
        if opened is None:
            opened = begin_step(batch, self._graph, drafts.plan.head_tokens, drafts.runs)
        choice, unopened = finish_step(batch, self._graph, opened), None
        if ahead and not any(drafts.runs) and self._may_go_ahead(batch, opened.tokens):
            unopened = self._begin_ahead(batch, self._graph, opened.tokens)
        return choice.read(batch), unopened

    def _may_go_ahead(self, batch: Batch, unread_tokens: int) -> bool:
        """Return whether the next step can begin before the tokens of this one are read.

        Not near the limit of an answer, nor where rules over the next tokens change a draft.
        """
        longest = max(row.draft_tokens for row in batch.rows) if batch.has_head else 0
        if unread_tokens + longest + 1 > STEP_TOKENS:
            return False
        return all(
            row.max_tokens - len(row.answer) - unread_tokens > longest
            and not (longest and row.token_rules(unread_tokens + longest))
            for row in batch.rows
        )

    def _begin_ahead(self, batch: Batch, graph: StepGraph, unread_tokens: int) -> _Unopened | None:
        """Begin the step after one of which up to `unread_tokens` tokens are not read yet."""
        with_head = any(row.uses_head for row in batch.rows)
        k, representative = self._choose_k(batch) if with_head else (0, True)
        representative &= not (batch.backlog and k)
        try:
            opened = begin_step(
                batch, graph, k, representative=representative, unread_tokens=unread_tokens
            )
            opened.compute(batch)
        except Exception as error:  # noqa: BLE001  # the step before has its tokens
            return _Unopened(error, k)
        batch.opened = opened
        return None

    def _requeue_ahead(self, batch: Batch, unopened: _Unopened, outcome: Outcome) -> Outcome:
        """Requeue the rows of a batch whose next step could not begin."""
        error, k = unopened
        if any(row.uses_head for row in batch.rows):
            self._head.record_error(error)
        _add_errors(batch.rows, k)
        requeued = self._requeue(batch, error)
        outcome.failed += requeued.failed
        outcome.requeued += requeued.requeued
        outcome.error = outcome.error or error
        return outcome

    def _plan(self, batch: Batch, k: int) -> _Drafts:
        """Decide what each row drafts: k tokens of the head, or some of its run."""
        rows = batch.rows
        if not self._run_limit or not any(row.lookup or row.matcher for row in rows):
            return _Drafts.of_head(k, len(rows))
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

        A step that begins an answer costs more for that reason alone: counting it would keep a lane
        from drafting where drafting pays. So does one in which the head reads its backlog.
        """
        count = len(batch.rows)
        fewest_steps = min(len(row.speculation.steps) for row in batch.rows)
        k = self._draft_length.choose(count, fewest_steps)
        return k, not self._draft_length.is_exploring(count, fewest_steps)

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
        length, kept = result.scores.shape[1], mx.array([tokens])
        recurrent = [
            [state_after(tuple(part[one] for part in slot), kept, length) for slot in layer]
            for layer in result.recurrent
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
            self._counters.set_draft_speedup(rows, self._draft_length.speedup(rows))
        plain_s = self._draft_length.plain_step_s(rows)
        if plain_s is not None and any(drafted):
            self._counters.record_decode_saving(plain_s * appended / rows - duration_s)

    def _requeue(self, batch: Batch, error: Exception) -> Outcome:
        """Empty a batch whose caches are invalid; requeue its rows degraded, fail a suspect one."""
        rows = list(batch.rows)
        batch.clear()
        if is_out_of_memory(error):
            return Outcome(requeued=rows, error=error)  # no row is to blame
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
        return self._shared and not row.suspect and not row.exact

    def _logprobs(
        self, row: Row, scores: mx.array, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        top = row.generation.top_logprobs
        return () if top is None else token_logprobs(scores, tokens, top, self._token_bytes)


def _batch_key(row: Row) -> tuple[bool, bool, int]:
    return row.draft_tokens > 0, row.uses_head, size_class(row.slots_used)


def _add_errors(rows: list[Row], k: int, runs: Sequence[Sequence[int]] = ()) -> None:
    """Count the drafts of a step that failed."""
    runs = runs or [()] * len(rows)
    for row, run in zip(rows, runs, strict=True):
        limit = row.draft_limit(k) if row.uses_head else 0
        row.speculation.add_errors(draft_sources(len(run) or limit, run))


class _Unopened(NamedTuple):
    """A step that could not begin."""

    error: Exception
    k: int
    """Draft length that the lane had chosen for the head."""


class _Drafts(NamedTuple):
    """What one step of a batch drafts, and what prompt lookup found for it."""

    plan: Plan
    runs: Sequence[Sequence[int]]
    """For each row the tokens of its run that it drafts; empty for the head, or nothing."""
    found: Sequence[Found | None]

    @classmethod
    def of_head(cls, k: int, rows: int) -> _Drafts:
        """Return the drafts of a step in which no row has a run."""
        return cls(Plan(k), [()] * rows, [None] * rows)


def check_device(target: Target) -> None:
    """Compute one token; raise if even that fails, since then the engine can serve nothing."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    mx.eval(target.scores(target.forward(token, target.new_caches(), token)))
