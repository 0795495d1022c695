"""One round of a batch: draft, verify, accept, commit, all rows at once and each for itself.

Speculative decoding by match (Leviathan et al. 2023, arXiv 2211.17192, for a draft of the likeliest
tokens): the target chooses a token at every position by the row's own rules, and a drafted token is
kept when it is that very choice. So every row gets exactly the tokens it would get without
speculation, whatever sampler it uses and whoever shares its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from workers.engine.batch import Batch
from workers.engine.model import Target
from workers.engine.sampler import choose
from workers.engine.step_graph import RoundGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one round decided, row by row."""

    drafted: tuple[int, ...]
    """Draft tokens judged."""
    tokens: tuple[tuple[int, ...], ...]
    """The accepted drafts, then the one token that the target adds."""
    scores: mx.array
    """[rows, L, vocabulary]: the scores behind every token, for whoever reports them."""


def run_round(batch: Batch, graph: RoundGraph, k: int) -> RoundResult:
    """Advance every row by one verify of up to k drafted tokens, or of as many as it asked for.

    The host waits for the device once, for what was decided; what follows from it is computed while
    the host passes the tokens on.
    """
    limits = [row.next_draft(k) if batch.drafts else 0 for row in batch.rows]
    length = max(limits)
    batch.reserve(length + 1)
    drafts = _draft(batch, graph, length)
    offset = batch.offset
    verified = graph.verify(
        mx.concatenate([batch.last[:, None], drafts], axis=1),
        batch.state,
        offset,
        batch.position_shift,
    )
    chosen = choose(verified.scores, [row.chooser() for row in batch.rows], drafts)
    if length:
        settled = graph.settle(
            verified, chosen, (drafts, mx.array(limits)), (batch.head_state, offset)
        )
        accepted = settled.accepted
        batch.last, batch.state, batch.head_state = settled.last, settled.state, settled.head_state
        batch.seed_hidden = settled.seed_hidden
    else:
        accepted = mx.zeros((len(batch),), dtype=mx.int32)
        batch.last, batch.state = chosen[:, 0], verified.state
        if batch.drafts:
            batch.fall_behind(chosen, verified.hidden)
    decided = mx.concatenate([accepted[:, None], chosen], axis=1)
    mx.async_eval(decided)
    batch.set_offset(offset + accepted + 1)
    batch.begin_evaluation()
    return _result(limits, decided, verified.scores)


def run_plain_round(batch: Batch, target: Target) -> RoundResult:
    """Advance every row by one token, for families whose rounds are no pure functions of arrays."""
    batch.reserve(1)
    positions = [[row.context + row.position_offset] for row in batch.rows]
    forward = target.forward(batch.last[:, None], batch.caches, mx.array(positions, dtype=mx.int32))
    scores = target.scores(forward)
    chosen = choose(scores, [row.chooser() for row in batch.rows])
    batch.last = chosen[:, 0]
    decided = mx.concatenate([mx.zeros_like(chosen), chosen], axis=1)
    mx.async_eval(decided)
    batch.begin_evaluation()
    return _result([0] * len(batch), decided, scores)


def _draft(batch: Batch, graph: RoundGraph, length: int) -> mx.array:
    """Let the head guess the next `length` tokens of every row: [rows, length]."""
    if graph.head is not None and (length or batch.far_behind):
        batch.catch_up(graph.head)
    if not length:
        return mx.zeros((len(batch), 0), dtype=mx.int32)
    assert batch.seed_hidden is not None
    drafts, batch.head_state = graph.draft(
        batch.seed_hidden, batch.head_state, batch.offset, length
    )
    mx.async_eval(drafts)  # the head works while the host describes the verify
    return drafts


def _result(limits: list[int], decided: mx.array, scores: mx.array) -> RoundResult:
    rows = decided.tolist()
    return RoundResult(
        drafted=tuple(limits),
        # An accepted draft is the target's own choice, so the choices are the answer.
        tokens=tuple(tuple(row[1 : row[0] + 2]) for row in rows),
        scores=scores,
    )
