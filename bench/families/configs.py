"""Model families: the configurations that their owners publish, and the sizes that make them tiny.

A file in `published/` has the fields of a `config.json` on Hugging Face, with the values that
decide how a model is built (windows, patterns of layers, rotary positions, experts). What that file
leaves out is left out here too. The vocabulary is that of the demo's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

PUBLISHED: Final = Path(__file__).parent / "published"
_TINY: Final[Json] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_v_head_dim": 32,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "rotary_dim": 16,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "eos_token_id": 2,
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "boi_token_index": 3,
    "eoi_token_index": 4,
    "image_token_index": 5,
}
"""What replaces the fields of these names where a file has them."""


@dataclass(frozen=True)
class Family:
    """A model family and one published configuration of it."""

    name: str
    source: str
    """Repository of the configuration."""
    template: str = ""
    """Its published chat template in the collections of `bench.attack.templates`; empty: they have
    none of it."""
    text: Json = field(default_factory=dict)
    """Fields of the text model with other values; objects are merged."""
    vision: Json = field(default_factory=dict)
    """Fields of the vision tower; that of Qwen, which the files leave out."""
    window: str = ""
    """Field of the text model with the size of its window or chunk; empty: it has none."""
    mlx_lm: bool = True
    """Whether mlx-lm loads the same checkpoint."""
    tied: bool = False
    """Whether the output layer is the embedding although the configuration does not say so."""
    processor: Json = field(default_factory=dict)
    """`preprocessor_config.json`, if the family needs one."""
    published_sizes: bool = False
    """Whether only the given fields have other values, and the marks of the tokenizer."""

    @cached_property
    def published(self) -> Json:
        """Return the published configuration, whose file has the name of the family."""
        name = self.name.lower().replace(",", "").replace(" ", "-")
        configuration: Json = json.loads((PUBLISHED / f"{name}.json").read_text())
        return configuration

    def config(self, vocabulary: int | None, *, window_tokens: int | None = None) -> Json:
        """Return a tiny configuration; `window_tokens` replaces the published window.

        Without a vocabulary it is the published one, or none where the file leaves it out.
        """
        config = merge(self.published, {})
        text = config.get("text_config", config)
        for part in (config, text):
            kept = self.published_sizes and part is text
            part |= {key: value for key, value in _TINY.items() if key in part and not kept}
        text |= merge(text, self.text)
        if self.vision:
            config["vision_config"] = merge(config.get("vision_config", {}), self.vision)
        if vocabulary is not None:
            config["vocab_size"] = text["vocab_size"] = vocabulary
        if window_tokens is not None and self.window:
            text[self.window] = window_tokens
        return config


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Json:
    """Return a copy of a JSON object with changes; nested objects are merged."""
    merged: Json = {
        key: merge(value, {}) if isinstance(value, dict) else value for key, value in base.items()
    }
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _qwen(model_type: str, *, out_hidden_size: int = 64) -> Json:
    """Return the fields of a family with a tiny vision tower of Qwen."""
    tower = {
        "model_type": model_type,
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "out_hidden_size": out_hidden_size,
        "num_heads": 2,
        "patch_size": 16,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {"vision": tower, "processor": _QWEN_PROCESSOR}


_QWEN_PROCESSOR: Final[Json] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16384, "longest_edge": 16384},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_GEMMA_PROCESSOR: Final[Json] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_seq_length": 256,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 224, "width": 224},
}
_QWEN35: Final[Json] = {"num_hidden_layers": 4, "rope_parameters": {"mrope_section": [2, 1, 1]}}
_MROPE: Final[Json] = {"rope_scaling": {"mrope_section": [6, 5, 5]}}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_BOS: Final = {"bos_token_id": 0}

FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        # The sizes by which Metal chooses its fused attention and its packed kernels: heads of 256
        # and 128, six queries for each key, widths that 512 divides.
        *("Qwen3.5, real head sizes", "Qwen/Qwen3.5-27B", "Qwen3.5-4B"),
        published_sizes=True,
        text={
            "hidden_size": 512,
            "intermediate_size": 512,
            "full_attention_interval": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "eos_token_id": 2,
        },
        **_qwen("qwen3_5", out_hidden_size=512),
    ),
    Family("Qwen3.5", "Qwen/Qwen3.5-4B", "Qwen3.5-4B", text=_QWEN35, **_qwen("qwen3_5")),
    Family(
        *("Qwen3.5 MoE", "Qwen/Qwen3.5-35B-A3B", "Qwen3.5-4B"),
        text=_QWEN35,
        **_qwen("qwen3_5_moe"),
    ),
    Family(
        *("Qwen3.5 text", "Qwen/Qwen3.5-4B, language model alone", "Qwen3.5-4B"),
        text=_QWEN35,
        mlx_lm=False,
    ),
    Family(
        *("Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct", "trl/qwen3_instruct_2507"),
        text={"num_hidden_layers": 4},
    ),
    Family(
        *("Qwen3", "Qwen/Qwen3-4B-Instruct-2507", "Qwen-Qwen3-0.6B"),
        text={"max_window_layers": 2, **_BOS},
    ),
    Family("Qwen3 MoE", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen-Qwen3-0.6B"),
    Family(
        *("Qwen3-VL", "Qwen/Qwen3-VL-4B-Instruct", "trl/qwen3_vl"),
        text=_MROPE,
        **_qwen("qwen3_vl"),
    ),
    Family(
        *("Qwen3-VL MoE", "Qwen/Qwen3-VL-30B-A3B-Instruct", "trl/qwen3_vl"),
        text=_MROPE,
        mlx_lm=False,
        **_qwen("qwen3_vl_moe"),
    ),
    Family(
        *("Llama 3", "meta-llama/Llama-3.2-3B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"),
        text=_BOS,
    ),
    Family(
        *("Llama 4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "axolotl/llama4"),
        text={"num_hidden_layers": 4, "num_experts_per_tok": 1, "moe_layers": [0, 1, 2, 3], **_BOS},
        vision={
            "hidden_size": 64,
            "image_size": 56,
            "intermediate_size": 256,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        },
        window="attention_chunk_size",
    ),
    Family(
        *("Mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
        "mistralai-Mistral-Nemo-Instruct-2407",
    ),
    Family(
        *("Ministral 3", "mistralai/Ministral-3-8B-Instruct-2512, language model alone"),
        "mistralai-Ministral-3-14B-Reasoning-2512",
    ),
    Family(
        # As published its text model is sparse: heads, widths, patterns and context are defaults.
        *("Gemma 3", "google/gemma-3-4b-it", "trl/gemma3"),
        text={"num_hidden_layers": 6},
        vision={
            "hidden_size": 64,
            "image_size": 224,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
        tied=True,
        window="sliding_window",
        processor=_GEMMA_PROCESSOR,
    ),
    Family(
        *("Gemma 3 text", "google/gemma-3-1b-it", "trl/gemma3"),
        text={"num_hidden_layers": 6, "num_key_value_heads": 1, **_BOS},
        tied=True,
        window="sliding_window",
    ),
    Family(
        *("Gemma 4", "google/gemma-4-E4B-it, language model alone", "google-gemma-4-31B-it"),
        text={
            "num_hidden_layers": 9,
            "layer_types": [_SLIDING, _SLIDING, _FULL] * 3,
            "num_kv_shared_layers": 3,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 1536,
            **_BOS,
        },
        window="sliding_window",
    ),
    Family(
        *("gpt-oss", "openai/gpt-oss-20b", "openai-gpt-oss-120b"),
        text={"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2},
        window="sliding_window",
    ),
    Family("GLM-4.6", "zai-org/GLM-4.6", "GLM-4.6"),
    Family(
        *("GLM-4.7-Flash", "zai-org/GLM-4.7-Flash", "GLM-4.7-Flash"),
        text={"num_key_value_heads": 4},
    ),
    Family(
        *("DeepSeek V3", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai-DeepSeek-V3.1"),
        text={"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    ),
    Family(
        *("Phi-3", "microsoft/Phi-3-mini-4k-instruct", "microsoft-Phi-3.5-mini-instruct"),
        text={"num_key_value_heads": 4},
    ),
    Family("Seed-OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct", "ByteDance-Seed-OSS"),
    Family(
        *("LFM2", "LiquidAI/LFM2-1.2B", "LFM2-8B-A1B"),
        text={
            "block_dim": 64,
            "block_ff_dim": 192,
            "block_multiple_of": 64,
            "full_attn_idxs": [1, 3],
            "num_hidden_layers": 4,
        },
    ),
    Family(
        *("MiMo-V2-Flash", "XiaomiMiMo/MiMo-V2-Flash"),
        text={
            "num_hidden_layers": 4,
            "head_dim": 48,
            "swa_head_dim": 48,
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1],
        },
        window="sliding_window_size",
    ),
    Family(
        *("OLMo 3", "allenai/Olmo-3-7B-Instruct"),
        text={
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layer_types": [*[_SLIDING] * 3, _FULL],
        },
        window="sliding_window",
    ),
    Family(
        *("Command R7B", "CohereLabs/c4ai-command-r7b-12-2024"),
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        text={"head_dim": 16, "num_hidden_layers": 4},
        window="sliding_window",
    ),
    Family(
        *("EXAONE 4", "LGAI-EXAONE/EXAONE-4.0-32B", "axolotl/exaone4"),
        text={"num_hidden_layers": 4, "layer_types": [*[_SLIDING] * 3, _FULL]},
        window="sliding_window",
    ),
    Family(
        *("SmolLM3", "HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB-SmolLM3-3B"),
        text={
            "num_hidden_layers": 4,
            "layer_types": [_FULL] * 4,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Family(
        *("MiniMax-M2", "MiniMaxAI/MiniMax-M2", "MiniMax-M2"),
        text={"attn_type_list": [1, 1]},
    ),
    Family("Gemma 2", "google/gemma-2-2b-it", text=_BOS),
)


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)
