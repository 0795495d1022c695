"""One step of a batch: begin it with draft and verify, finish it with the choice of its tokens.

A step may begin before the host has read the step before it: the tokens to verify, the cursors and
the head's state are on the device already. The device then works while the host reads and sends the
tokens of the step before. A step is finished by the host's knowledge of each row: where its grammar
stands, which tokens are penalised, which random key is next.

Until a step is finished, caches have the keys and values that it has written behind their cursors,
and recurrent states are those before it. So a row that turns out to have ended leaves the batch,
and nothing of it is in any count or cache but one row of a pass that was in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from paceline.protocol import DraftSource
from workers.engine.decode.batch import Batch, OpenStep, Unread, set_states, states_of
from workers.engine.decode.sampler import choose
from workers.engine.decode.step_graph import Layers, StepGraph
from workers.engine.model.target import Target
from workers.engine.text.grammar import allowed_tokens, given_drafts

MAX_BACKLOG_STEPS = 32
"""Backlog at which the head reads it even though it drafts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens that one step of a batch decided, row by row."""

    sources: Sequence[tuple[DraftSource, ...]]
    """Where each verified draft token comes from."""
    tokens: Sequence[tuple[int, ...]]
    """The accepted draft tokens, then the one token that the target adds."""
    scores: mx.array
    """[rows, L, vocabulary]: the scores behind every token, for log-probabilities."""
    hidden: mx.array | None = None
    """[rows, L, width]: the hidden states of the tokens that the step has read."""
    recurrent: Layers = field(default_factory=list)
    """Recurrent layers of the verify, with their histories where L > 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tokens of a step, which the device may not have computed yet."""

    decided: mx.array
    """[rows, 1 + L]: the number of accepted drafts, then the choices."""
    step: OpenStep
    unread: bool = False
    """Whether the last step of the batch's backlog has no counts yet."""

    def read(self, batch: Batch) -> StepResult:
        """Wait for the tokens."""
        rows = self.decided.tolist()
        # An accepted draft token is the target's own choice, so the choices are the answer.
        tokens = [tuple(row[1 : row[0] + 2]) for row in rows]
        if self.unread:
            counts = [len(each) for each in tokens]
            batch.backlog[-1] = batch.backlog[-1]._replace(counts=counts)
        step = self.step
        return StepResult(
            sources=step.sources,
            tokens=tokens,
            scores=step.scores,
            hidden=step.hidden,
            recurrent=step.recurrent,
        )


def begin_step(
    batch: Batch,
    graph: StepGraph,
    k: int,
    runs: Sequence[Sequence[int]] = (),
    *,
    representative: bool = True,
    unread_tokens: int = 0,
) -> OpenStep:
    """Draft and verify up to k tokens of every row, or its fixed draft length.

    `runs` has for each row the tokens that it drafts instead of asking the head. The step before
    has chosen up to `unread_tokens` tokens that the answers of the rows do not have yet.
    """
    runs = runs or [()] * len(batch.rows)
    wanted = [row.draft_limit(k) if batch.has_head else 0 for row in batch.rows]
    wanted = [0 if run else limit for limit, run in zip(wanted, runs, strict=True)]
    head_length = max(wanted)
    limits = [len(run) or limit for limit, run in zip(wanted, runs, strict=True)]
    length = max(limits)
    rules = [row.token_rules(length) if length else None for row in batch.rows]
    forced = [() if one is None else one.forced() for one in rules]
    given = [_given(run, own, length) for run, own in zip(runs, forced, strict=True)]
    batch.reserve(length + 1 + unread_tokens)
    if graph.head is not None and (head_length or len(batch.backlog) >= MAX_BACKLOG_STEPS):
        batch.read_backlog(graph.head, unread_tokens)
    drafts = _draft(batch, graph, head_length, given)
    verified = graph.verify(
        mx.concatenate([batch.last_tokens[:, None], drafts], axis=1),
        states_of(batch.caches),
        batch.offset,
        batch.position_shift,
    )
    # The caches must not hold the old keys meanwhile, or MLX would copy all of them.
    set_states(batch.caches, graph.attention_state(verified.layers, batch.caches))
    return OpenStep(
        k=k,
        representative=representative,
        drafts=drafts,
        limits=limits,
        head_length=head_length,
        sources=[
            draft_sources(limit, run, own)
            for limit, run, own in zip(limits, runs, forced, strict=True)
        ],
        scores=verified.scores,
        hidden=verified.hidden,
        recurrent=graph.recurrent_layers(verified.layers),
    )


