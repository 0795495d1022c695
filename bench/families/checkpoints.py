"""Tiny random checkpoints of model families, in the formats that people download.

A checkpoint has the names and the layout of mlx-community's conversions: those of a model without
pictures as mlx-lm writes them. Tokenizer and chat template are the demo's.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.utils import get_model_and_args, update_module_configs

from bench.families.configs import Family, Json
from workers.demo import CHECKPOINT

VOCABULARY: Final = 1536
"""Of the demo's tokenizer."""
_TOKENIZER: Final = ("tokenizer.json", "chat_template.jinja")
_SPREAD: Final = 0.5
"""Of weights that a family initialises with zeros: equal scores of experts would be ties."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the weights are stored."""

    name: str
    quantization: Json | None = None


FORMATS: Final = (
    Format("bf16"),
    Format("4-bit g64", {"group_size": 64, "bits": 4}),
    Format("4-bit g32", {"group_size": 32, "bits": 4}),
    Format("8-bit", {"group_size": 64, "bits": 8}),
    Format("mxfp4", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
)


def write_checkpoint(
    folder: Path,
    family: Family,
    weights: Format = FORMATS[0],
    *,
    vocabulary: int | None = VOCABULARY,
    window_tokens: int | None = None,
    seed: int = 0,
) -> None:
    """Write a checkpoint of random weights; `window_tokens` replaces the published window.

    A vocabulary of None is the published one.
    """
    config = family.config(vocabulary, window_tokens=window_tokens)
    mx.random.seed(seed)
    model = build(config)
    model.update(
        tree_unflatten([(name, _randomise(a)) for name, a in tree_flatten(model.parameters())])
    )
    if family.tied:
        model.language_model.lm_head.weight = model.language_model.model.embed_tokens.weight
    if weights.quantization is not None:
        nn.quantize(model, class_predicate=_is_quantised, **weights.quantization)
        config["quantization"] = weights.quantization
    tensors = dict(tree_flatten(model.parameters()))
    if "vision_config" not in config:
        tensors = {name.removeprefix("language_model."): array for name, array in tensors.items()}
    if family.tied and weights.quantization is None:  # a quantised conversion has both
        tensors = {name: array for name, array in tensors.items() if "lm_head" not in name}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, family)


def build(config: Json) -> Any:
    """Build the model of a configuration, as mlx-vlm does when it loads one."""
    module, _ = get_model_and_args(config)
    config = {**config, "vision_config": config.get("vision_config", {})}
    config.setdefault("text_config", {})
    model_config = module.ModelConfig.from_dict(dict(config))
    parts = ("text", "vision", "perceiver", "projector", "audio")
    return module.Model(update_module_configs(model_config, module, config, parts))


def _randomise(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if not mx.any(array).item():
        array = mx.random.normal(array.shape) * _SPREAD
    return array.astype(mx.bfloat16)


def _is_quantised(name: str, module: Any) -> bool:
    if not hasattr(module, "to_quantized") or "vision" in name or "projector" in name:
        return False
    return bool(module.weight.shape[-1] % 64 == 0)


def _write_tokenizer(folder: Path, family: Family) -> None:
    for name in _TOKENIZER:
        shutil.copy(CHECKPOINT / name, folder / name)
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    config["processor_class"] = family.processor.get("processor_class")
    if not family.processor:
        del config["processor_class"]
    else:
        _write_json(folder / "preprocessor_config.json", family.processor)
        config |= {
            "image_token": "<|image_pad|>",
            "boi_token": "<|vision_start|>",
            "eoi_token": "<|vision_end|>",
        }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": 2})


def _write_json(path: Path, document: Json) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")
