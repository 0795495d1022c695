"""Keys and values of the prefix cache in 8 bits: half the memory, for a small error.

Each token's key and value is quantised by itself (`mlx.core.quantize`, affine, in groups of its
width), so a run of tokens is cut and joined as it is. Rows that decode compute with the numbers of
the model: MLX has no fused attention over quantised keys.
"""

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx

BITS = 8
KeysValues: TypeAlias = tuple[mx.array, ...]
"""Of one attention layer and one row: keys and values, [1, heads, tokens, width] each; quantised:
words, scales and biases of the keys, then of the values, with the same first three axes."""

_WORD_BITS = 32
_GROUP_SIZES = (64, 32)
_QUANTIZED_ARRAYS = 6


def quantize(layers: Sequence[KeysValues]) -> list[KeysValues]:
    """Quantise the layers that are not yet, and whose width has groups."""
    return [
        tuple(
            part
            for array in layer
            for part in mx.quantize(array, group_size=_group_size(array), bits=BITS)
        )
        if _fits(layer)
        else layer
        for layer in layers
    ]


def dequantize(layer: Sequence[mx.array]) -> Sequence[mx.array]:
    """Return keys and values as the model computes them."""
    if len(layer) != _QUANTIZED_ARRAYS:
        return layer
    return [_dequantize(*layer[:3]), _dequantize(*layer[3:])]


def quantized_bytes(layer: KeysValues) -> int:
    """Return the size of a layer once it is quantised."""
    if not _fits(layer):
        return sum(array.nbytes for array in layer)
    return sum(array.size * BITS // 8 + 2 * array.nbytes // _group_size(array) for array in layer)


def _fits(layer: KeysValues) -> bool:
    return len(layer) != _QUANTIZED_ARRAYS and all(map(_group_size, layer))


def _group_size(array: mx.array) -> int:
    """Return the size of the groups; 0 if the width has none."""
    return next((size for size in _GROUP_SIZES if array.shape[-1] % size == 0), 0)


def _dequantize(words: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    group_size = words.shape[-1] * _WORD_BITS // BITS // scales.shape[-1]
    return mx.dequantize(words, scales, biases, group_size=group_size, bits=BITS)
