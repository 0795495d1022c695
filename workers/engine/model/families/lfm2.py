"""Forward pass of LFM2 that records the windows of its convolutions, on mlx-vlm's own.

A convolution of LFM2 sees the last tokens alone, which are its whole state. mlx-vlm's pass replaces
them and keeps no history, so that no rejected draft could be rolled back, but it tells what each
layer has read. Duck-typed to mlx-vlm's LFM2; `tests/model/test_families.py` compares with mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def forward(language: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    """Run tokens [rows, L] at every row's cursor; return the scores [rows, L, vocabulary]."""
    model = language.model
    read: list[Any] = []
    hidden = model(tokens, list(caches), gdn_sink=read)
    for layer, before, _, _, inputs in read:
        width = model.layers[layer].conv.L_cache - 1
        caches[layer].update_window(0, mx.concatenate([before, inputs], axis=1), width)
    if "lm_head" in language:
        return language.lm_head(hidden)
    return model.embed_tokens.as_linear(hidden)
