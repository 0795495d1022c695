"""The shape of the demo model: Qwen3.5 with two Gated DeltaNet and two full-attention layers."""

from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx
from mlx_vlm.models.qwen3_5 import Model, ModelConfig
from mlx_vlm.speculative.drafters.qwen3_5_mtp.config import Qwen3_5MTPConfig
from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

from tools.demo_model.tokenizer import VOCABULARY_SIZE

HIDDEN: Final = 128
LAYERS: Final = 4
ATTENTION_EVERY: Final = 2
PATCH: Final = 16
MERGE: Final = 2
PICTURE_PIXELS: Final = 128 * 128
"""The processor scales each picture to about this area: 16 tokens for a square one."""
LONGEST_CONTEXT: Final = 32768

_DECAY_RATES: Final = (1.0, 2.0, 4.0, 8.0)
_DECAY_BIASES: Final = (-4.0, -3.0, -2.0, -1.0)


def model_config(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of `config.json`; `ids` are the numbers of the special tokens."""
    kinds = ("linear_attention", "full_attention")
    text = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "full_attention_interval": ATTENTION_EVERY,
        "layer_types": [kinds[(i + 1) % ATTENTION_EVERY == 0] for i in range(LAYERS)],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": LONGEST_CONTEXT,
        "rope_parameters": {
            "type": "default",
            "rope_type": "default",
            "rope_theta": 100000,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "eos_token_id": ids["<|im_end|>"],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    vision = {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 192,
        "out_hidden_size": HIDDEN,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY_SIZE,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def new_model(config: Mapping[str, Any], seed: int) -> Any:
    """Return a float32 model with small random weights.

    The library draws `A_log` from log(U(0, 16)) and sets `dt_bias` to 1, with which a Gated
    DeltaNet forgets within a few tokens; here its heads start with half-lives of one to 40 tokens.
    """
    mx.random.seed(seed)
    model = Model(ModelConfig.from_dict(dict(config)))
    language = model.language_model.model
    for layer in language.layers:
        if layer.is_linear:
            mixer = layer.linear_attn
            mixer.A_log = mx.log(mx.array(_DECAY_RATES))
            mixer.dt_bias = mx.array(_DECAY_BIASES)
            mixer.conv1d.weight = 0.3 * mx.random.normal(mixer.conv1d.weight.shape)
    table = language.embed_tokens
    table.weight = 0.05 * mx.random.normal(table.weight.shape)
    places = model.vision_tower.pos_embed
    places.weight = 0.02 * mx.random.normal(places.weight.shape)
    mx.eval(model.parameters())
    return model


def new_drafter(config: Mapping[str, Any], model: Any) -> Any:
    """Return an MTP head that begins as a copy of the model's last layer and final norm."""
    drafter = Qwen3_5MTPDraftModel(
        Qwen3_5MTPConfig.from_dict({"text_config": dict(config["text_config"])})
    )
    language = model.language_model.model
    drafter.layers[0].update(language.layers[-1].parameters())
    drafter.norm.weight = mx.array(language.norm.weight)
    noise = 0.05 * mx.random.normal((HIDDEN, HIDDEN))
    drafter.fc.weight = mx.concatenate([noise, mx.eye(HIDDEN)], axis=1)
    mx.eval(drafter.parameters())
    return drafter
