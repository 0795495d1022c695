"""Drafts over a shortlist of frequent tokens, where that pays.

A head multiplies its state by the whole output layer of its model for each token that it drafts,
which reads as much of a large vocabulary as of the head. Nearly all text consists of the frequent
tokens (FR-Spec, arXiv 2502.14856), and a tokenizer numbers its tokens by their frequency: the id of
a byte pair is the rank of its merge. So the shortlist is the first rows of the output layer, which
takes no copy of them. Each row of a batch adds tokens of its own: marks, which have the last ids,
and the rarer tokens of its prompt.

The worker measures at its start what a pass over the shortlist saves. That is worth so many missed
drafts and no more: a row whose text has more tokens outside, of another script for example, drafts
over the whole vocabulary, and so does the worker if the answers of the self-test have more. No
answer changes, since the model verifies each draft.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

FURTHER_TOKENS = 96
"""Tokens that a row adds."""
_MARKS = 32
"""Of these at most, for the ends of answers and other tokens that are no text."""
RECENT_TOKENS = 64
"""Tokens of a row that decide whether its shortlist pays."""
_READ_TOKENS = 4096
"""Of a prompt, from its end, whose rarer tokens are looked for."""


class DraftShortlist:
    """The frequent tokens of a vocabulary, and the part of the output layer that scores them."""

    def __init__(self, layer: Any, tokens: int, marks: Sequence[int]) -> None:
        """Take the first `tokens` of an output layer, and of the others these `marks`."""
        self.tokens = tokens
        self.saving = 0.0
        """The time that a draft over the shortlist saves, as a share of a step with it."""
        self.max_outside = 1.0
        """Share of tokens outside the shortlist at which it pays no more."""
        self._layer = layer
        self._marks = tuple(dict.fromkeys(mark for mark in marks if mark >= tokens))[:_MARKS]
        names = ("weight", "scales", "biases")
        self._first = {one: layer[one][:tokens] for one in names if layer.get(one) is not None}
        mx.eval(self._first)

    def draft(self, hidden: mx.array, further: mx.array) -> mx.array:
        """Return the likeliest token [rows] of the shortlist and of `further` [rows, n].

        `hidden` is [rows, 1, width].
        """
        layer, states = self._layer, hidden[:, 0]
        first, weights = self._first, {name: layer[name][further] for name in self._first}
        if "scales" in first:
            options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            scores = mx.quantized_matmul(
                states,
                first["weight"],
                scales=first["scales"],
                biases=first.get("biases"),
                transpose=True,
                **options,
            )
            rows = mx.dequantize(
                weights["weight"], weights["scales"], weights.get("biases"), **options
            )
        else:
            scores, rows = states @ first["weight"].T, weights["weight"]
        others = (rows.astype(states.dtype) @ states[:, :, None])[..., 0]
        at = mx.argmax(mx.concatenate([scores, others], axis=-1), axis=-1, keepdims=True)
        beyond = mx.take_along_axis(further, mx.maximum(at - self.tokens, 0).astype(mx.int32), -1)
        return mx.where(at < self.tokens, at.astype(mx.int32), beyond)[:, 0]

    def further(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that a row adds by its prompt, `FURTHER_TOKENS` of them."""
        rare = Counter(
            token
            for token in prompt[-_READ_TOKENS:]
            if token >= self.tokens and token not in self._marks
        )
        room = FURTHER_TOKENS - len(self._marks)
        found = (*self._marks, *(token for token, _ in rare.most_common(room)))
        return (*found, *[0] * (FURTHER_TOKENS - len(found)))

    def covers(self, prompt: Sequence[int], answer: Sequence[int], further: Sequence[int]) -> bool:
        """Return whether the shortlist pays for a row, by its last tokens.

        Those of its prompt count as they are, since an answer in the same script has others.
        """
        recent = answer[-RECENT_TOKENS:]
        missing = sum(token >= self.tokens and token not in further for token in recent)
        left = RECENT_TOKENS - len(recent)
        last = prompt[-left:] if left else ()
        missing += sum(token >= self.tokens and token not in self._marks for token in last)
        return missing <= self.max_outside * (len(recent) + len(last))

    def settle(self, acceptance: float, answers: Sequence[int]) -> bool:
        """Decide by the drafts accepted in the self-test, and its answers, whether it pays.

        A step of V seconds beside its draft yields 1 + a tokens in V + s seconds with the
        shortlist, and at most 1 + a + u in V + f without, where u is the share of tokens outside.
        """
        self.max_outside = (1 + acceptance) * self.saving
        outside = sum(token >= self.tokens and token not in self._marks for token in answers)
        return outside <= self.max_outside * len(answers)
