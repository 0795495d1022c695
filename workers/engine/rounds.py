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
from workers.engine.sampling import choose
from workers.engine.seam import MtpHead, Target
from workers.engine.verify import Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one round decided, row by row."""

    drafted: tuple[int, ...]
    """Draft tokens judged."""
    tokens: tuple[tuple[int, ...], ...]
    """The accepted drafts, then the one token that the target adds."""
    scores: mx.array
    """[rows, 1, vocabulary]: the scores behind the first token, for whoever reports them."""


def run_round(batch: Batch, target: Target, head: MtpHead | None, k: int) -> RoundResult:
    """Advance every row by one verify of up to k drafted tokens, or of as many as it asked for.

    The host waits for the device once, when all of the round has been handed over.
    """
    limits = [row.next_draft(k) if head else 0 for row in batch.rows]
    length = max(limits)
    drafts = _draft(batch, head, length)
    mx.async_eval(drafts)  # the head works while the host describes the verify

    verify = Verify(target, batch.caches, native=target.native_verify)
    inputs = mx.concatenate([batch.last[:, None], drafts], axis=1)
    forward = verify.run(inputs, batch.positions(length + 1))
    scores = target.scores(forward)
    chosen = choose(scores, [row.chooser() for row in batch.rows])
    accepted, batch.last = _accept(drafts, chosen, limits)
    if head is not None and forward.hidden is not None:
        if length:
            _replay(batch, head, chosen, forward.hidden, accepted)
        else:
            batch.fall_behind(chosen, forward.hidden, head)

    decided = mx.concatenate([accepted[:, None], chosen], axis=1)
    mx.async_eval(decided, batch.last, batch.seed_hidden)
    rows = decided.tolist()
    counts = [row[0] for row in rows]
    verify.keep([count + 1 for count in counts])
    if length:
        for cache in batch.head_caches:
            cache.advance([count + 1 for count in counts])
    mx.async_eval([cache.state for cache in batch.caches])
    return RoundResult(
        drafted=tuple(limits),
        # An accepted draft is the target's own choice, so the choices are the answer.
        tokens=tuple(tuple(row[1 : count + 2]) for row, count in zip(rows, counts, strict=True)),
        scores=scores[:, :1],
    )


def _draft(batch: Batch, head: MtpHead | None, length: int) -> mx.array:
    """Let the head guess the next `length` tokens of every row: [rows, length]."""
    if head is None or length == 0:
        return mx.zeros((len(batch), 0), dtype=mx.int32)
    batch.catch_up(head)
    state = batch.seed_hidden
    assert state is not None
    drafts = [head.draft(state)]
    while len(drafts) < length:
        state = head.forward(drafts[-1][:, None], state, batch.head_caches, batch.head_positions(1))
        drafts.append(head.draft(state))
    return mx.stack(drafts, axis=1)


def _accept(drafts: mx.array, chosen: mx.array, limits: list[int]) -> tuple[mx.array, mx.array]:
    """Count the leading drafts [rows] that were chosen, and take the token behind them [rows]."""
    length = drafts.shape[1]
    if length == 0:
        return mx.zeros((drafts.shape[0],), dtype=mx.int32), chosen[:, 0]
    asked = mx.arange(length)[None] < mx.array(limits)[:, None]
    matches = mx.logical_and(drafts == chosen[:, :length], asked)
    accepted = mx.cumprod(matches.astype(mx.int32), axis=1).sum(axis=1)
    return accepted, mx.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]


def _replay(
    batch: Batch, head: MtpHead, chosen: mx.array, hidden: mx.array, accepted: mx.array
) -> None:
    """Replace what the head stored for its own guesses by what the target really saw.

    The choices behind a row's bonus token are read too and forgotten again: one forward pass for
    all rows costs less than one a row, and it need not wait for the counts.
    """
    for cache in batch.head_caches:
        cache.rewind()
    state = head.forward(chosen, hidden, batch.head_caches, batch.head_positions(chosen.shape[1]))
    batch.seed_hidden = mx.take_along_axis(state, accepted[:, None, None], axis=1)
