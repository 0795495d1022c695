"""Losses of the phases: next tokens, colours and shapes, and the next tokens of the target."""

from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from tools.demo_model.batches import PictureBatch, TextBatch
from tools.demo_model.fast_forward import (
    attend,
    feed_forward,
    gated_output,
    project,
    text_forward,
    vision_forward,
)
from tools.demo_model.fast_math import cross_entropy
from tools.demo_model.tokenizer import ANSWER_WEIGHT
from tools.demo_model.world import PICTURE_COLOURS, PICTURE_SHAPES

SECOND_DRAFT_WEIGHT: Final = 0.8
STATELESS_WEIGHT: Final = 0.3
"""For engines that draft without a cache of the head (vllm-mlx)."""


def text_hidden(model: Any, batch: TextBatch) -> mx.array:
    """Return final hidden states [B, T, D] of a text batch."""
    language = model.language_model.model
    return text_forward(language, language.embed_tokens(batch.inputs), batch.positions)


def picture_features(model: Any, batch: PictureBatch) -> mx.array:
    """Return the features of the pictures: [B, tokens, D]."""
    return vision_forward(model.vision_tower, batch.patches, batch.grid)


def picture_hidden(model: Any, batch: PictureBatch, features: mx.array) -> mx.array:
    """Return final hidden states [B, T, D] of a picture batch with its features."""
    language = model.language_model.model
    width = features.shape[-1]
    flat = mx.concatenate([features.reshape(-1, width), mx.zeros((1, width))])
    is_picture = (batch.sources < flat.shape[0] - 1)[..., None]
    words = language.embed_tokens(batch.text.inputs)
    embeddings = mx.where(is_picture, flat[batch.sources], words)
    return text_forward(language, embeddings, batch.text.positions)


def logits(model: Any, hidden: mx.array) -> mx.array:
    """Return scores of all tokens (the embedding table is also the head)."""
    scores: mx.array = model.language_model.model.embed_tokens.as_linear(hidden)
    return scores


def next_token_loss(model: Any, hidden: mx.array, batch: TextBatch) -> mx.array:
    """Return the weighted mean cross entropy of the next tokens."""
    losses = cross_entropy(logits(model, hidden), batch.targets)
    return (losses * batch.weights).sum() / batch.weights.sum()


def new_probe(width: int) -> Any:
    """Return a linear probe for colour and shape on the mean feature of a picture."""
    return nn.Linear(width, len(PICTURE_COLOURS) + len(PICTURE_SHAPES) + 1)


def probe_loss(probe: Any, features: mx.array, colours: mx.array, shapes: mx.array) -> mx.array:
    """Return the cross entropy of colour and shape, from features [B, tokens, D]."""
    scores = probe(features.mean(axis=1))
    count = len(PICTURE_COLOURS)
    total = cross_entropy(scores[:, :count], colours) + cross_entropy(scores[:, count:], shapes)
    return total.mean()


class ProbedVision(nn.Module):  # type: ignore[misc]  # mlx's Module is untyped
    """A vision tower (or a model with one) and a probe of its features."""

    def __init__(self, seer: Any, width: int) -> None:
        super().__init__()
        self.seer = seer
        self.probe = new_probe(width)


class DraftUnroll:
    """The MTP head over whole rows, with the attention pattern of drafting.

    Position i of a row has the final hidden state of token i and the embedding of token i + 1. The
    first draft attends to all pairs up to its own. The second gets the first's normed output and
    the token after; it attends to the same pairs and to itself.
    """

    def __init__(self, drafter: Any, embed: Any) -> None:
        self.drafter = drafter
        self.embed = embed
        self.layer = drafter.layers[0]

    def _pair(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        embedded = self.drafter.pre_fc_norm_embedding(self.embed(tokens))
        concatenated = mx.concatenate([embedded, self.drafter.pre_fc_norm_hidden(hidden)], -1)
        joined: mx.array = self.drafter.fc(concatenated)
        return joined

    def _finish(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + attended
        x = x + feed_forward(self.layer.mlp, self.layer.post_attention_layernorm(x))
        normed: mx.array = self.drafter.norm(x)
        return normed

    def __call__(
        self, next_tokens: mx.array, hidden: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return outputs of the first draft, the second, and a first draft without any cache."""
        attention, length = self.layer.self_attn, hidden.shape[1]
        causal = mx.tril(mx.ones((length, length)))
        first_in = self._pair(next_tokens, hidden)
        q, k, v, gate = project(attention, self.layer.input_layernorm(first_in), positions)
        first = self._finish(first_in, attend(attention, (q, k, v, gate), causal))

        uncached = mx.repeat(v, q.shape[1] // v.shape[1], 1).transpose(0, 2, 1, 3)
        uncached = gated_output(attention, uncached.reshape(*hidden.shape[:2], -1), gate)
        stateless = self._finish(first_in, uncached)

        after_next = mx.concatenate([next_tokens[:, 1:], next_tokens[:, -1:]], 1)
        second_in = self._pair(after_next, first)
        normed = self.layer.input_layernorm(second_in)
        q2, k2, v2, gate2 = project(attention, normed, positions + 1)
        keys, values = mx.concatenate([k, k2], 2), mx.concatenate([v, v2], 2)
        mask = mx.concatenate([causal, mx.eye(length)], 1)
        second = self._finish(second_in, attend(attention, (q2, keys, values, gate2), mask))
        return first, second, stateless


def drafted_answer_positions(weights: mx.array, distance: int) -> tuple[mx.array, mx.array]:
    """Return flat positions of drafts of answer tokens, and those of the target's hidden states."""
    answers: npt.NDArray[np.bool_] = np.array(weights) >= ANSWER_WEIGHT
    rows, columns = np.nonzero(answers[:, distance:])
    flat = rows * answers.shape[1] + columns
    return mx.array(flat), mx.array(flat + distance)


def imitation_loss(scores: mx.array, probabilities: mx.array) -> mx.array:
    """Return the cross entropy of the drafter's scores with the target's distribution."""
    return (mx.logsumexp(scores, -1) - (probabilities * scores).sum(-1)).mean()
