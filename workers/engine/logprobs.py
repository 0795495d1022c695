"""The log-probabilities of chosen tokens, from the model's own scores (before any sampling)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from workers.engine.types import ScoredToken, TokenLogprob


def token_logprobs(
    scores: mx.array, tokens: Sequence[int], top: int, raw: Callable[[int], bytes]
) -> tuple[TokenLogprob, ...]:
    """Describe the tokens chosen from scores [L, vocabulary], each with the `top` likeliest.

    There may be fewer tokens than scores.
    """
    logprobs = scores[: len(tokens)].astype(mx.float32)
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    likeliest = mx.argsort(-logprobs, axis=-1)[:, :top].astype(mx.int32)
    named = mx.concatenate([mx.array(tokens, dtype=mx.int32)[:, None], likeliest], axis=1)
    values = mx.take_along_axis(logprobs, named, axis=1)
    return tuple(
        TokenLogprob(
            token_id=ids[0],
            raw=raw(ids[0]),
            logprob=shares[0],
            top=tuple(
                ScoredToken(token_id=index, raw=raw(index), logprob=value)
                for index, value in zip(ids[1:], shares[1:], strict=True)
            ),
        )
        for ids, shares in zip(named.tolist(), values.tolist(), strict=True)
    )
