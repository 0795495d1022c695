"""MTP heads of random weights in the published layout: they draft as a pass in NumPy, and exactly.

The passes follow SGLang's `deepseek_nextn.py`, `glm4_moe_nextn.py` and vLLM's `qwen3_next_mtp.py`,
from the published tensors alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from bench.families.checkpoints import FORMATS, Format, write_checkpoint
from bench.families.checks import check_checkpoint
from bench.families.configs import family
from bench.families.heads import HEAD_FILE, HEADS, NORMS, write_head
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.mtp_head import HeadUnusable, load_own_head

Array = Any
"""Of NumPy, whose types lose the width of most results."""
TOKENS = [(7 * at * at + 5 * at) % 1400 + 64 for at in range(20)]
READ_AT_ONCE = 12
DRAFT_TOKENS = 3
BF16, FOUR_BIT = FORMATS[0], FORMATS[1]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class Tensors(dict[str, Array]):
    """The tensors of a head, by the names that follow those of its layer."""

    epsilon: float

    def norm(self, x: Array, name: str) -> Array:
        weight = self[f"{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * weight

    def project(self, x: Array, name: str) -> Array:
        return x @ self[f"{name}.weight"].T

    def swiglu(self, x: Array, name: str) -> Array:
        gate, up = (self.project(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.project(gate * sigmoid(gate) * up, f"{name}.down_proj")


def rotate(x: Array, base: float, *, interleaved: bool) -> Array:
    """Rotate [tokens, heads, width] by the positions 0, 1, 2 ..."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    pairs = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    first = pairs[0] * np.cos(angles) - pairs[1] * np.sin(angles)
    second = pairs[0] * np.sin(angles) + pairs[1] * np.cos(angles)
    if interleaved:
        return np.stack([first, second], axis=-1).reshape(x.shape)
    return np.concatenate([first, second], axis=-1)


