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


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family and one published configuration of it."""

    name: str
    source: str
    """Repository of the configuration."""
    tiny: Json
    """Sizes that replace the published ones, and the vision tower of Qwen; objects are merged."""
    window: str = ""
    """Field of the text model with the size of its window or chunk; empty: it has none."""
    mlx_lm: bool = True
    """Whether mlx-lm loads the same checkpoint."""
    tied: bool = False
    """Whether the output layer is the embedding although the configuration does not say so."""
    processor: Json = field(default_factory=dict)
    """`preprocessor_config.json`, if the family needs one."""
    template: str = ""
    """Its published chat template in the collections of `bench.attack.templates`; empty: they have
    none of it."""

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
        config = merge(self.published, self.tiny)
        text = config.get("text_config", config)
        if vocabulary is not None:
            config["vocab_size"] = text["vocab_size"] = vocabulary
        if window_tokens is not None and self.window:
            text[self.window] = window_tokens
        return config


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Json:
    """Return a copy of a JSON object with changes; nested objects are merged, None removes."""
    merged: Json = {
        key: merge(value, {}) if isinstance(value, dict) else value for key, value in base.items()
    }
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _sizes(**others: Any) -> Json:
    """Return the sizes of a tiny text model of the usual names."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        **others,
    }


def _qwen_vision(model_type: str, *, out_hidden_size: int = 64) -> Json:
    """Return a vision tower of Qwen whose sizes are tiny; the files leave it out."""
    return {
        "model_type": model_type,
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "out_hidden_size": out_hidden_size,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    }


_QWEN_PROCESSOR: Json = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16384, "longest_edge": 16384},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_TINY_LINEAR: Json = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_TINY_QWEN35: Json = _sizes(
    head_dim=32,
    num_hidden_layers=4,
    rope_parameters={"mrope_section": [2, 1, 1]},
    eos_token_id=2,
    **_TINY_LINEAR,
)
_MARKS: Json = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
}

