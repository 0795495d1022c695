"""Sampler: choose the next tokens of a batch, every row by its own rules.

A sampled row draws with a number made of its seed and the position of the token, so that the same
seed gives the same text in any batch, with or without speculation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan

import mlx.core as mx

from paceline.request.profile import Sampling
from workers.engine.types import ScoredToken, TokenLogprob

NUCLEUS_TOKENS = 2048
"""Likeliest tokens among which top_p is looked for, before the whole vocabulary is sorted."""
_ROUNDING = 2.0**-23
"""Of a sum of shares, for each token in it."""
_MASK = (1 << 64) - 1


class TokenCounts:
    """How often each token occurs in one row, counted on the device as the answer grows."""

    def __init__(self) -> None:
        self._prompt: mx.array | None = None
        self._answer: mx.array | None = None
        self._counted = 0
        """Tokens of the answer that are counted."""

    def in_prompt(self, prompt: Sequence[int], vocabulary: int) -> mx.array:
        """Return whether each token occurs in the prompt: [vocabulary]; the prompt never changes.

        The answer is counted apart, so that no step sends a prompt to the device again.
        """
        if self._prompt is None:
            at = mx.array(sorted(set(prompt)), dtype=mx.int32)
            self._prompt = mx.zeros((vocabulary,), dtype=mx.bool_).at[at].add(True)
        return self._prompt

    def in_answer(self, answer: Sequence[int], vocabulary: int) -> mx.array:
        """Return the occurrences of each token in the answer so far: [vocabulary] float32."""
        if self._answer is None:
            self._answer = mx.zeros((vocabulary,))
        if new := answer[self._counted :]:
            self._answer = self._answer.at[mx.array(new, dtype=mx.int32)].add(1.0)
            self._counted = len(answer)
        return self._answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingContext:
    """Sampling rules of one row and their inputs."""

    sampling: Sampling
    seed: int
    """The request's seed, or one drawn for it."""
    prompt: Sequence[int]
    answer: Sequence[int]
    """The tokens so far; their number is the position of the next one."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Those of the same row in its former steps, or new ones."""


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
    chosen = [greedy[index] for index in range(len(rows))]
    drawn: list[int] = []
    scores: list[mx.array] = []
    for index, row in enumerate(rows):
        if plain[index]:
            continue
        own = logits[index].astype(mx.float32)
        if row.sampling.reshapes_logits:
            own = reshape_logits(own, row, None if drafts is None else drafts[index])
        if row.sampling.greedy:
            chosen[index] = mx.argmax(own, axis=-1).astype(mx.int32)
        else:
            drawn.append(index)
            scores.append(own / row.sampling.temperature)
    if drawn:
        filtered = filter_logits(mx.stack(scores), [rows[index].sampling for index in drawn])
        positions = range(logits.shape[1])
        uniforms = [
            [uniform(rows[index].seed, len(rows[index].answer) + at) for at in positions]
            for index in drawn
        ]
        for index, tokens in zip(drawn, draw(filtered, mx.array(uniforms)), strict=True):
            chosen[index] = tokens
    return mx.stack(chosen)