def attend(queries: Array, keys: Array, values: Array, scale: float) -> Array:
    """Return the causal attention of [tokens, heads, width], joined over heads."""
    scores = np.einsum("qhd,khd->hqk", queries, keys) * scale
    scores = np.where(np.tri(len(queries), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).reshape(len(queries), -1)


def route(x: Array, scores: Array, ranks: Array, tensors: Tensors, config: Any) -> Array:
    """Return the sum of the best experts of each token, weighted by their normed scores."""
    output = np.zeros_like(x)
    for at, token in enumerate(x):
        best = np.argsort(-ranks[at])[: config["num_experts_per_tok"]]
        weights = scores[at, best] / scores[at, best].sum()
        for expert, weight in zip(best, weights, strict=True):
            output[at] += weight * tensors.swiglu(token, f"mlp.experts.{expert}")
    return output


def latent_layer(x: Array, tensors: Tensors, config: Any) -> Array:
    """Compute a layer of GLM-4.7-Flash: latent attention, and experts with a bias to choose."""
    heads, nope, latent = (
        config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank")
    )
    project, norm = tensors.project, tensors.norm
    inputs = norm(x, "input_layernorm")
    compressed = norm(project(inputs, "self_attn.q_a_proj"), "self_attn.q_a_layernorm")
    queries = project(compressed, "self_attn.q_b_proj").reshape(len(x), heads, -1)
    both = project(inputs, "self_attn.kv_a_proj_with_mqa")
    shared = rotate(both[:, None, latent:], config["rope_theta"], interleaved=True)
    normed = norm(both[:, :latent], "self_attn.kv_a_layernorm")
    pairs = project(normed, "self_attn.kv_b_proj").reshape(len(x), heads, -1)
    keys = np.concatenate([pairs[..., :nope], np.repeat(shared, heads, axis=1)], axis=-1)
    turned = rotate(queries[..., nope:], config["rope_theta"], interleaved=True)
    queries = np.concatenate([queries[..., :nope], turned], axis=-1)
    attended = attend(queries, keys, pairs[..., nope:], queries.shape[-1] ** -0.5)
    x = x + project(attended, "self_attn.o_proj")

    inputs = norm(x, "post_attention_layernorm")
    scores = sigmoid(project(inputs, "mlp.gate"))
    ranks = scores + tensors["mlp.gate.e_score_correction_bias"]
    routed = route(inputs, scores, ranks, tensors, config) * config["routed_scaling_factor"]
    return x + routed + tensors.swiglu(inputs, "mlp.shared_experts")


def gated_layer(x: Array, tensors: Tensors, config: Any) -> Array:
    """Compute a layer of Qwen3-Next with gated attention, and an expert that each token has."""
    heads, width = config["num_attention_heads"], config["head_dim"]
    turned = int(width * config["partial_rotary_factor"])
    copies = heads // config["num_key_value_heads"]
    project, norm = tensors.project, tensors.norm

    def place(vectors: Array, name: str) -> Array:
        normed = norm(vectors, f"self_attn.{name}")
        first = rotate(normed[..., :turned], config["rope_theta"], interleaved=False)
        return np.concatenate([first, normed[..., turned:]], axis=-1)

    inputs = norm(x, "input_layernorm")
    both = project(inputs, "self_attn.q_proj").reshape(len(x), heads, 2, width)
    keys, values = (
        project(inputs, f"self_attn.{name}_proj").reshape(len(x), -1, width) for name in "kv"
    )
    attended = attend(
        place(both[:, :, 0], "q_norm"),
        np.repeat(place(keys, "k_norm"), copies, axis=1),
        np.repeat(values, copies, axis=1),
        width**-0.5,
    )
    x = x + project(attended * sigmoid(both[:, :, 1].reshape(len(x), -1)), "self_attn.o_proj")

    inputs = norm(x, "post_attention_layernorm")
    scores = np.exp(project(inputs, "mlp.gate"))
    gate = sigmoid(project(inputs, "mlp.shared_expert_gate"))
    shared = gate * tensors.swiglu(inputs, "mlp.shared_expert")
    return x + route(inputs, scores, scores, tensors, config) + shared


LAYERS: dict[str, Callable[[Array, Tensors, Any], Array]] = {
    "GLM-4.7-Flash": latent_layer,
    "Qwen3-Next": gated_layer,
}


class Reference:
    """The head of a family, computed in NumPy over all tokens again."""

    def __init__(self, name: str, folder: Path, checkpoint: Checkpoint) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._names = HEADS[name]
        prefix = self._names.prefix.format(layers=self._config["num_hidden_layers"])
        self._tensors = Tensors()
        self._tensors.epsilon = self._config["rms_norm_eps"]
        for key, array in mx.load(str(folder / HEAD_FILE)).items():
            short = key.removeprefix(prefix).removeprefix(self._names.layer)
            # Published norms less one are rounded when one is added, as in mlx-vlm and mlx-lm.
            less_one = self._names.norms_less_one and short.endswith(NORMS)
            self._tensors[short] = np.array((array + less_one).astype(mx.float32))
        self._layer = LAYERS[name]
        language = checkpoint.target.language
        self._embeddings = np.array(language.model.embed_tokens.weight)
        self._output = np.array(language.lm_head.weight)

    def forward(self, tokens: list[int], hidden: Array) -> Array:
        names, tensors = self._names, self._tensors
        parts = (self._embeddings[tokens], names.embedding_norm), (hidden, names.hidden_norm)
        mixed = np.concatenate([tensors.norm(*part) for part in parts], axis=-1)
        state = tensors.project(mixed, names.projection)
        return tensors.norm(self._layer(state, tensors, self._config), names.norm)

    def draft(self, tokens: list[int], hidden: Array) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < DRAFT_TOKENS:
            last = self.forward(tokens, hidden)[-1:]
            drafts.append(int((last @ self._output.T).argmax()))
            tokens, hidden = [*tokens, drafts[-1]], np.concatenate([hidden, last])
        return drafts


def write(tmp_path: Path, name: str, weights: Format = BF16) -> tuple[Path, Path]:
    """Write a model as conversions leave it, and its head with the owner's configuration."""
    write_checkpoint(tmp_path / "model", family(name), weights)
    write_head(tmp_path / "head", family(name))
    return tmp_path / "model", tmp_path / "head"


@pytest.mark.parametrize("name", LAYERS)
def test_a_head_of_the_published_layout_drafts_as_the_pass_in_numpy(tmp_path, name) -> None:
    model, folder = write(tmp_path, name)
    checkpoint = load_checkpoint(model, mtp=folder)
    target, head = checkpoint.target, checkpoint.head
    assert head is not None
    positions = mx.arange(len(TOKENS))[None]
    hidden = target.forward(mx.array([TOKENS]), target.new_caches(), positions)
    following = [*TOKENS[1:], 99]
    caches, parts = head.new_caches(), []
    for part in (slice(READ_AT_ONCE), *(slice(at, at + 1) for at in range(READ_AT_ONCE, 20))):
        ids = mx.array([following[part]])
        parts.append(head.forward(ids, hidden[:, part], caches, positions[:, part]))
    actual, state = mx.concatenate(parts, axis=1), parts[-1]

    reference = Reference(name, folder, checkpoint)
    expected = reference.forward(following, np.array(hidden[0]))
    assert np.abs(np.array(actual[0]) - expected).max() < 1e-3 * np.abs(expected).max()

    whole = mx.zeros((1, 0), dtype=mx.int32)
    drafts = [head.draft(state, whole)]
    while len(drafts) < DRAFT_TOKENS:
        position = positions[:, -1:] + len(drafts)
        state = head.forward(drafts[-1][:, None], state, caches, position)
        drafts.append(head.draft(state, whole))
    assert [each.item() for each in drafts] == reference.draft(following, np.array(hidden[0]))


@pytest.mark.parametrize("name", LAYERS)
def test_answers_with_the_drafts_of_a_head_are_those_without(tmp_path: Path, name: str) -> None:
    """The model is quantised, as conversions without a head are, and its head is not."""
    model, folder = write(tmp_path, name, FOUR_BIT)
    checks = check_checkpoint(
        model, mtp=folder, prompt_lengths=(30, 50), answer_tokens=12, mlx_lm=False
    )
    assert checks.problems == []
    assert checks.drafted_by_head > 0
    assert checks.accepted > 0, "prompt lookup drafts beside it"


@pytest.mark.parametrize("name", ["GLM-4.7-Flash", "Qwen3-Next"])
def test_a_head_in_the_folder_of_its_model_is_found(tmp_path: Path, name: str) -> None:
    model, folder = write(tmp_path, name)
    target = load_checkpoint(model).target
    config = json.loads((folder / "config.json").read_text())
    assert load_own_head(model, config, target)[0] is None
    (folder / HEAD_FILE).rename(model / HEAD_FILE)
    head, reason = load_own_head(model, config, target)
    assert (head is not None, reason) == (True, None)


def test_a_head_that_lacks_a_tensor_is_not_used_and_told(tmp_path: Path) -> None:
    model, folder = write(tmp_path, "GLM-4.7-Flash")
    tensors = mx.load(str(folder / HEAD_FILE))
    mx.save_safetensors(
        str(model / HEAD_FILE), {name: a for name, a in tensors.items() if "eh_proj" not in name}
    )
    checkpoint = load_checkpoint(model)
    assert checkpoint.head is None
    assert "are not those of an MTP head" in (checkpoint.mtp_unavailable_reason or "")


def test_without_a_head_the_names_of_the_missing_tensors_are_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family("GLM-4.7-Flash"))
    checkpoint = load_checkpoint(tmp_path)
    layers = checkpoint.target.language.args.num_hidden_layers
    assert checkpoint.head is None
    assert f"no model.layers.{layers}.* tensors" in (checkpoint.mtp_unavailable_reason or "")


