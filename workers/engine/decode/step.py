"""One step of a batch: begin it with draft and verify, finish it with the choice of its tokens.

A step may begin before the host has read the step before it: the tokens to verify, the cursors and
the head's state are on the device already. The device then works while the host reads and sends the
tokens of the step before. A step is finished by the host's knowledge of each row: where its grammar
stands, which tokens are penalised, which random key is next.

Until a step is finished, caches have the keys and values that it has written behind their cursors,
and recurrent states are those before it. So a row that turns out to have ended leaves the batch,
and nothing of it is in any count or cache but one row of a pass that was in vain.
"""

from collections.abc import Sequence

import mlx.core as mx

from paceline.protocol import DraftSource
from workers.engine.decode.batch import Batch, Drafts, OpenStep, Unread, set_states, states_of
from workers.engine.decode.sampler import choose
from workers.engine.decode.step_graph import StepGraph
from workers.engine.model.target import Target
from workers.engine.text.grammar import allowed_tokens, given_drafts

MAX_BACKLOG_STEPS = 32
"""Backlog at which the head reads it even though it drafts nothing."""
Tokens = Sequence[tuple[int, ...]]
"""Tokens of a step, row by row: the accepted drafts, then the token that the target adds."""


def begin_step(
    batch: Batch,
    graph: StepGraph,
    planned: Drafts,
    *,
    unread_tokens: int = 0,
) -> OpenStep:
    """Draft and verify the plan of every row; start to compute it, without waiting.

    The step before has chosen up to `unread_tokens` tokens that the answers of the rows do not have
    yet.
    """
    runs = planned.runs or [()] * len(batch.rows)
    limits = planned.limits(batch.rows)
    head_length = max(
        (limit for limit, run in zip(limits, runs, strict=True) if not run), default=0
    )
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
    state, recurrent = graph.split(verified.layers, batch.caches)
    set_states(batch.caches, state)
    step = OpenStep(
        planned=planned,
        drafts=drafts,
        limits=limits,
        head_length=head_length,
        sources=[
            draft_sources(limit, run, own)
            for limit, run, own in zip(limits, runs, forced, strict=True)
        ],
        scores=verified.scores,
        hidden=verified.hidden,
        recurrent=recurrent,
    )
    mx.async_eval(
        step.scores, step.hidden, step.recurrent, step.drafts,
        states_of(batch.caches), states_of(batch.head_caches),
    )  # fmt: skip
    return step


def finish_step(batch: Batch, graph: StepGraph, step: OpenStep) -> mx.array:
    """Choose the tokens of a step, accept drafts and roll back; the device may still compute.

    Returns the number of accepted drafts, then the choices: [rows, 1 + L].
    """
    hidden, drafted = step.hidden, (step.drafts, mx.array(step.limits))
    chosen = _choose(batch, step.scores, step.drafts)
    layers = graph.join(batch.caches, step.recurrent)
    offset = batch.offset
    if step.head_length and batch.head_caches:
        assert hidden is not None
        accepted, batch.last_tokens, state, head_state, batch.seed_hidden = graph.commit(
            layers, hidden, chosen, drafted, (states_of(batch.head_caches), offset)
        )
        set_states(batch.head_caches, head_state)
    elif step.tokens > 1:
        accepted, batch.last_tokens, state = graph.settle(layers, chosen, drafted)
    else:
        accepted = mx.zeros((len(batch.rows),), dtype=mx.int32)
        batch.last_tokens, state = chosen[:, 0], [tuple(layer) for layer in layers]
    set_states(batch.caches, state)
    if batch.has_head and not batch.head_caches:  # the head goes on from the target's own states
        assert hidden is not None
        batch.seed_hidden = mx.take_along_axis(hidden, accepted[:, None, None], axis=1)
    elif batch.head_caches and not step.head_length:
        assert hidden is not None
        batch.backlog.append(Unread(chosen, hidden, [1] * len(batch.rows)))
    decided = mx.concatenate([accepted[:, None], chosen], axis=1)
    mx.async_eval(decided)
    batch.set_offset(offset + accepted + 1)
    batch.evaluate_async()
    return decided


def read_step(batch: Batch, step: OpenStep, decided: mx.array) -> Tokens:
    """Wait for the tokens of a finished step."""
    # An accepted draft token is the target's own choice, so the choices are the answer.
    tokens = [tuple(row[1 : row[0] + 2]) for row in decided.tolist()]
    if step.tokens > 1 and batch.head_caches and not step.head_length:
        batch.backlog[-1] = batch.backlog[-1]._replace(counts=[len(each) for each in tokens])
    return tokens


def run_uncompiled_step(batch: Batch, target: Target) -> tuple[OpenStep, Tokens]:
    """Advance every row by one token, for families whose steps are no pure functions of arrays."""
    batch.reserve(1)
    positions = [[row.context_tokens + row.position_offset] for row in batch.rows]
    output = target.forward(
        batch.last_tokens[:, None], batch.caches, mx.array(positions, dtype=mx.int32)
    )
    scores, rows = target.scores(output), len(batch.rows)
    chosen = _choose(batch, scores, None)
    batch.last_tokens = chosen[:, 0]
    mx.async_eval(chosen)
    batch.evaluate_async()
    return OpenStep.plain(scores, rows), [tuple(row) for row in chosen.tolist()]


def _choose(batch: Batch, scores: mx.array, drafts: mx.array | None) -> mx.array:
    """Choose a token for every row and position, after the drafts [rows, L - 1].

    A row that replays its answer has its own batch, and drafts nothing.
    """
    if batch.rows[0].replayed:
        return mx.array([[batch.rows[0].replayed[0]]], dtype=mx.int32)
    rules = [row.token_rules(scores.shape[1] - 1) for row in batch.rows]
    allowed = None
    if any(rules):
        # The device verifies while the host reads the drafts and finds the tokens allowed after
        # each.
        mx.async_eval(scores)
        allowed = allowed_tokens(rules, scores.shape[-1], drafts)
    return choose(scores, [row.sampling_context() for row in batch.rows], drafts, allowed)


def _draft(
    batch: Batch, graph: StepGraph, head_length: int, given: Sequence[Sequence[int]]
) -> mx.array:
    """Return the drafts [rows, k]: tokens of the head, or those of `given` that are not -1."""
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
