"""The log-probabilities of chosen tokens, from the model's own scores (before any sampling)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from workers.engine.requests import TokenLogprob


def token_logprob(
    scores: mx.array, token: int, top: int, spell: Callable[[int], str]
) -> TokenLogprob:
    """Describe the chosen token and the `top` likeliest, from scores [vocabulary]."""
    logprobs = scores.astype(mx.float32)
    logprobs = logprobs - mx.logsumexp(logprobs)
    likeliest = mx.argsort(-logprobs)[:top] if top else mx.zeros((0,), dtype=mx.uint32)
    ids = [int(index) for index in likeliest.tolist()]
    values = logprobs[mx.array([token, *ids])].tolist()
    return TokenLogprob(
        token_id=token,
        text=spell(token),
        logprob=values[0],
        top=tuple(
            (index, spell(index), value) for index, value in zip(ids, values[1:], strict=True)
        ),
    )
