"""Decode the rows of an engine in batches, one step at a time: draft, verify, accept, append.

Drafts come from the MTP head, from prompt lookup (`prompt_lookup.py`), and from a grammar that
forces the next tokens; `draft_length.py` decides for each row and step, and `step_graph.py` which
of them an answer takes.

Rows of all lanes share batches, since a step costs little more for more rows. But rows of the head,
rows that draft without it, and rows that do not draft form separate batches: a verify costs more
than a plain step, and a row that gains nothing from it must not pay for it. So do rows of different
size classes (`batch.py`). A row whose answer must be exact has a batch of its own: how kernels
round depends on the shape of a batch.

An error in a step does not name its row, and invalidates every cache of the batch. All rows of the
batch are requeued for a new prefill and degrade by one level: from the head to lookup, from drafts
to plain steps, from there to a batch of their own. A row that fails alone in its batch is the
cause, and ends with the error. An allocation that fails degrades nothing: the scheduler makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from paceline.protocol import DraftSource
from workers.engine.decode.batch import Batch, Drafts, OpenStep, size_class
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
from workers.engine.types import LaneName, TokenLogprob

Store = Callable[[Row, Callable[[], RowState]], None]
"""Takes a row, and a function that returns its state."""


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
    """All decoding rows of an engine; used by the engine thread only."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        *,
        draft_tokens: int,
        clock: Callable[[], float],
        graph: StepGraph | None = None,
    ) -> None:
        """Create a decoder without lanes.

        Without a graph it creates one, if rows can share a pass.
        """
        self._counters: dict[LaneName, LaneCounters] = {}
        self._stores: dict[LaneName, Store] = {}
        self._target = target = checkpoint.target
        self.head = head = DraftHead(checkpoint.head if draft_tokens else None, self._counters)
        # A graph needs rows that share a pass, or positions that no cache has to know.
        if graph is None and (target.explicit_positions or target.supports_batching):
            graph = StepGraph(target, head.usable)
        self._graph = graph
        self._token_bytes = prompts.raw
        # A verify of recurrent layers takes more memory for each token, which is counted for the
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
        self._last: OpenStep | None = None
        """The step that was begun last, until it is read; the device computes it last."""
        # A family whose caches cannot hold rows of different lengths decodes row by row, and so
        # does a suspect row: both in the family's own caches, which a compiled step cannot take.
        self._shared = target.supports_batching
        self._shared_batches: dict[tuple[bool, bool, int], Batch] = {}
        """By whether their rows draft, and with the head, and by their size class."""
        self._single: list[Batch] = []

    def add_lane(self, name: LaneName, counters: LaneCounters, store: Store) -> None:
        """Add a lane; its `store` gets the state of each of its rows whose answer has ended."""
        self._counters[name], self._stores[name] = counters, store

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

    def preempt(self, lane: LaneName) -> Row:
        """Remove and return the row of a lane with the shortest answer, to free its memory now.

        A row whose answer is exact is the last resort: it is decoded again.
        """
        rows = (row for row in self.rows if row.generation.lane is lane)
        preempted = min(rows, key=lambda row: (row.generation.exact, len(row.answer)))
        self.remove(lambda row: row is preempted)
        for batch in self._batches:
            batch.evaluate()  # without it the memory would stay in use until the next step
        return preempted

    def join(self, prefill: Prefill) -> Outcome:
        """Add a row whose prefill is complete and whose answer has at least one token."""
        row, token = prefill.row, prefill.row.answer[-1]
        if (head := self.head.usable) is None:
            self.head.disable_for(row)
        seed, outcome = None, Outcome()
        if head is not None and row.uses_head:
            drafting = self._batch_for(row)
            try:  # the row can join once the head has read the backlog of the others
                drafting.read_backlog(head)
            except Exception as error:  # noqa: BLE001  # only the head's caches are lost
                self.head.record_error(error)
                outcome = self._requeue(drafting, error)
            try:
                seed = seed_head(prefill, head, token)
            except Exception as error:  # noqa: BLE001  # the target needs no head to go on
                self.head.record_error(error)
                self.head.disable_for(row)
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
                self.head.disable_for(row)
            else:
                row.draft_tokens = 0
        return Outcome(failed=failed, requeued=requeued, error=error)

    # --- one step of a batch ----------------------------------------------------------------------

    @property
    def begun(self) -> list[bool]:
        """Return, for each batch, whether its next step has begun."""
        return [batch.opened is not None for batch in self._batches if batch.rows]

    def step(self, *, ahead: bool = False, reading: bool = False) -> Iterator[Outcome]:
        """Advance every row by one step, batch by batch.

        With `ahead`, the next step of each batch begins before this one is read, or else as soon as
        its rows have their tokens: while the host reads one batch, the device computes another.
        `reading` says that the device reads prompts between the steps, so that a duration is only
        that of a step if nothing has begun before it.
        """
        for batch in self._batches:
            if batch.rows:
                yield self._step(batch, ahead=ahead, reading=reading)
        self._single = [batch for batch in self._single if batch.rows]

    def finish_open_steps(self) -> Iterator[Outcome]:
        """Finish the steps that have begun, so that rows can join and nothing else is computed."""
        for batch in self._batches:
            if batch.opened is not None:
                yield self._step(batch, ahead=False)
        self._last = None

    def _step(self, batch: Batch, *, ahead: bool, reading: bool = False) -> Outcome:
        if batch.has_head and self.head.usable is None:
            return self._requeue(batch, RuntimeError("The MTP head became unhealthy."))
        rows, has_head, was_open = list(batch.rows), batch.has_head, batch.opened is not None
        last = self._last if self._last is not batch.opened else None
        others = last is not None or reading
        if others and not was_open:
            mx.synchronize()  # so that the device computes this step alone, and its cost shows
        begun_s = self._clock()
        if not was_open and (unbegun := self._begin(batch)) is not None:
            return self._fail(batch, *unbegun)
        planned = batch.opened.planned if batch.opened else Drafts(Plan(0))
        try:
            step, tokens, found, unbegun = self._compute(
                batch, ahead=ahead and (was_open or not others), others=others
            )
        except Exception as error:  # noqa: BLE001  # it may be any row's: requeueing isolates it
            return self._fail(batch, error, planned)
        queued = batch.opened is not None or (last is not None and was_open)
        alone = not was_open and batch.opened is None
        outcome, appended = self._append(rows, step, tokens, begun_s)
        elapsed_s = self._clock() - begun_s if alone else 0.0
        self._observe_lookups(rows, tokens, found)
        if has_head and not step.head_length:
            self._draft_length.forget([row.head_accepted for row in rows])
        if unbegun is None:
            self._store(batch, outcome.finished, step, tokens, appended)
        ended = [*outcome.finished, *outcome.failed]
        batch.select([i for i, row in enumerate(rows) if row not in ended])
        if ahead and batch.rows and batch.opened is None and unbegun is None:
            unbegun = self._begin(batch, others=others and was_open)
        if unbegun is not None:
            lost = self._fail(batch, *unbegun)
            outcome.failed += lost.failed
            outcome.requeued += lost.requeued
            outcome.error = outcome.error or lost.error
        if not alone:
            elapsed_s = self._clock() - begun_s
            alone = not others and was_open and batch.opened is not None
        self._last = batch.opened or last
        self._record(rows, step, tokens, appended, elapsed_s, alone=alone, ahead=queued)
        if step.head_length:
            self.head.record_success()
        return outcome

    def _begin(
        self, batch: Batch, unread_tokens: int = 0, *, others: bool = False
    ) -> tuple[Exception, Drafts] | None:
        """Begin the next step of a batch; if it fails, return the error and its planned drafts.

        A step that begins before the last one is read drafts no runs: what they go on from is not
        known yet. Nothing begins where no graph computes a family, nor if the device computes
        other batches and the cost of this step is to be measured.
        """
        if self._graph is None or not batch.shared:
            return None
        rows, (k, representative) = batch.rows, self._choose_k(batch)
        planned = Drafts(Plan(k))
        try:
            if not unread_tokens:
                planned = self._plan(batch, planned)
            representative &= not (batch.backlog and planned.plan.head_tokens)
            drafts = batch.has_head or any(row.lookup or row.matcher for row in rows)
            sample = others and drafts and representative
            if sample and self._draft_length.wants_sample(len(rows), planned.plan):
                return None
            representative &= drafts
            planned = planned._replace(representative=representative)
            batch.opened = begin_step(batch, self._graph, planned, unread_tokens=unread_tokens)
        except Exception as error:  # noqa: BLE001  # the caller requeues the rows
            return error, planned
        if batch.has_head and k == 0 and self._draft_length.best(len(rows)) == 0:
            for row in rows:
                row.drafting_skipped = True
        return None

    def _compute(
        self, batch: Batch, *, ahead: bool, others: bool
    ) -> tuple[OpenStep, Tokens, Sequence[Found | None], tuple[Exception, Drafts] | None]:
        """Finish and read the open step of a batch, and begin the one after it if it may.

        Returns the step, its tokens, what was looked up for it, whether it was drafted or not, and
        what `_begin` returns.
        """
        step, batch.opened = batch.opened, None
        if self._graph is None or step is None:
            return *run_uncompiled_step(batch, self._target), (), None
        unbegun, seen = None, step.planned
        if not seen.found:  # the step began before the tokens that a run goes on from were known
            seen = self._plan(batch, seen)
        decided = finish_step(batch, self._graph, step)
        if ahead and not any(seen.runs) and self._may_go_ahead(batch, step.tokens):
            unbegun = self._begin(batch, step.tokens, others=others)
        return step, read_step(batch, step, decided), seen.found, unbegun

    def _choose_k(self, batch: Batch) -> tuple[int, bool]:
        """Return the draft length of the next step, and whether its duration is representative.

        A step that begins an answer costs more for that reason alone: counting it would keep a lane
        from drafting where drafting pays. So does one in which the head reads its backlog.
        """
        if not batch.has_head:
            return 0, True
        fewest_steps = min(len(row.speculation.steps) for row in batch.rows)
        k = self._draft_length.choose([row.head_accepted for row in batch.rows], fewest_steps)
        return k, not self._draft_length.is_exploring(len(batch.rows), fewest_steps)

    def _plan(self, batch: Batch, planned: Drafts) -> Drafts:
        """Choose the drafts of each row: the tokens of the head, or some of its run."""
        rows, limit = batch.rows, self._run_limit
        if not (limit and any(row.lookup or row.matcher for row in rows)):
            return planned
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
            planned.plan.head_tokens,
            [None if own else run for own, run in zip(fixed, runs, strict=True)],
            [row.head_accepted for row in rows],
        )
        drafted: list[Sequence[int]] = [()] * len(rows)
        for index, run in enumerate(runs):
            if run is not None and fixed[index]:
                drafted[index] = run.tokens[: rows[index].draft_tokens]
            elif run is not None and plan.uses_run[index]:
                drafted[index] = run.tokens[: plan.run_tokens]
        return planned._replace(plan=plan, runs=drafted, found=found)

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

    def _fail(self, batch: Batch, error: Exception, planned: Drafts) -> Outcome:
        """Count the drafts of a step that failed, and requeue the rows of its batch."""
        if batch.has_head:
            self.head.record_error(error)
        runs = planned.runs or [()] * len(batch.rows)
        for row, limit, run in zip(batch.rows, planned.limits(batch.rows), runs, strict=True):
            row.speculation.add_errors(draft_sources(limit, run))
        return self._requeue(batch, error)

    def _append(
        self, rows: list[Row], step: OpenStep, tokens: Tokens, now_s: float
    ) -> tuple[Outcome, list[int]]:
        """Append its tokens to every row; return the rows that ended, and the tokens appended.

        An error while a row takes its tokens ends only that row.
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
                self._draft_length.observe_acceptance(
                    len(sources), len(chosen) - 1, row.head_accepted
                )
            if row.finish_reason:
                outcome.finished.append(row)
        return outcome, appended

    def logprobs(
        self, row: Row, scores: mx.array, tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of tokens, given their scores, if the row asks for any."""
        top = row.generation.top_logprobs
        return () if top is None else token_logprobs(scores, tokens, top, self._token_bytes)

    def _store(
        self,
        batch: Batch,
        finished: Sequence[Row],
        step: OpenStep,
        tokens: Tokens,
        appended: Sequence[int],
    ) -> None:
        for index, row in enumerate(batch.rows):
            if row in finished:
                read = partial(self._state, batch, index, step, tokens[index], appended[index])
                self._stores[row.generation.lane](row, read)

    def _state(
        self, batch: Batch, index: int, step: OpenStep, tokens: Sequence[int], kept: int
    ) -> RowState:
        """Return the state of a row after the first `kept` of the tokens of the last step."""
        if batch.head_caches and batch.backlog and self.head.usable is not None:
            batch.read_backlog(self.head.usable)
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
        """Compare the looked-up tokens, whether drafted or not, with the generated ones."""
        for row, chosen, looked_up in zip(rows, tokens, found or [None] * len(rows), strict=True):
            if looked_up is not None and row.lookup is not None:
                self._reliability.observe(looked_up, chosen, row.lookup.counts)

    def _record(
        self,
        rows: list[Row],
        step: OpenStep,
        tokens: Tokens,
        appended: Sequence[int],
        elapsed_s: float,
        *,
        alone: bool,
        ahead: bool,
    ) -> None:
        """Record the duration of a step, which includes that of appending its tokens.

        Only of a step that the device computed alone it is the cost. A drafted step saves the
        difference to the plain steps that it replaced. `ahead` is whether the device computed
        another one while this was read.
        """
        policy, drafted = self._draft_length, [len(sources) for sources in step.sources]
        size, cost, cost_s = len(drafted), step.planned.plan.cost, elapsed_s
        # A step in which rows have draft lengths of their own is no sample.
        if alone and step.planned.representative and max(drafted) == cost[1]:
            policy.observe_cost(size, cost[1], elapsed_s, head_tokens=cost[0])
            for counters in self._counters.values():
                by_rows = [policy.best(count) for count in range(1, counters.slots + 1)]
                counters.set_drafts(by_rows, size, policy.speedup(size))
        elif step.planned.representative:
            policy.skip_cost()
        if ahead and not alone:
            cost_s = policy.cost_s(size, *cost) or elapsed_s
        plain_s = policy.cost_s(size, 0, 0)
        for lane, counters in self._counters.items():
            own = [at for at, row in enumerate(rows) if row.generation.lane is lane]
            if not own:
                continue
            each = sum(len(tokens[at]) for at in own) / len(own)
            counters.record_decode(each, elapsed_s, ahead=ahead)
            if plain_s is not None and any(drafted):
                replaced_s = plain_s * sum(appended[at] for at in own)
                counters.record_decode_saving((replaced_s - cost_s * len(own)) / size)


def _batch_key(row: Row) -> tuple[bool, bool, int]:
    return row.draft_tokens > 0, row.uses_head, size_class(row.slots_used)


def check_device(target: Target) -> None:
    """Compute one token; raise if even that fails, since then the engine can serve nothing."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    mx.eval(target.scores(target.forward(token, target.new_caches(), token)))
