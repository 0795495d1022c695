"""Sampler: choose the next tokens of a batch, every row by its own rules.

A sampled row draws with a key made of its seed and the position of the token, so that the same seed
gives the same text alone, in a full batch, and with or without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import nan

import mlx.core as mx

from policies.request.profile import Sampling
from workers.engine.types import ScoredToken, TokenLogprob

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingContext:
    """Sampling rules of one row and their inputs."""

    sampling: Sampling
    seed: int
    """The request's seed, or one drawn for it."""
    prompt: Sequence[int]
    answer: Sequence[int]
    """The tokens so far; their number is the position of the next one."""


def choose(
    logits: mx.array,
    rows: Sequence[SamplingContext],
    drafts: mx.array | None = None,
    allowed: mx.array | None = None,
) -> mx.array:
    """Choose a token for every row and position: [rows, L, vocabulary] to [rows, L] int32.

    Position i is chosen as if the answer included the first i of `drafts` [rows, L - 1]; the caller
    uses it only if it does. `allowed` [rows, L, words] has a bit for each token that may be chosen.
    """
    if allowed is not None:
        logits = _exclude(logits, allowed)
    greedy = mx.argmax(logits, axis=-1).astype(mx.int32)
    plain = [row.sampling.greedy and not row.sampling.reshapes_logits for row in rows]
    if all(plain):
        return greedy
    return mx.stack(
        [
            greedy[index]
            if plain[index]
            else _choose_row(logits[index], row, None if drafts is None else drafts[index])
            for index, row in enumerate(rows)
        ]
    )