FAMILIES: tuple[Family, ...] = (
    Family(
        # The sizes by which Metal chooses its fused attention and its packed kernels: heads of 256
        # and 128, six queries for each key, widths that 512 divides.
        name="Qwen3.5, real head sizes",
        source="Qwen/Qwen3.5-27B",
        template="Qwen3.5-4B",
        tiny={
            **_MARKS,
            "eos_token_id": 2,
            "text_config": {
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
            "vision_config": _qwen_vision("qwen3_5", out_hidden_size=512),
        },
        processor=_QWEN_PROCESSOR,
    ),
    Family(
        name="Qwen3.5",
        source="Qwen/Qwen3.5-4B",
        template="Qwen3.5-4B",
        tiny={
            **_MARKS,
            "eos_token_id": 2,
            "text_config": _TINY_QWEN35,
            "vision_config": _qwen_vision("qwen3_5"),
        },
        processor=_QWEN_PROCESSOR,
    ),
    Family(
        name="Qwen3.5 MoE",
        source="Qwen/Qwen3.5-35B-A3B",
        template="Qwen3.5-4B",
        tiny={
            **_MARKS,
            "eos_token_id": 2,
            "text_config": {
                **_TINY_QWEN35,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
            },
            "vision_config": _qwen_vision("qwen3_5_moe"),
        },
        processor=_QWEN_PROCESSOR,
    ),
    Family(
        name="Qwen3.5 text",
        source="Qwen/Qwen3.5-4B, language model alone",
        template="Qwen3.5-4B",
        tiny=_TINY_QWEN35,
        mlx_lm=False,
    ),
    Family(
        name="Qwen3-Next",
        source="Qwen/Qwen3-Next-80B-A3B-Instruct",
        template="trl/qwen3_instruct_2507",
        tiny=_sizes(
            head_dim=32,
            num_hidden_layers=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            **_TINY_LINEAR,
        ),
    ),
    Family(
        name="Qwen3",
        source="Qwen/Qwen3-4B-Instruct-2507",
        template="Qwen-Qwen3-0.6B",
        tiny=_sizes(head_dim=32, max_window_layers=2, bos_token_id=0, eos_token_id=2),
    ),
    Family(
        name="Qwen3 MoE",
        source="Qwen/Qwen3-30B-A3B-Instruct-2507",
        template="Qwen-Qwen3-0.6B",
        tiny=_sizes(
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            eos_token_id=2,
        ),
    ),
    Family(
        name="Qwen3-VL",
        source="Qwen/Qwen3-VL-4B-Instruct",
        template="trl/qwen3_vl",
        tiny={
            **_MARKS,
            "text_config": _sizes(
                head_dim=32, rope_scaling={"mrope_section": [6, 5, 5]}, eos_token_id=2
            ),
            "vision_config": _qwen_vision("qwen3_vl"),
        },
        processor=_QWEN_PROCESSOR,
    ),
    Family(
        name="Qwen3-VL MoE",
        source="Qwen/Qwen3-VL-30B-A3B-Instruct",
        template="trl/qwen3_vl",
        tiny={
            **_MARKS,
            "text_config": _sizes(
                head_dim=32,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                rope_scaling={"mrope_section": [6, 5, 5]},
                eos_token_id=2,
            ),
            "vision_config": _qwen_vision("qwen3_vl_moe"),
        },
        mlx_lm=False,
        processor=_QWEN_PROCESSOR,
    ),
    Family(
        name="Llama 3",
        source="meta-llama/Llama-3.2-3B-Instruct",
        template="meta-llama-Llama-3.2-3B-Instruct",
        tiny=_sizes(head_dim=32, bos_token_id=0, eos_token_id=2),
    ),
    Family(
        name="Llama 4",
        source="meta-llama/Llama-4-Scout-17B-16E-Instruct",
        template="axolotl/llama4",
        tiny={
            "boi_token_index": 3,
            "eoi_token_index": 4,
            "image_token_index": 5,
            "eos_token_id": 2,
            "text_config": _sizes(
                head_dim=32,
                num_hidden_layers=4,
                intermediate_size_mlp=128,
                num_local_experts=4,
                moe_layers=[0, 1, 2, 3],
                bos_token_id=0,
                eos_token_id=2,
            ),
            "vision_config": {
                "hidden_size": 64,
                "image_size": 56,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "vision_output_dim": 64,
            },
        },
        window="attention_chunk_size",
    ),
    Family(
        name="Mistral",
        source="mistralai/Mistral-7B-Instruct-v0.3",
        template="mistralai-Mistral-Nemo-Instruct-2407",
        tiny=_sizes(),
    ),
    Family(
        name="Ministral 3",
        source="mistralai/Ministral-3-8B-Instruct-2512, language model alone",
        template="mistralai-Ministral-3-14B-Reasoning-2512",
        tiny=_sizes(head_dim=32),
    ),
    Family(
        name="Gemma 3",
        source="google/gemma-3-4b-it",
        template="trl/gemma3",
        # As published its text model is sparse: heads, widths, patterns and context are defaults.
        tiny={
            "boi_token_index": 3,
            "eoi_token_index": 4,
            "image_token_index": 5,
            "eos_token_id": 2,
            "text_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6},
            "vision_config": {
                "hidden_size": 64,
                "image_size": 224,
                "intermediate_size": 128,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
            },
        },
        tied=True,
        window="sliding_window",
        processor={
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
        },
    ),
    Family(
        name="Gemma 3 text",
        source="google/gemma-3-1b-it",
        template="trl/gemma3",
        tiny=_sizes(
            num_hidden_layers=6, head_dim=32, num_key_value_heads=1, eos_token_id=2, bos_token_id=0
        ),
        tied=True,
        window="sliding_window",
    ),
    Family(
        name="Gemma 4",
        source="google/gemma-4-E4B-it, language model alone",
        template="google-gemma-4-31B-it",
        tiny=_sizes(
            num_hidden_layers=9,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=3,
            head_dim=32,
            global_head_dim=64,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=1536,
            eos_token_id=2,
            bos_token_id=0,
        ),
        window="sliding_window",
    ),
    Family(
        name="gpt-oss",
        source="openai/gpt-oss-20b",
        template="openai-gpt-oss-120b",
        tiny=_sizes(
            head_dim=32,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_per_token=2,
            eos_token_id=2,
        ),
        window="sliding_window",
    ),
    Family(
        name="GLM-4.6",
        source="zai-org/GLM-4.6",
        template="GLM-4.6",
        tiny=_sizes(
            head_dim=32,
            first_k_dense_replace=1,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            eos_token_id=2,
        ),
    ),
    Family(
        name="GLM-4.7-Flash",
        source="zai-org/GLM-4.7-Flash",
        template="GLM-4.7-Flash",
        tiny=_sizes(
            num_key_value_heads=4,
            kv_lora_rank=64,
            q_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            eos_token_id=2,
        ),
    ),
    Family(
        name="DeepSeek V3",
        source="deepseek-ai/DeepSeek-V3-0324",
        template="deepseek-ai-DeepSeek-V3.1",
        tiny=_sizes(
            num_key_value_heads=4,
            first_k_dense_replace=1,
            kv_lora_rank=64,
            q_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
            moe_intermediate_size=64,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            eos_token_id=2,
        ),
    ),
    Family(
        name="Phi-3",
        source="microsoft/Phi-3-mini-4k-instruct",
        template="microsoft-Phi-3.5-mini-instruct",
        tiny=_sizes(num_key_value_heads=4, eos_token_id=2),
    ),
    Family(
        name="Seed-OSS",
        source="ByteDance-Seed/Seed-OSS-36B-Instruct",
        template="ByteDance-Seed-OSS",
        tiny=_sizes(head_dim=32),
    ),
    Family(
        name="LFM2",
        source="LiquidAI/LFM2-1.2B",
        template="LFM2-8B-A1B",
        tiny={
            "hidden_size": 64,
            "block_dim": 64,
            "block_ff_dim": 192,
            "block_multiple_of": 64,
            "full_attn_idxs": [1, 3],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "eos_token_id": 2,
        },
    ),
    Family(
        name="MiMo-V2-Flash",
        source="XiaomiMiMo/MiMo-V2-Flash",
        tiny=_sizes(
            num_hidden_layers=4,
            hybrid_layer_pattern=[0, 1, 1, 0],
            moe_layer_freq=[0, 1, 1, 1],
            head_dim=48,
            v_head_dim=32,
            swa_head_dim=48,
            swa_v_head_dim=32,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
        ),
        window="sliding_window_size",
    ),
    Family(
        name="OLMo 3",
        source="allenai/Olmo-3-7B-Instruct",
        tiny=_sizes(
            num_key_value_heads=4,
            num_hidden_layers=4,
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
            eos_token_id=2,
        ),
        window="sliding_window",
    ),
    Family(
        name="Command R7B",
        source="CohereLabs/c4ai-command-r7b-12-2024",
        template="CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        tiny=_sizes(head_dim=16, num_hidden_layers=4, eos_token_id=2),
        window="sliding_window",
    ),
    Family(
        name="EXAONE 4",
        source="LGAI-EXAONE/EXAONE-4.0-32B",
        template="axolotl/exaone4",
        tiny=_sizes(
            head_dim=32,
            num_hidden_layers=4,
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
            eos_token_id=2,
        ),
        window="sliding_window",
    ),
    Family(
        name="SmolLM3",
        source="HuggingFaceTB/SmolLM3-3B",
        template="HuggingFaceTB-SmolLM3-3B",
        tiny=_sizes(
            num_hidden_layers=4,
            layer_types=["full_attention"] * 4,
            no_rope_layers=[1, 1, 1, 0],
            eos_token_id=2,
        ),
    ),
    Family(
        name="MiniMax-M2",
        source="MiniMaxAI/MiniMax-M2",
        template="MiniMax-M2",
        tiny=_sizes(
            head_dim=32,
            attn_type_list=[1, 1],
            rotary_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            eos_token_id=2,
        ),
    ),
)


def family(name: str) -> Family:
    """Return a family by its name."""
    return next(one for one in FAMILIES if one.name == name)
