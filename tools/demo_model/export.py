"""Write the trained weights as an ordinary Hugging Face folder in bfloat16.

Two conventions live side by side in such folders, and this is the one form that mlx-vlm and
vllm-mlx both read right. The base is in Hugging Face layout: RMSNorm weights less one, conv1d as
[C, 1, K], the patch embedding in NCDHW. The `mtp.*` tensors are in a file of their own that is
marked as MLX layout (metadata, and a manifest), with RMSNorm weights as they are.
"""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from tools.demo_model.architecture import (
    LONGEST_CONTEXT,
    MERGE,
    PATCH,
    PICTURE_PIXELS,
    model_config,
)
from tools.demo_model.chat_template import chat_template
from tools.demo_model.snapshots import Tensors, load_tensors
from tools.demo_model.tokenizer import SPECIAL_TOKENS, load_tokenizer, special_ids

_LONGEST_ANSWER: Final = 1024
_SHIFTED_NORMS: Final = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)


def hugging_face_layout(weights: Tensors) -> Tensors:
    """Return the base weights under Hugging Face names, in its conventions, in bfloat16."""
    renamed: Tensors = {}
    for name, value in weights.items():
        moved = value
        if name.startswith("language_model.") and name.endswith(_SHIFTED_NORMS):
            moved = value - 1
        elif name.endswith("conv1d.weight"):
            moved = value.moveaxis(2, 1)
        elif name.endswith("patch_embed.proj.weight"):
            moved = value.transpose(0, 4, 1, 2, 3)
        language = name.replace("language_model.model.", "model.language_model.", 1)
        renamed[language.replace("vision_tower.", "model.visual.", 1)] = moved.astype(mx.bfloat16)
    return renamed


def write_checkpoint(work: Path, folder: Path) -> None:
    """Export the output of the phases in `work` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(work)
    ids = special_ids(tokenizer)
    base = hugging_face_layout(load_tensors(work / "base.safetensors"))
    trained = load_tensors(work / "draft.safetensors")
    head = {f"mtp.{name}": value.astype(mx.bfloat16) for name, value in trained.items()}
    files = {"model.safetensors": (base, "pt"), "model-mtp.safetensors": (head, "mlx")}
    for name, (tensors, layout) in files.items():
        mx.save_safetensors(str(folder / name), tensors, metadata={"format": layout})
    size = sum(value.nbytes for tensors, _ in files.values() for value in tensors.values())
    places = {key: name for name, (tensors, _) in files.items() for key in sorted(tensors)}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)
    manifest = {"artifact_schema_version": 1, "rmsnorm_weight_format": "mlx_gamma"}
    _write_json(folder / "manifest.json", manifest)
    _write_json(folder / "config.json", model_config(ids))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    (folder / "chat_template.jinja").write_text(chat_template())
    _write_json(folder / "preprocessor_config.json", _preprocessor_config())
    generation = {
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": False,
        "max_new_tokens": _LONGEST_ANSWER,
    }
    _write_json(folder / "generation_config.json", generation)


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": "Qwen3VLProcessor",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONGEST_CONTEXT,
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": PICTURE_PIXELS, "longest_edge": PICTURE_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
