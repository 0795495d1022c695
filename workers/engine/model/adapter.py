"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): small matrices that change a model's weights.

An adapter is a folder with `adapter_config.json` and one safetensors file, as mlx-lm, mlx-vlm or
PEFT writes it. Nothing of it runs. Its names of layers must all be found in the model, and its
shapes must fit: an adapter of another model changes answers, or nothing at all, without an error.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten
from mlx_vlm.trainer.peft import LoRALinear, LoRASwitchLinear
from safetensors import SafetensorError, safe_open

from workers.engine.model.model_folder import read_object
from workers.engine.types import ModelUnusable

_WEIGHTS = ("adapters.safetensors", "adapter_model.safetensors")
_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_MAX_RANK = 1024


class _Pair(NamedTuple):
    """The two matrices of one layer: [inputs, rank] and [rank, outputs], or those of experts."""

    first: mx.array
    second: mx.array


def apply_adapter(model: nn.Module, folder: Path) -> int:
    """Add an adapter to a loaded model; return the number of adapted layers.

    Raises `ModelUnusable` with the reason if the adapter is invalid or does not fit.
    """
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None or not (folder / _CONFIG).is_file():
        raise ModelUnusable(
            f"The folder {folder} holds no LoRA adapter: it needs {_CONFIG} and "
            f"{' or '.join(_WEIGHTS)}."
        )
    try:
        scale = _scale(read_object(folder / _CONFIG))
        with safe_open(weights, framework="numpy"):  # checks the header, which MLX trusts
            pass
        layers = dict(model.named_modules())
        named = [(_find(name, layers), pair) for name, pair in _pairs(mx.load(str(weights)))]
        adapted = [(name, _adapt(layers[name], pair, scale)) for name, pair in named]
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ModelUnusable(f"The adapter in {folder} does not fit the model: {error}.") from error
    model.update_modules(tree_unflatten(adapted))
    model.eval()
    return len(adapted)


def _scale(config: Mapping[str, Any]) -> float:
    kind = config.get("fine_tune_type") or str(config.get("peft_type", "lora")).lower()
    if kind != "lora" or config.get("use_dora"):
        raise ValueError("it is no plain LoRA")
    parameters = config.get("lora_parameters", config)
    if not isinstance(parameters, dict):
        raise ValueError("lora_parameters is no object")
    if "scale" in parameters:
        scale = parameters["scale"]
    else:
        rank: Any = parameters.get("r") or parameters.get("rank") or 0
        alpha: Any = parameters.get("lora_alpha", parameters.get("alpha", 0))
        if not (_is_number(rank) and _is_number(alpha) and 0 < rank <= _MAX_RANK):
            raise ValueError("its configuration has no scale")
        scale = alpha / (math.sqrt(rank) if parameters.get("use_rslora") else rank)
    if not _is_number(scale):
        raise ValueError("its scale is no number")
    return float(scale)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _pairs(tensors: Mapping[str, mx.array]) -> Iterator[tuple[str, _Pair]]:
    """Yield the pair of each layer; raise ValueError for tensors that are none."""
    found: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        layer, _, side = name.removesuffix(".weight").rpartition(".")
        if side.lower() not in ("lora_a", "lora_b"):
            raise ValueError(f"{name} is no matrix of a LoRA")
        # PEFT stores both the other way round.
        transposed = side in ("lora_A", "lora_B")
        found.setdefault(layer.removeprefix(_PEFT_PREFIX), {})[side.lower()] = (
            tensor.swapaxes(-1, -2) if transposed else tensor
        )
    for layer, sides in found.items():
        if len(sides) != 2:
            raise ValueError(f"{layer} has one matrix of two")
        yield layer, _Pair(sides["lora_a"], sides["lora_b"])


def _find(layer: str, layers: Mapping[str, nn.Module]) -> str:
    """Return the name of a layer in the model; raise ValueError if it has none such.

    mlx-lm names the layers of a model with pictures as if it had none, and Transformers puts
    `model` before `language_model`.
    """
    candidates = (
        layer,
        f"language_model.{layer}",
        layer.removeprefix("language_model."),
        layer.replace("model.language_model.", "language_model.model."),
    )
    name = next((one for one in candidates if one in layers), None)
    if name is None:
        raise ValueError(f"the model has no layer {layer[:200]}")
    return name


def _adapt(layer: nn.Module, pair: _Pair, scale: float) -> nn.Module:
    """Return the layer with the pair applied; raise ValueError if the shapes do not fit."""
    if isinstance(layer, nn.Linear | nn.QuantizedLinear):
        kind = LoRALinear
    elif hasattr(layer, "num_experts") and "weight" in layer:
        kind = LoRASwitchLinear
    else:
        raise ValueError(f"it adapts a {type(layer).__name__}")
    rank = pair.second.shape[-2] if kind is LoRALinear else pair.second.shape[-1]
    if not 0 < rank <= _MAX_RANK:
        raise ValueError(f"its rank is {rank}")
    adapted = kind.from_base(layer, r=rank, scale=scale)
    shapes = (adapted.lora_a.shape, adapted.lora_b.shape)
    if shapes != (pair.first.shape, pair.second.shape):
        raise ValueError(f"it has {pair.first.shape} and {pair.second.shape} in place of {shapes}")
    adapted.lora_a, adapted.lora_b = pair
    return adapted