def _exclude(logits: mx.array, allowed: mx.array) -> mx.array:
    """Set the scores of all tokens without a bit to minus infinity."""
    vocabulary = logits.shape[-1]
    bits = (allowed[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    bits = bits.reshape(*allowed.shape[:-1], -1)[..., :vocabulary]
    return mx.where(bits.astype(mx.bool_), logits, mx.array(-mx.inf, dtype=logits.dtype))


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
        present = drafted + row.counts.in_answer(row.answer, vocabulary) > 0
        present = present | row.counts.in_prompt(row.prompt, vocabulary)
        penalty = sampling.repetition_penalty
        penalized = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(present, penalized, logits)
    if row.answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = drafted + row.counts.in_answer(row.answer, vocabulary)
        cost = counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
        logits = logits - cost
    if sampling.logit_bias:
        tokens = mx.array([token for token, _ in sampling.logit_bias], dtype=mx.int32)
        bias = mx.array([bias for _, bias in sampling.logit_bias], dtype=mx.float32)
        logits = logits.at[:, tokens].add(bias)
    return logits


def filter_logits(logits: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Set all scores [rows, L, vocabulary] that a row's top_k, min_p or top_p excludes to -inf.

    All rows with a top_k share one selection of the largest scores, and so do all others with a
    top_p (`_nucleus`).
    """
    vocabulary = logits.shape[-1]
    few = [at for at, each in enumerate(samplings) if 0 < each.top_k < vocabulary]
    rest = [
        at
        for at, each in enumerate(samplings)
        if at not in few and (each.top_p < 1 or each.min_p > 0)
    ]
    longest = max((samplings[at].top_k for at in few), default=0)
    nucleus = any(samplings[at].top_p < 1 for at in rest)
    for group, count in ((few, longest), (rest, 0 if nucleus else 1)):
        if group:
            at = mx.array(group, dtype=mx.int32)
            own = logits if len(group) == len(samplings) else logits[at]
            rules = [samplings[index] for index in group]
            least = _least_scores(own, rules, count) if count else _nucleus(own, rules)
            own = mx.where(own >= least, own, -mx.inf)
            logits = own if len(group) == len(samplings) else _replace_rows(logits, at, own)
    return logits


def _replace_rows(array: mx.array, at: mx.array, rows: mx.array) -> mx.array:
    array = mx.array(array)
    array[at] = rows
    return array


def _nucleus(logits: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Return the least score that min_p and top_p leave in each row: [rows, L, 1].

    The likeliest tokens of a large vocabulary nearly always have top_p of the probability. The
    host waits to see that they do, and sorts the vocabulary for the rows in which they do not. A
    GPU sorts everything also to find the largest scores, so there it sorts at once.
    """
    if logits.shape[-1] <= 4 * NUCLEUS_TOKENS or mx.default_device() != mx.Device(mx.cpu):
        return _sorted_nucleus(logits, samplings)
    limits = _limits(samplings)
    largest = logits.max(-1, keepdims=True)
    floor = _floor(largest, samplings)
    total = mx.exp(mx.where(logits >= floor, logits, -mx.inf) - largest).sum(-1, keepdims=True)
    ordered = mx.sort(mx.topk(logits, NUCLEUS_TOKENS, axis=-1), axis=-1)[..., ::-1]
    shares = mx.where(ordered >= floor, mx.exp(ordered - largest) / total, 0.0)
    sums = mx.cumsum(shares, axis=-1)
    least = _least_of_nucleus(ordered, shares, floor, samplings)
    # Where the sum of the likelier ones is top_p but for rounding, the sort decides too.
    rounding = _ROUNDING * (10 + mx.arange(NUCLEUS_TOKENS))
    clear = ~(mx.abs(sums - shares - limits) < rounding).any(-1, keepdims=True)
    found = (sums[..., -1:] > limits + _ROUNDING * NUCLEUS_TOKENS) | (ordered[..., -1:] < floor)
    found = (found & clear) | (limits == mx.inf)
    unsure = [at for at, one in enumerate(found.all(axis=(1, 2)).tolist()) if not one]
    if unsure:
        at = mx.array(unsure, dtype=mx.int32)
        own = _sorted_nucleus(logits[at], [samplings[index] for index in unsure])
        least = _replace_rows(least, at, own)
    return least


def _sorted_nucleus(logits: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Return the same as `_nucleus`, by a sort of the vocabulary."""
    ordered = mx.sort(logits, axis=-1)[..., ::-1]
    floor = _floor(ordered[..., :1], samplings)
    shares = mx.softmax(mx.where(ordered >= floor, ordered, -mx.inf), axis=-1)
    return _least_of_nucleus(ordered, shares, floor, samplings)


def _least_of_nucleus(
    ordered: mx.array, shares: mx.array, floor: mx.array, samplings: Sequence[Sampling]
) -> mx.array:
    """Return the least of the largest scores that stays: [rows, L, 1].

    A token stays if the shares of the likelier ones sum up to less than top_p.
    """
    stay = (mx.cumsum(shares, axis=-1) - shares < _limits(samplings)) & (ordered >= floor)
    last = mx.maximum(stay.sum(-1, keepdims=True), 1) - 1
    least = mx.maximum(floor, mx.take_along_axis(ordered, last, axis=-1))
    return mx.where(_limits(samplings) < mx.inf, least, floor)


def _least_scores(logits: mx.array, samplings: Sequence[Sampling], count: int) -> mx.array:
    """Return the least score that each row's filters leave: [rows, L, 1].

    The largest `count` scores suffice: either top_k leaves no more, or min_p is the only filter.
    """
    ordered = mx.sort(mx.topk(logits, count, axis=-1), axis=-1)[..., ::-1]
    least = _floor(ordered[..., :1], samplings)
    if all(0 < one.top_k <= count for one in samplings):
        last = mx.array([one.top_k - 1 for one in samplings])[:, None, None]
        least = mx.maximum(
            least,
            mx.take_along_axis(ordered, mx.broadcast_to(last, least.shape), axis=-1),
        )
    if all(one.top_p >= 1 for one in samplings):
        return least
    left = mx.where(ordered >= least, ordered, -mx.inf)
    # More tokens than there are places may have the score of the last one.
    ties = (logits == least).sum(-1, keepdims=True) - (left == least).sum(-1, keepdims=True)
    left = mx.concatenate([left, least + mx.log(ties)], axis=-1)
    shares = mx.softmax(left, axis=-1)[..., :count]
    return _least_of_nucleus(ordered, shares, least, samplings)


def _floor(largest: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Return the least score that min_p leaves, -inf for 0: [rows, L, 1], as the largest are."""
    return largest + mx.log(mx.array([one.min_p for one in samplings])[:, None, None])


def _limits(samplings: Sequence[Sampling]) -> mx.array:
    """Return top_p of each row, and infinity where it excludes nothing: [rows, 1, 1]."""
    return mx.array([one.top_p if one.top_p < 1 else mx.inf for one in samplings])[:, None, None]


def draw(logits: mx.array, uniforms: mx.array) -> mx.array:
    """Draw a token for every row and position: [rows, L, vocabulary] to [rows, L] int32.

    `uniforms` [rows, L] in [0, 1) decide: the token is the first one at which the sum of the
    probabilities exceeds it. One uniform number costs less than one for each token, as the Gumbel
    trick takes.
    """
    sums = mx.cumsum(mx.exp(logits - logits.max(-1, keepdims=True)), axis=-1)
    return (sums <= uniforms[..., None] * sums[..., -1:]).sum(-1).astype(mx.int32)


def uniform(seed: int, position: int) -> float:
    """Return the random number of one position, in [0, 1), with as many bits as a float32 has.

    Two rounds of splitmix64 (Steele, Lea, Flood 2014), since a plain sum would make position 1 of
    seed 0 the same draw as position 0 of seed 1.
    """
    return (_mix((_mix(seed & _MASK) + position) & _MASK) >> 40) / (1 << 24)


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
        """Take this many positions of the prompt; `scores` returns the scores of some of them.

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
    # The places of the largest scores, the largest one first.
    at = mx.zeros((len(tokens), 0), dtype=mx.int32)
    if count := min(top, scores.shape[-1]):
        at = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[:, :count]
        order = mx.argsort(-mx.take_along_axis(logprobs, at, axis=-1), axis=-1)
        at = mx.take_along_axis(at, order, axis=-1).astype(mx.int32)
    named = mx.concatenate([mx.array(tokens, dtype=mx.int32)[:, None], at], axis=1)
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