def finish_step(batch: Batch, graph: StepGraph, step: OpenStep) -> Choice:
    """Choose the tokens of a step, accept drafts and roll back; the device may still compute."""
    drafts, length = step.drafts, step.tokens - 1
    rules = [row.token_rules(length) for row in batch.rows]
    allowed = None
    if any(rules):
        # The device verifies while the host reads the drafts and finds the tokens allowed after
        # each.
        mx.async_eval(step.scores)
        allowed = allowed_tokens(rules, step.scores.shape[-1], drafts)
    contexts = [row.sampling_context() for row in batch.rows]
    chosen = choose(step.scores, contexts, drafts, allowed)
    layers = graph.all_layers(batch.caches, step.recurrent)
    offset, drafted = batch.offset, (drafts, mx.array(step.limits))
    if step.head_length and batch.head_caches:
        assert step.hidden is not None
        committed = graph.commit(
            layers, step.hidden, chosen, drafted, (states_of(batch.head_caches), offset)
        )
        accepted, batch.last_tokens, state, head_state, batch.seed_hidden = committed
        set_states(batch.caches, state)
        set_states(batch.head_caches, head_state)
    elif length:
        accepted, batch.last_tokens, state = graph.settle(layers, chosen, drafted)
        set_states(batch.caches, state)
    else:
        accepted = mx.zeros((len(batch.rows),), dtype=mx.int32)
        batch.last_tokens = chosen[:, 0]
        set_states(batch.caches, [tuple(layer) for layer in layers])
    unread = bool(batch.head_caches) and not step.head_length
    if batch.has_head and not batch.head_caches:  # the head goes on from the target's own states
        assert step.hidden is not None
        batch.seed_hidden = mx.take_along_axis(step.hidden, accepted[:, None, None], axis=1)
    if unread:
        assert step.hidden is not None
        batch.backlog.append(Unread(chosen, step.hidden, [1] * len(batch.rows)))
    decided = mx.concatenate([accepted[:, None], chosen], axis=1)
    mx.async_eval(decided)
    batch.set_offset(offset + accepted + 1)
    batch.evaluate_async()
    return Choice(decided=decided, step=step, unread=unread and length > 0)


def _draft(
    batch: Batch, graph: StepGraph, head_length: int, given: Sequence[Sequence[int]]
) -> mx.array:
    """Return the drafts [rows, k], of which k tokens are given or -1."""
    drafts = mx.zeros((len(given), 0), dtype=mx.int32)
    if head_length:
        assert batch.seed_hidden is not None
        assert graph.head is not None
        drafts, head_state = graph.draft(
            (batch.seed_hidden, batch.last_tokens, batch.further_tokens(graph.head.shortlist)),
            states_of(batch.head_caches),
            graph.attended_state(batch.caches),
            batch.offset,
            head_length,
        )
        set_states(batch.head_caches, head_state)
    if length := len(given[0]):
        drafts = given_drafts(given, mx.pad(drafts, ((0, 0), (0, length - head_length))))
        mx.async_eval(drafts)  # the device drafts while the host describes the verify
    return drafts


def _given(run: Sequence[int], forced: Sequence[int], length: int) -> list[int]:
    """Return the tokens of a draft that are not the head's; -1 in place of one of those."""
    tokens = [*run, *[-1] * (length - len(run))][:length]
    for at, token in enumerate(forced[:length]):
        tokens[at] = token if token >= 0 else tokens[at]
    return tokens


def draft_sources(
    limit: int, run: Sequence[int], forced: Sequence[int] = ()
) -> tuple[DraftSource, ...]:
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
    mx.async_eval(chosen)
    batch.evaluate_async()
    tokens = [tuple(row) for row in chosen.tolist()]
    return StepResult(sources=[()] * len(tokens), tokens=tokens, scores=scores)
