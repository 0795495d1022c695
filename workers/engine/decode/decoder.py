"""Decode the rows of a lane in batches, one step at a time: draft, verify, accept, append.

Drafts come from the MTP head, from prompt lookup (`prompt_lookup.py`), and from a grammar that
forces the next tokens; `draft_length.py` decides for each row and step, and `acceptance.py` which
of them an answer takes.

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
    Tokens,
    begin_step,
    draft_sources,
    finish_step,
    read_step,
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


class _Drafts(NamedTuple):
    """What one step of a batch drafts, and what prompt lookup found for it."""

    plan: Plan
    runs: Sequence[Sequence[int]]
    """For each row the tokens of its run that it drafts; empty for the head, or nothing."""
    found: Sequence[Found | None]


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
        if not target.native_verify or graph is None:
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

    # --- rows come and go -------------------------------------------------------------------------

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
        preempted = min(self.rows, key=lambda row: (row.generation.exact, len(row.answer)))
        self.remove(lambda row: row is preempted)
        for batch in self._batches:
            batch.evaluate()  # without it the memory would stay in use until the next step
        return preempted

    def join(self, prefill: Prefill) -> Outcome:
        """Add a row whose prefill is complete and whose answer has at least one token."""
        row, token = prefill.row, prefill.row.answer[-1]
        if (head := self._head.usable) is None:
            self._head.disable_for(row)
        seed, outcome = None, Outcome()
        if head is not None and row.uses_head:
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

    def _batch_for(self, row: Row) -> Batch:
        if self._can_share(row):
            return self._shared_batches.setdefault(_batch_key(row), Batch(shared=True))
        batch = Batch(shared=self._target.explicit_positions)
        self._single.append(batch)
        return batch

    def _can_share(self, row: Row) -> bool:
        return self._shared and not row.suspect and not row.generation.exact

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

    # --- one step of a batch ----------------------------------------------------------------------

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
        if batch.has_head and self._head.usable is None:
            return self._requeue(batch, RuntimeError("The MTP head became unhealthy."))
        rows, had_backlog = list(batch.rows), bool(batch.backlog)
        opened, batch.opened = batch.opened, None
        if opened is not None:
            k, representative = opened.k, opened.representative
        else:
            k, representative = self._choose_k(batch)
        begun_s, drafts = self._clock(), _Drafts(Plan(k), [()] * len(rows), [None] * len(rows))
        try:
            drafts = self._plan(batch, drafts)
            step, tokens, unopened = self._compute(batch, opened, drafts, ahead=ahead)
        except Exception as error:  # noqa: BLE001  # it may be any row's: requeueing isolates it
            return self._fail(batch, error, k, drafts.runs if opened is None else ())
        outcome, fitted = self._append(rows, step, tokens, begun_s)
        self._observe_lookups(rows, tokens, drafts.found)
        plan = drafts.plan if opened is None else Plan(k)
        if opened is None:
            representative &= not (had_backlog and plan.head_tokens)
        # Else it also took a part of the next step, or the step before took one of this.
        representative &= (opened is None) == (batch.opened is None)
        duration_s = self._clock() - begun_s
        self._counters.record_decode(sum(map(len, tokens)) / len(rows), duration_s)
        if batch.has_head or any(row.lookup or row.matcher for row in rows):
            self._record_cost(step, plan.cost if representative else None, sum(fitted), duration_s)
        if batch.has_head:
            self._head.record_success()
            self._record_skipped(rows, k)
        for index, row in enumerate(rows):
            if row in outcome.finished and unopened is None:
                read = partial(self._state, batch, index, step, tokens[index], fitted[index])
                self._store(row, read)
        ended = [*outcome.finished, *outcome.failed]
        batch.select([i for i, row in enumerate(rows) if row not in ended])
        if unopened is not None:
            lost = self._fail(batch, *unopened)
            outcome.failed += lost.failed
            outcome.requeued += lost.requeued
            outcome.error = outcome.error or lost.error
        return outcome

    def _choose_k(self, batch: Batch) -> tuple[int, bool]:
        """Return the draft length of the next step, and whether its duration is representative.

        A step that begins an answer costs more for that reason alone: counting it would keep a lane
        from drafting where drafting pays. So does one in which the head reads its backlog.
        """
        if not batch.has_head:
            return 0, True
        count = len(batch.rows)
        fewest_steps = min(len(row.speculation.steps) for row in batch.rows)
        k = self._draft_length.choose(count, fewest_steps)
        return k, not self._draft_length.is_exploring(count, fewest_steps)

    def _plan(self, batch: Batch, drafts: _Drafts) -> _Drafts:
        """Decide what each row drafts: the tokens of the head, or some of its run."""
        rows, limit = batch.rows, self._run_limit
        if not (limit and batch.shared and any(row.lookup or row.matcher for row in rows)):
            return drafts
        runs: list[Run | None] = []
        found: list[Found | None] = []
        for row in rows:
            forced = row.forced_tokens()[:limit]
            run = Run(forced, len(forced)) if forced else None
            looked_up = row.look_up(limit)
            found.append(looked_up)
            if looked_up is not None and row.lookup is not None:
                agrees = list(forced) == list(looked_up.tokens[: len(forced)])
                if agrees and len(forced) < len(looked_up.tokens):
                    share = self._reliability.of(looked_up, row.lookup.counts)
                    run = Run(looked_up.tokens, len(forced), share)
            runs.append(run)
        fixed = [row.draft_tokens_fixed and row.draft_tokens > 0 for row in rows]
        plan = self._draft_length.plan(
            drafts.plan.head_tokens,
            [None if own else run for own, run in zip(fixed, runs, strict=True)],
        )
        drafted: list[Sequence[int]] = [()] * len(rows)
        for index, run in enumerate(runs):
            if run is not None and fixed[index]:
                drafted[index] = run.tokens[: rows[index].draft_tokens]
            elif run is not None and plan.uses_run[index]:
                drafted[index] = run.tokens[: plan.run_tokens]
        return _Drafts(plan, drafted, found)

    def _compute(
        self, batch: Batch, opened: OpenStep | None, drafts: _Drafts, *, ahead: bool
    ) -> tuple[OpenStep, Tokens, tuple[Exception, int] | None]:
        """Begin the next step unless it is open, finish and read it.

        If the step after it was to begin before this one is read, and failed, also return the error
        and its k.
        """
        graph = self._graph
        if graph is None or not batch.shared:
            return *run_uncompiled_step(batch, self._target), None
        if opened is None:
            opened = begin_step(batch, graph, drafts.plan.head_tokens, drafts.runs)
        decided, unopened = finish_step(batch, graph, opened), None
        if ahead and not any(drafts.runs) and self._may_go_ahead(batch, opened.tokens):
            k, representative = self._choose_k(batch)
            representative &= not (batch.backlog and k)
            try:
                batch.opened = begin_step(
                    batch, graph, k, representative=representative, unread_tokens=opened.tokens
                )
            except Exception as error:  # noqa: BLE001  # this step has its tokens
                unopened = error, k
        return opened, read_step(batch, opened, decided), unopened

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

    def _fail(
        self, batch: Batch, error: Exception, k: int, runs: Sequence[Sequence[int]] = ()
    ) -> Outcome:
        """Count the drafts of a step that failed, and requeue the rows of its batch."""
        if batch.has_head:
            self._head.record_error(error)
        for row, run in zip(batch.rows, runs or [()] * len(batch.rows), strict=True):
            limit = row.draft_limit(k) if row.uses_head else 0
            row.speculation.add_errors(draft_sources(len(run) or limit, run))
        return self._requeue(batch, error)

    def _append(
        self, rows: list[Row], step: OpenStep, tokens: Tokens, now_s: float
    ) -> tuple[Outcome, list[int]]:
        """Append its tokens to every row; return the rows that ended, and the tokens appended.

        An error while a row takes its tokens belongs to that row alone.
        """
        outcome, appended = Outcome(), [0] * len(rows)
        for index, (row, chosen, sources, scores) in enumerate(
            zip(rows, tokens, step.sources, step.scores, strict=True)
        ):
            try:
                logprobs = self.logprobs(row, scores, chosen)
                appended[index] = row.append_tokens(chosen, logprobs, sources, now_s=now_s)
            except Exception as error:  # noqa: BLE001  # one bad answer must not end the others
                outcome.failed.append(row)
                outcome.error = error
                continue
            if sources and set(sources) == {DraftSource.HEAD}:
                self._draft_length.observe_acceptance(len(sources), len(chosen) - 1)
            if row.finish_reason:
                outcome.finished.append(row)
        return outcome, appended

    def logprobs(
        self, row: Row, scores: mx.array, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of tokens, given their scores, if the row asks for any."""
        top = row.generation.top_logprobs
        return () if top is None else token_logprobs(scores, tokens, top, self._token_bytes)

    def _state(
        self, batch: Batch, index: int, step: OpenStep, tokens: Sequence[int], kept: int
    ) -> RowState:
        """Return the state of a row after the first `kept` of the tokens of the last step."""
        if batch.head_caches and batch.backlog and self._head.usable is not None:
            batch.read_backlog(self._head.usable)
        one = slice(index, index + 1)
        hidden = None if step.hidden is None else step.hidden[one, kept - 1 : kept]
        end = batch.rows[index].context_tokens
        state = state_of(batch.caches, batch.head_caches, hidden, index, end)
        if kept == len(tokens):
            return state
        # The answer ended inside a draft, and the caches of the batch have read on.
        recurrent = [
            [
                state_after(tuple(part[one] for part in slot), mx.array([kept]), step.tokens)
                for slot in layer
            ]
            for layer in step.recurrent
        ]
        return state._replace(recurrent=recurrent)

    def _observe_lookups(
        self, rows: list[Row], tokens: Tokens, found: Sequence[Found | None]
    ) -> None:
        """Compare what was looked up, whether drafted or not, with the tokens that came."""
        for row, chosen, looked_up in zip(rows, tokens, found, strict=True):
            if looked_up is not None and row.lookup is not None:
                self._reliability.observe(looked_up, chosen, row.lookup.counts)

    def _record_skipped(self, rows: list[Row], k: int) -> None:
        """Record for each row whether a step drafted nothing since drafts do not pay."""
        if k == 0 and self._draft_length.best(len(rows)) == 0:
            for row in rows:
                row.drafting_skipped = True

    def _record_cost(
        self, step: OpenStep, planned: tuple[int, int] | None, appended: int, duration_s: float
    ) -> None:
        """Record the cost of a step, including that of appending its tokens.

        `planned` has the tokens that the head drafts and those that are verified; None if the cost
        is not representative. A step in which rows have draft lengths of their own is no sample
        either. A drafted step saves the difference to the plain steps that it replaced.
        """
        policy, drafted = self._draft_length, [len(sources) for sources in step.sources]
        rows = len(drafted)
        if planned is not None and max(drafted) == planned[1]:
            policy.observe_cost(rows, planned[1], duration_s, head_tokens=planned[0])
            by_rows = [policy.best(size) for size in range(1, self._counters.slots + 1)]
            self._counters.set_drafts(by_rows, rows, policy.speedup(rows))
        plain_s = policy.plain_step_s(rows)
        if plain_s is not None and any(drafted):
            self._counters.record_decode_saving(plain_s * appended / rows - duration_s)


def _batch_key(row: Row) -> tuple[bool, bool, int]:
    return row.draft_tokens > 0, row.uses_head, size_class(row.slots_used)


def check_device(target: Target) -> None:
    """Compute one token; raise if even that fails, since then the engine can serve nothing."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    mx.eval(target.scores(target.forward(token, target.new_caches(), token)))
