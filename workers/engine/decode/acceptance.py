"""Acceptance: which tokens of its drafts an answer takes.

Speculative decoding by match (Leviathan et al. 2023, arXiv 2211.17192, for a draft of the likeliest
tokens): the target chooses a token at every position by the row's own sampling rules, and accepts a
drafted token where it equals that choice, up to the first that does not. Every row therefore gets
the tokens that it would get without speculation, whatever its sampler and whatever rows share its
batch; kernels round scores in their last bits by the shape of the batch, so two tokens may change
places that are as likely.
"""

from __future__ import annotations

import mlx.core as mx


def accept_drafts(
    drafts: mx.array, limits: mx.array, chosen: mx.array
) -> tuple[mx.array, mx.array]:
    """Return how many drafts of each row are accepted, and the token after them: [rows] each.

    `drafts` is [rows, k], of which the first `limits` [rows] are drafted; `chosen` is
    [rows, k + 1].
    """
    within_limit = mx.arange(drafts.shape[1])[None] < limits[:, None]
    matches = mx.logical_and(drafts == chosen[:, :-1], within_limit)
    accepted = mx.cumprod(matches.astype(mx.int32), axis=1).sum(axis=1)
    return accepted, mx.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
