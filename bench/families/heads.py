"""MTP heads of random weights, with the tensors that the owners of the models publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.gemma4_assistant import Gemma4AssistantDraftModel
from mlx_vlm.speculative.drafters.gemma4_assistant.config import Gemma4AssistantConfig

from bench.families.checkpoints import VOCABULARY, build
from bench.families.configs import Family, Json
from workers.engine.model.families.gemma4 import SLIDING

HEAD_FILE: Final = "model-mtp.safetensors"
_SPREAD: Final = 0.1
NORMS: Final = ("layernorm.weight", "norm.weight", "norm_hidden.weight", "norm_embedding.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedHead:
    """The names of a head in the checkpoint of a family."""

    prefix: str
    """Of its tensors; {layers} is the number of layers of the model."""
    layer: str = ""
    """Of its layer, after the prefix."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    copies: tuple[str, ...] = ()
    """Weights of the model that the head has once more."""
    options: Json = field(default_factory=dict)
    """What makes the first layer of a model one like that of the head."""
    norms_less_one: bool = False
    """Whether the weights of norms are published less one."""


_NEXTN: Final = PublishedHead(
    prefix="model.layers.{layers}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    norm="shared_head.norm",
    copies=("embed_tokens", "shared_head.head"),
    options={"first_k_dense_replace": 0},
)
HEADS: Final[Mapping[str, PublishedHead]] = {
    "Qwen3-Next": PublishedHead(
        prefix="mtp.",
        layer="layers.0.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        norm="norm",
        options={"full_attention_interval": 1},
        norms_less_one=True,
    ),
    "GLM-4.7-Flash": _NEXTN,
    "GLM-4.6": _NEXTN,
    "DeepSeek V3": _NEXTN,
}
"""By the name of the family."""


ASSISTED: Final = "Gemma 4"
"""The family whose head is an assistant: a small model that reads its keys and values."""
HEADED: Final = frozenset((*HEADS, ASSISTED))
"""All families that have a head."""


def write_head(folder: Path, family: Family, *, seed: int = 1) -> dict[str, mx.array]:
    """Write the head of a family into a folder, with a configuration if it has none; return it."""
    mx.random.seed(seed)
    if family.name == ASSISTED:
        return write_assistant(folder, family.config(VOCABULARY))
    config, head = family.config(VOCABULARY), HEADS[family.name]
    model = build({**config, "num_hidden_layers": 1, **head.options})
    width = config["hidden_size"]
    layer = dict(tree_flatten(model.language_model.model.layers[0].parameters()))
    tensors = {f"{head.layer}{name}": array for name, array in _publish(layer, config).items()}
    for norm in (head.embedding_norm, head.hidden_norm, head.norm):
        tensors[f"{norm}.weight"] = mx.ones(width)
    spread = (2 * width) ** -0.5
    tensors[f"{head.projection}.weight"] = mx.random.normal((width, 2 * width)) * spread
    for copy in head.copies:
        tensors[f"{copy}.weight"] = mx.zeros((VOCABULARY, width))
    prefix = head.prefix.format(layers=config["num_hidden_layers"])
    tensors = {f"{prefix}{name}": _spread(name, array, head) for name, array in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / HEAD_FILE), tensors, metadata={"format": "pt"})
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config))
    return tensors


def write_assistant(folder: Path, config: Json, *, clusters: int = 32) -> dict[str, mx.array]:
    """Write an assistant for a text model of Gemma 4 into a folder; return its tensors.

    Its output layer scores the tokens of a few `clusters`, as those of E2B and E4B, or without any
    all tokens, as that of 31B.
    """
    layers = [SLIDING, SLIDING, "full_attention"]
    text = config | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": len(layers),
        "num_kv_shared_layers": len(layers),
        "layer_types": layers,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }
    published = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config["hidden_size"],
        "use_ordered_embeddings": bool(clusters),
        "num_centroids": clusters or 1,
        "centroid_intermediate_top_k": 4,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    model = Gemma4AssistantDraftModel(Gemma4AssistantConfig.from_dict(published))
    tensors = dict(tree_flatten(model.parameters()))
    if clusters:
        order = mx.random.permutation(config["vocab_size"])
        tensors["masked_embedding.token_ordering"] = order.astype(mx.int64)
    floats = {name: one for name, one in tensors.items() if mx.issubdtype(one.dtype, mx.floating)}
    for name, array in floats.items():
        spread = mx.random.normal(array.shape) * _SPREAD
        tensors[name] = (array + spread).astype(mx.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / HEAD_FILE), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published))
    return tensors


def _spread(name: str, array: mx.array, head: PublishedHead) -> mx.array:
    array = array + mx.random.normal(array.shape) * _SPREAD
    if head.norms_less_one and name.endswith(NORMS):
        array = array - 1.0
    return array.astype(mx.bfloat16)


def _publish(layer: Mapping[str, mx.array], config: Json) -> dict[str, mx.array]:
    """Return the tensors of a layer as publishers write them: each expert has its own."""
    tensors: dict[str, mx.array] = {}
    for name, array in layer.items():
        before, stacked, projection = name.partition("switch_mlp.")
        if stacked:
            for expert in range(array.shape[0]):
                tensors[f"{before}experts.{expert}.{projection}"] = array[expert]
        elif "embed_q" not in name and "unembed_out" not in name:
            tensors[name] = array
    queries: Any = layer.get("self_attn.embed_q.weight")
    if queries is not None:  # mlx-vlm splits the projection of latent keys and values
        both = mx.concatenate(
            [queries.swapaxes(-1, -2), layer["self_attn.unembed_out.weight"]], axis=1
        )
        tensors["self_attn.kv_b_proj.weight"] = both.reshape(-1, config["kv_lora_rank"])
    return tensors
