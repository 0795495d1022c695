"""How families store their MTP heads, and how the modules of a head are loaded.

A head is a block that mlx-vlm can split from its model (Qwen3.5), one more layer of its model's own
kind, or an assistant: a separate small model (Gemma 4). Some layers are stored with copies of
weights of the model, which are not loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.qwen3_5_mtp import Qwen3_5MTPDraftModel
from mlx_vlm.speculative.drafters.qwen3_5_mtp.split import Qwen3_5MTPSplitter
from safetensors import safe_open

from workers.engine.model.known_heads import MTP_PREFIX, text_config

NO_HEAD = "the text-mtp lane supports no MTP head of this model family"
_ONLY_LAYER = "layers.0."
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


class NoTensors(ValueError):
    """A folder has no tensors of a head."""


class HeadFormat(ABC):
    """How a family stores its heads."""

    prefix: str
    """Prefix of the names of a head's tensors in a whole checkpoint with this many `layers`."""

    @abstractmethod
    def load(self, path: Path, config: dict[str, Any], language: Any) -> Any:
        """Return the modules of a head in a folder; raise the errors of the libraries."""

    def tensors(self, config: Mapping[str, Any]) -> str:
        """Return the prefix of the names of the tensors in a whole checkpoint."""
        return self.prefix.format(layers=text_config(config).get("num_hidden_layers"))


class Assistant(HeadFormat):
    """A model in a separate folder."""

    def load(self, path: Path, config: dict[str, Any], language: Any) -> Any:  # noqa: ARG002, D102
        if config.get("model_type") not in _ASSISTANTS:
            raise ValueError("it is no assistant of Gemma 4")
        return load_drafter(str(path), kind="mtp")[0]


class _NestedMtpSplitter(Qwen3_5MTPSplitter):  # type: ignore[misc]  # it has no types
    """Finds the tensors of a head also under `language_model.`, where vllm-mlx writes them."""

    def select_keys(self, key: str, text_config: dict[str, Any]) -> bool:  # noqa: ARG002
        return key.removeprefix("language_model.").startswith(MTP_PREFIX)

    def rename(
        self,
        tensors: dict[str, mx.array],
        text_config: dict[str, Any],  # noqa: ARG002
    ) -> dict[str, mx.array]:
        return {key.removeprefix("language_model."): array for key, array in tensors.items()}


class MtpBlock(HeadFormat):
    """A block that mlx-vlm's own drafter computes."""

    prefix = MTP_PREFIX

    def load(self, path: Path, config: dict[str, Any], language: Any) -> Any:  # noqa: ARG002, D102
        if config.get("model_type") != Qwen3_5MTPSplitter.output_model_type:
            return _NestedMtpSplitter().load(path, source_config=config)
        drafter, _ = load_drafter(str(path), kind="mtp")
        if not isinstance(drafter, Qwen3_5MTPDraftModel):
            raise ValueError(NO_HEAD)
        return drafter


@dataclass(frozen=True, kw_only=True)
class LayerHead(HeadFormat):
    """A head that is one more of the model's own layers."""

    prefix: str
    apart: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Prefix of the names of tensors in a folder that has only a head, by its model type."""
    parts: Mapping[str, str]
    """The names of norms and projection, as `_LayerModule` has them."""
    shared: Sequence[str] = ()
    """Copies of weights that the head shares with its model."""
    options: Mapping[str, Any]
    """Configuration with which a model of the family consists of the head's layer."""
    norms_less_one: bool = False
    """Whether the publisher stores the weights of norms less one, as the conversions do not."""

    def load(self, path: Path, config: dict[str, Any], language: Any) -> nn.Module:
        """Load the layer, renamed as the only layer of a model of its family."""
        tensors: dict[str, mx.array] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as opened:
                named = {key: self._name(key, config) for key in opened.keys()}  # noqa: SIM118
            if any(named.values()):
                arrays = mx.load(str(file))  # reads only what is used
                tensors |= {name: arrays[key] for key, name in named.items() if name}
        if not tensors:
            raise NoTensors("it has no tensors of a head")
        args = type(language.args).from_dict(text_config(config))
        model = type(language)(replace(args, **self.options))
        published = any(".mlp.experts.0." in name for name in tensors)
        tensors = model.sanitize(tensors)
        if self.norms_less_one and published:
            for name in (f"{part}.weight" for part in self.parts.values()):
                if name in tensors and tensors[name].ndim == 1:
                    tensors[name] = tensors[name] + 1.0
        tensors = {name.removeprefix("model."): array for name, array in tensors.items()}
        module = _LayerModule(args.hidden_size, args.rms_norm_eps, model.model.layers[0])
        _quantise(module, tensors, config)
        module.load_weights(list(tensors.items()))
        return module

    def _name(self, key: str, config: Mapping[str, Any]) -> str | None:
        """Return the name of a tensor in a model of one layer; None if it is not of the head."""
        key = key.removeprefix("language_model.")
        prefix = self.tensors(config)
        stripped = self.apart.get(str(config.get("model_type")))
        if stripped is None and not key.startswith(prefix):
            return None
        for one in (prefix,) if stripped is None else stripped:
            key = key.removeprefix(one)
        module, _, name = key.rpartition(".")
        if module in self.shared or name == "inv_freq":
            return None
        if module in self.parts:
            return f"{self.parts[module]}.{name}"
        return f"model.{_ONLY_LAYER}{key.removeprefix(_ONLY_LAYER)}"


class _LayerModule(nn.Module):  # type: ignore[misc]  # MLX has no types
    def __init__(self, width: int, epsilon: float, layer: nn.Module) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(width, epsilon)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, epsilon)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(width, epsilon)


def _quantise(
    module: nn.Module, tensors: Mapping[str, mx.array], config: Mapping[str, Any]
) -> None:
    """Quantise the modules whose tensors are, by the sizes of these."""
    mode = (config.get("quantization") or {}).get("mode", "affine")

    def options(name: str, child: Any) -> bool | dict[str, Any]:
        scales = tensors.get(f"{name}.scales")
        if scales is None or not hasattr(child, "to_quantized"):
            return False
        width = child.weight.shape[-1]
        bits = tensors[f"{name}.weight"].shape[-1] * 32 // width
        return {"group_size": width // scales.shape[-1], "bits": bits, "mode": mode}

    nn.quantize(module, class_predicate=options)
