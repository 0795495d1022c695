"""MTP heads that others published apart from the models that they draft for.

Conversions of Qwen3.5 and its successors lose the tensors `mtp.*`, and the heads are repositories
of their own. A head fits every conversion of the model from which it was taken, and of no other
one; a self-test decides (`self_test.py`). The worker names such a head at its start, and fetches it
only if its owner names it with `--mtp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
}
"""The head for a model by the model's name, each with who uses it so."""
_WORD_END = r"(?![A-Za-z0-9.])"


def known_head(name: str) -> str | None:
    """Return the repository of the head for a model of this name; None if we know of none."""
    for model, head in KNOWN_HEADS.items():
        # A sparse model has the name of a dense one, and more.
        if re.search(rf"(^|/){re.escape(model)}{_WORD_END}(?!-A\d)", name):
            return head
    return None
