"""The forward passes of Qwen3, BERT and XLM-RoBERTa in NumPy, one text at a time, without padding.

Written from the papers and the published weights' names; nothing of MLX is in it.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]

_erf = np.vectorize(math.erf, otypes=[np.float64])


class _Checkpoint:
    def __init__(self, folder: Path, prefix: str) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._weights = load_file(folder / "model.safetensors")
        self._prefix = prefix

    def weight(self, name: str) -> Array:
        weights = self._weights
        return np.asarray(weights.get(self._prefix + name, weights.get(name)), dtype=np.float64)

    def linear(self, name: str, values: Array) -> Array:
        product: Array = values @ self.weight(f"{name}.weight").T
        return product + self.weight(f"{name}.bias")

    def layer_norm(self, name: str, values: Array) -> Array:
        centred = values - values.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + self.config["layer_norm_eps"])
        scaled: Array = centred / scale * self.weight(f"{name}.weight")
        return scaled + self.weight(f"{name}.bias")

    def rms_norm(self, name: str, values: Array) -> Array:
        scale = np.sqrt((values**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return values / scale * self.weight(f"{name}.weight")


def qwen3_states(folder: Path, tokens: Sequence[int], prefix: str = "") -> Array:
    """Return the hidden states after the last norm [tokens, width]."""
    model = _Checkpoint(folder, prefix)
    config, count = model.config, len(tokens)
    heads, width = config["num_attention_heads"], config["head_dim"]
    repeats = heads // config["num_key_value_heads"]
    hidden = model.weight("embed_tokens.weight")[list(tokens)]
    hidden_mask = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        normed = model.rms_norm(at + "input_layernorm", hidden)

        def project(name: str, at: str = at, normed: Array = normed) -> Array:
            rows = normed @ model.weight(f"{at}self_attn.{name}_proj.weight").T
            return rows.reshape(count, -1, width).transpose(1, 0, 2)

        queries = _rotate(model.rms_norm(at + "self_attn.q_norm", project("q")), config)
        keys = _rotate(model.rms_norm(at + "self_attn.k_norm", project("k")), config)
        keys, values = (np.repeat(one, repeats, 0) for one in (keys, project("v")))
        mixed = _attend(queries, keys, values, hidden_mask)
        hidden = hidden + mixed @ model.weight(at + "self_attn.o_proj.weight").T
        normed = model.rms_norm(at + "post_attention_layernorm", hidden)
        gate = normed @ model.weight(at + "mlp.gate_proj.weight").T
        up = normed @ model.weight(at + "mlp.up_proj.weight").T
        activated = gate / (1 + np.exp(-gate)) * up
        hidden = hidden + activated @ model.weight(at + "mlp.down_proj.weight").T
    return model.rms_norm("norm", hidden)


def qwen3_yes(folder: Path, tokens: Sequence[int], yes: int, no: int) -> float:
    """Return the probability of yes against no as the next token; the embeddings are tied."""
    last = qwen3_states(folder, tokens, "model.")[-1]
    embeddings = _Checkpoint(folder, "model.").weight("embed_tokens.weight")
    scores = np.exp([embeddings[yes] @ last, embeddings[no] @ last])
    return float(scores[0] / scores.sum())


def encoder_states(folder: Path, tokens: Sequence[int], types: Sequence[int], prefix: str) -> Array:
    """Return the hidden states of BERT or XLM-RoBERTa [tokens, width]."""
    model = _Checkpoint(folder, prefix)
    config, count = model.config, len(tokens)
    heads = config["num_attention_heads"]
    first = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    hidden = (
        model.weight("embeddings.word_embeddings.weight")[list(tokens)]
        + model.weight("embeddings.position_embeddings.weight")[first : first + count]
        + model.weight("embeddings.token_type_embeddings.weight")[list(types)]
    )
    hidden = model.layer_norm("embeddings.LayerNorm", hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        queries, keys, values = (
            model.linear(f"{at}attention.self.{name}", hidden)
            .reshape(count, heads, -1)
            .transpose(1, 0, 2)
            for name in ("query", "key", "value")
        )
        mixed = model.linear(at + "attention.output.dense", _attend(queries, keys, values, 0.0))
        hidden = model.layer_norm(at + "attention.output.LayerNorm", hidden + mixed)
        inner = model.linear(at + "intermediate.dense", hidden)
        inner = inner * 0.5 * (1 + _erf(inner / math.sqrt(2)))
        output = model.linear(at + "output.dense", inner)
        hidden = model.layer_norm(at + "output.LayerNorm", hidden + output)
    return hidden


def bert_score(folder: Path, tokens: Sequence[int], types: Sequence[int]) -> float:
    """Return the score of BertForSequenceClassification, between 0 and 1."""
    model = _Checkpoint(folder, "bert.")
    first = encoder_states(folder, tokens, types, "bert.")[0]
    return _sigmoid(model.linear("classifier", np.tanh(model.linear("pooler.dense", first))))


def xlm_roberta_score(folder: Path, tokens: Sequence[int]) -> float:
    """Return the score of XLMRobertaForSequenceClassification, between 0 and 1."""
    model = _Checkpoint(folder, "roberta.")
    first = encoder_states(folder, tokens, [0] * len(tokens), "roberta.")[0]
    inner = np.tanh(model.linear("classifier.dense", first))
    return _sigmoid(model.linear("classifier.out_proj", inner))


def unit(vector: Array) -> Array:
    """Return a vector of the same direction and of length 1."""
    return vector / np.linalg.norm(vector)


def _sigmoid(score: Array) -> float:
    return float(1 / (1 + np.exp(-score[0])))


def _attend(queries: Array, keys: Array, values: Array, mask: Array | float) -> Array:
    scores = queries @ keys.transpose(0, 2, 1) / math.sqrt(queries.shape[-1]) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ values
    return mixed.transpose(1, 0, 2).reshape(queries.shape[1], -1)


def _rotate(values: Array, config: dict[str, Any]) -> Array:
    """Apply rotary positions (arXiv 2104.09864) to the two halves of each head."""
    half = values.shape[-1] // 2
    frequencies = config["rope_theta"] ** (-np.arange(half) / half)
    angles = np.arange(values.shape[1])[:, None] * frequencies
    first, second = values[..., :half], values[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