@pytest.mark.parametrize("name", ["GLM-4.7-Flash", "Qwen3-Next"])
def test_a_head_that_mlx_vlm_has_split_from_its_model_is_the_same(tmp_path, name) -> None:
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter  # noqa: PLC0415

    model, folder = write(tmp_path, name)
    splitter = get_mtp_splitter(source_config=json.loads((folder / "config.json").read_text()))
    splitter.split(str(folder), str(tmp_path / "bf16"))
    splitter.split(str(folder), str(tmp_path / "4-bit"), q_bits=4, q_group_size=64)
    own = load_checkpoint(model, mtp=folder)
    hidden = mx.random.normal((1, 1, own.target.language.args.hidden_size))
    states = []
    for each in (folder, tmp_path / "bf16", tmp_path / "4-bit"):
        head = load_checkpoint(model, mtp=each).head
        assert head is not None
        states.append(head.forward(mx.array([[80]]), hidden, head.new_caches(), mx.array([[0]])))
    assert mx.allclose(states[0], states[1], atol=1e-5).item()
    assert 0 < mx.abs(states[0] - states[2]).max().item() < mx.abs(states[0]).max().item()


def test_a_head_of_another_family_is_refused_in_one_sentence(tmp_path: Path) -> None:
    model, folder = write(tmp_path, "GLM-4.7-Flash")
    write_head(tmp_path / "other", family("Qwen3-Next"))
    with pytest.raises(HeadUnusable, match="cannot be loaded") as raised:
        load_checkpoint(model, mtp=tmp_path / "other")
    assert "\n" not in str(raised.value)
    assert load_checkpoint(model, mtp=folder).head is not None
