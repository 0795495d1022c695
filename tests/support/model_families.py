"""Tiny random models of other families, for tests of their shapes and caches."""

from typing import Any

import mlx.core as mx
from mlx_vlm.models import qwen2_5_vl
from mlx_vlm.models.llama import ModelConfig as LlamaConfig
from mlx_vlm.models.llama.language import LanguageModel as Llama

from workers.engine.model.kv_cache import RowCache
from workers.engine.model.target import Target

WINDOW_TOKENS = 16


def tiny_llama(vocabulary: int) -> Target:
    """Make a model whose rows can share a forward pass."""
    return _llama(vocabulary)


def tiny_llama_sliding_window(vocabulary: int) -> Target:
    """Make a model of two layers, one of them with a window of `WINDOW_TOKENS`."""
    return _llama(
        vocabulary,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW_TOKENS,
    )


class Unbatched(Target):
    """A family whose attention takes the caches of one row alone."""

    def forward(self, tokens: mx.array, caches: Any, *arguments: Any, **options: Any) -> mx.array:
        """Raise ValueError for the caches of a batch."""
        if any(isinstance(cache, RowCache) for cache in caches):
            raise ValueError("the mask has another shape than the scores")
        return super().forward(tokens, caches, *arguments, **options)


def tiny_unbatched(vocabulary: int) -> Target:
    """Make a model whose rows cannot share a forward pass."""
    return Unbatched(tiny_llama(vocabulary).model)


def tiny_qwen2_5_vl(vocabulary: int) -> Target:
    """Make the language model of a family with positions of tokens as an argument."""
    mx.random.seed(0)
    name, positions = "qwen2_5_vl", {"type": "default", "mrope_section": [4, 2, 2]}
    text = qwen2_5_vl.TextConfig(model_type=name, **_sizes(vocabulary), rope_scaling=positions)
    vision = qwen2_5_vl.VisionConfig()
    config = qwen2_5_vl.ModelConfig(text_config=text, vision_config=vision, model_type=name)
    return Target(qwen2_5_vl.LanguageModel(text, config))


def _sizes(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
    }


def _llama(vocabulary: int, **windows: Any) -> Target:
    mx.random.seed(0)
    return Target(Llama(LlamaConfig(model_type="llama", **_sizes(vocabulary), **windows)))
