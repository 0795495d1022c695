"""Exponentials for training on a CPU, where MLX computes them one number at a time.

Here exp is a polynomial built from vectorised operations (relative error below 1e-5), about seven
times as fast, and each function brings its own short backward pass.
"""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

_LOG2_E: Final = 1.4426950408889634
_ROUND_TO_INTEGER: Final = 12582912.0
"""1.5 * 2**23: adding and subtracting it rounds a float32 to an integer."""
_COEFFICIENTS: Final = (0.0013333558, 0.0096181291, 0.0555041087, 0.2402265070, 0.6931471806, 1.0)


def exp(x: mx.array) -> mx.array:
    """Return e to the power of x, for x from -80 to 80, without a gradient of its own."""
    scaled = mx.maximum(x, -80.0) * _LOG2_E
    whole = (scaled + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER
    part = scaled - whole
    power = mx.zeros_like(part)
    for coefficient in _COEFFICIENTS:
        power = power * part + coefficient
    return power * mx.view((whole.astype(mx.int32) + 127) << 23, mx.float32)


def _with_gradient(
    forward: Callable[..., mx.array], backward: Callable[..., Any]
) -> Callable[..., mx.array]:
    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    typed: Callable[..., mx.array] = function
    return typed


def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + exp(-mx.minimum(x, 80.0)))


def _sigmoid_backward(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output * (1 - output)


def _silu(x: mx.array) -> mx.array:
    return x * _sigmoid(x)


def _silu_backward(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    gate = _sigmoid(x)
    return cotangent * (gate + output * (1 - gate))


def _masked_softmax(scores: mx.array, mask: mx.array) -> mx.array:
    powers = exp(scores) * mask
    return powers / powers.sum(-1, keepdims=True)


def _masked_softmax_backward(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array]:
    flow = cotangent * output
    return flow - output * flow.sum(-1, keepdims=True), mx.zeros_like(primals[1])


def _log_sum_exp(x: mx.array) -> mx.array:
    top = x.max(-1, keepdims=True)
    return top + mx.log(exp(x - top).sum(-1, keepdims=True))


def _one_hot(x: mx.array, targets: mx.array) -> mx.array:
    return targets[..., None] == mx.arange(x.shape[-1])


def _cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    picked = mx.where(_one_hot(logits, targets), logits, 0).sum(-1)
    return _log_sum_exp(logits)[..., 0] - picked


def _cross_entropy_backward(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    logits, targets = primals
    chances = exp(logits - _log_sum_exp(logits))
    gradient = cotangent[..., None] * (chances - _one_hot(logits, targets))
    return gradient, mx.zeros_like(targets)


sigmoid = _with_gradient(_sigmoid, _sigmoid_backward)
"""1 / (1 + exp(-x))."""
silu = _with_gradient(_silu, _silu_backward)
"""x * sigmoid(x)."""
masked_softmax = _with_gradient(_masked_softmax, _masked_softmax_backward)
"""(scores, mask): softmax over the last axis where `mask` is 1; scores must be bounded."""
cross_entropy = _with_gradient(_cross_entropy, _cross_entropy_backward)
"""(logits, targets): -log p(target) for each row of logits."""
