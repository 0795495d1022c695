"""Forward pass of LFM2 that records the windows of its convolutions, on mlx-vlm's own.

A convolution of LFM2 sees only the last tokens, which are its whole state. mlx-vlm's pass replaces
them and keeps no history, so that no rejected draft could be rolled back, but it returns each
layer's input. Duck-typed to mlx-vlm's LFM2; `tests/model/test_families.py` compares with mlx-lm's.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from workers.engine.model.families.family import Family, score


def _own_pass(language: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    read: list[Any] = []
    hidden = language.model(tokens, list(caches), gdn_sink=read)
    for layer, before, _, _, inputs in read:
        width = language.model.layers[layer].conv.L_cache - 1
        caches[layer].update_window(0, mx.concatenate([before, inputs], axis=1), width)
    return score(language, hidden)


FAMILIES = {"lfm2": Family(own_pass=_own_pass)}
