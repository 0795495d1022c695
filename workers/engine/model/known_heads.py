"""MTP heads for conversions that have lost theirs: where they are, and in which files.

Conversions lose the tensors of the head. It is in a separate repository, or in that of the model's
owner, where only the files with tensors of the head are fetched (3 of 48 for GLM-4.7-Flash, 4 of
60 GB). A head fits every conversion of the model from which it was taken, and of no other one; a
self-test decides (`self_test.py`). The worker names such a head at its start, and fetches it only
if its owner names it with `--mtp`.
"""

import re
from collections.abc import Mapping
from typing import Any

KNOWN_HEADS: Mapping[str, str] = {
    # Rapid-MLX measures this pair; mlx-vlm#1167 has the same head, split by its author.
    "Qwen3.5-4B": "mlx-community/Qwen3.5-4B-MTP-4bit",
    # Rapid-MLX attaches it to mlx-community/Qwen3.5-9B-4bit.
    "Qwen3.5-9B": "mlx-community/Qwen3.5-9B-MTP-4bit",
    # olmlx tests it; mlx-vlm#1167 measures the same head, split by its author.
    "Qwen3.6-27B": "mlx-community/Qwen3.6-27B-MTP-4bit",
    # Named beside mlx-community/Qwen3.6-35B-A3B-4bit by the model lists of several MLX servers.
    "Qwen3.6-35B-A3B": "mlx-community/Qwen3.6-35B-A3B-MTP-4bit",
    # lablup/mlxcel#1165 lists what the conversions lost; the card of the head names its model.
    "Qwen3.8-27B": "mlx-community/Qwen3.8-27B-MTP-4bit",
    # lablup/mlxcel#1753 and vllm-project/vllm-metal#484 take the head from there.
    "GLM-4.7-Flash": "zai-org/GLM-4.7-Flash",
    # zai-org/GLM-4.5's README serves the model with its MTP layer.
    "GLM-4.5-Air": "zai-org/GLM-4.5-Air",
    # vLLM's example of MTP acceptance runs the model with its own head.
    "Qwen3-Next-80B-A3B-Instruct": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    # mlx-vlm documents these pairs: an assistant is trained for one model, and fits each format.
    "gemma-4-E2B-it": "mlx-community/gemma-4-E2B-it-assistant-bf16",
    "gemma-4-E4B-it": "mlx-community/gemma-4-E4B-it-assistant-bf16",
    "gemma-4-26B-A4B-it": "mlx-community/gemma-4-26B-A4B-it-assistant-bf16",
    "gemma-4-31B-it": "mlx-community/gemma-4-31B-it-assistant-bf16",
}
"""The head for a model by the model's name, each with who uses it so."""
MTP_PREFIX = "mtp."
NEXTN_PREFIX = "model.layers.{layers}."
"""Prefix of the names of a head's tensors, after the `layers` layers of the model."""
_WORD_END = r"(?![A-Za-z0-9.])"


def known_head(name: str) -> str | None:
    """Return the repository of the head for a model of this name; None if we know of none."""
    for model, head in KNOWN_HEADS.items():
        # A sparse model has the name of a dense one, and more.
        pattern = rf"(^|/){re.escape(model)}{_WORD_END}(?!-A\d)(?!-assistant)"
        if re.search(pattern, name, re.IGNORECASE):
            return head
    return None


def head_files(config: Mapping[str, Any], files: Mapping[str, str]) -> frozenset[str]:
    """Return the files of a checkpoint with tensors of its head, given the file of each tensor.

    All files if the names of no tensor are those of a head in a whole checkpoint.
    """
    layers = text_config(config).get("num_hidden_layers")
    prefixes = (MTP_PREFIX, NEXTN_PREFIX.format(layers=layers))
    found = {
        file
        for name, file in files.items()
        if name.removeprefix("language_model.").startswith(prefixes)
    }
    return frozenset(found or files.values())


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and nested else config