def _exclude(logits: mx.array, allowed: mx.array) -> mx.array:
    """Set the scores of all tokens without a bit to minus infinity."""
    vocabulary = logits.shape[-1]
    bits = (allowed[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    bits = bits.reshape(*allowed.shape[:-1], -1)[..., :vocabulary]
    return mx.where(bits.astype(mx.bool_), logits, mx.array(-mx.inf, dtype=logits.dtype))


def _choose_row(logits: mx.array, row: SamplingContext, drafts: mx.array | None) -> mx.array:
    logits = logits.astype(mx.float32)
    if row.sampling.reshapes_logits:
        logits = reshape_logits(logits, row, drafts)
    if row.sampling.greedy:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    filtered = filter_logits(logits / row.sampling.temperature, row.sampling)
    return mx.concatenate(
        [
            mx.random.categorical(
                filtered[at : at + 1], key=position_key(row.seed, len(row.answer) + at)
            )
            for at in range(filtered.shape[0])
        ]
    ).astype(mx.int32)


def reshape_logits(
    logits: mx.array, row: SamplingContext, drafts: mx.array | None = None
) -> mx.array:
    """Apply penalties and biases to [L, vocabulary] scores, in the order vLLM applies them.

    Position i counts the first i of `drafts` [L - 1] as part of the answer.
    """
    sampling = row.sampling
    vocabulary = logits.shape[-1]
    drafted = mx.zeros((1, vocabulary))
    if drafts is not None and drafts.size:
        one_hot = (drafts[:, None] == mx.arange(vocabulary)).astype(mx.float32)
        drafted = mx.concatenate([drafted, mx.cumsum(one_hot, axis=0)])
    if sampling.repetition_penalty != 1.0:
        present = drafted + _counts({*row.prompt, *row.answer}, vocabulary) > 0
        penalty = sampling.repetition_penalty
        penalized = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(present, penalized, logits)
    if row.answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = drafted + _counts(row.answer, vocabulary)
        cost = counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
        logits = logits - cost
    if sampling.logit_bias:
        tokens = mx.array([token for token, _ in sampling.logit_bias], dtype=mx.int32)
        bias = mx.array([bias for _, bias in sampling.logit_bias], dtype=mx.float32)
        logits = logits.at[:, tokens].add(bias)
    return logits


def _counts(tokens: Iterable[int], vocabulary: int) -> mx.array:
    """Return the number of occurrences of each token: [vocabulary]."""
    at = mx.array(list(tokens), dtype=mx.int32)
    return mx.zeros((vocabulary,)).at[at].add(1.0)


def filter_logits(logits: mx.array, sampling: Sampling) -> mx.array:
    """Set all scores [L, vocabulary] that top_k, min_p or top_p exclude to minus infinity."""
    vocabulary = logits.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        kth = mx.sort(logits, axis=-1)[:, vocabulary - sampling.top_k]
        logits = mx.where(logits >= kth[:, None], logits, -mx.inf)
    if sampling.min_p > 0:
        floor = logits.max(axis=-1, keepdims=True) + mx.log(mx.array(sampling.min_p))
        logits = mx.where(logits >= floor, logits, -mx.inf)
    if sampling.top_p < 1:
        ordered = mx.sort(logits, axis=-1)[:, ::-1]
        shares = mx.softmax(ordered, axis=-1)
        # A token stays if the shares of the likelier ones sum up to less than top_p.
        count = (mx.cumsum(shares, axis=-1) - shares < sampling.top_p).sum(-1, keepdims=True)
        least = mx.take_along_axis(ordered, count - 1, axis=-1)
        logits = mx.where(logits >= least, logits, -mx.inf)
    return logits


def position_key(seed: int, position: int) -> mx.array:
    """Return the random key of one position; adjacent seeds and positions get unrelated keys.

    Two rounds of splitmix64 (Steele, Lea, Flood 2014), since a plain sum would make position 1 of
    seed 0 the same draw as position 0 of seed 1.
    """
    return mx.random.key(_mix((_mix(seed & _MASK) + position) & _MASK))


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class PromptLogprobs:
    """The log-probabilities of the tokens of a prompt, from the scores of its prefill."""

    MAX_POSITIONS = 64
    """Positions that are scored at once: each takes the memory of a whole vocabulary."""

    def __init__(
        self, tokens: Sequence[int], top: int, token_bytes: Callable[[int], bytes]
    ) -> None:
        self._tokens = tokens
        self._top = top
        self._token_bytes = token_bytes
        self.clear()

    def clear(self) -> None:
        """Start again with the first token, which nothing predicts."""
        first = self._tokens[0]
        self.logprobs = [TokenLogprob(token_id=first, raw=self._token_bytes(first), logprob=nan)]

    def read(self, scores: Callable[[slice], mx.array], positions: int) -> None:
        """Take so many next positions of the prompt; `scores` returns those of some of them.

        The scores [L, vocabulary] of a position are those of the token after it.
        """
        for begin in range(0, positions, self.MAX_POSITIONS):
            end = min(begin + self.MAX_POSITIONS, positions)
            known = len(self.logprobs)
            tokens = self._tokens[known : known + end - begin]
            if tokens:  # the scores of the last position are those of the answer
                part = scores(slice(begin, end))
                self.logprobs += token_logprobs(part, tokens, self._top, self._token_bytes)


def token_logprobs(
    scores: mx.array, tokens: Sequence[int], top: int, token_bytes: Callable[[int], bytes]
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of tokens and of the `top` most likely alternatives.

    They come from the model's scores [L, vocabulary], before any sampling; there may be fewer
    tokens than scores.
    """
    logprobs = scores[: len(tokens)].astype(mx.float32)
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    likeliest = mx.argsort(-logprobs, axis=-1)[:, :top].astype(mx.int32)
    named = mx.concatenate([mx.array(tokens, dtype=mx.int32)[:, None], likeliest], axis=1)
    values = mx.take_along_axis(logprobs, named, axis=1)
    return tuple(
        TokenLogprob(
            token_id=ids[0],
            raw=token_bytes(ids[0]),
            logprob=shares[0],
            top=tuple(
                ScoredToken(token_id=index, raw=token_bytes(index), logprob=value)
                for index, value in zip(ids[1:], shares[1:], strict=True)
            ),
        )
        for ids, shares in zip(named.tolist(), values.tolist(), strict=True)
    )
