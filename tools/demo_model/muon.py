"""Muon for matrices, Adam for other parameters (Jordan et al., "Muon", 2024).

A convolution kernel is also a matrix, with one row per output. The Muon of MLX orthogonalises in
bfloat16, which a CPU emulates. This implementation stays in float32 and stacks matrices of one
shape, which is four times as fast here.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

_NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
_MOMENTUM: Final = 0.95
_WEIGHT_DECAY: Final = 0.01
_BETA1, _BETA2 = 0.9, 0.98
_MAX_GRADIENT_NORM: Final = 1.0


def orthogonalise(stack: mx.array) -> mx.array:
    """Return the nearest orthogonal matrix to each [rows <= columns] matrix, by five iterations."""
    a, b, c = _NEWTON_SCHULZ
    x = stack / (mx.sqrt((stack * stack).sum((1, 2), keepdims=True)) + 1e-12)
    for _ in range(5):
        gram = x @ mx.swapaxes(x, 1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def _as_wide(value: mx.array, tall: bool) -> mx.array:
    matrix = value.reshape(value.shape[0], -1)
    return matrix.T if tall else matrix


class Muon:
    """The optimiser of all phases; `is_matrix(name, value)` selects the parameters of Muon."""

    def __init__(self, parameters: Any, is_matrix: Callable[[str, mx.array], bool]) -> None:
        self._stacks: dict[str, list[tuple[str, bool]]] = {}
        self.state: dict[str, mx.array] = {"step": mx.array(0)}
        for name, value in tree_flatten(parameters):
            if is_matrix(name, value):
                outputs, inputs = value.shape[0], value.size // value.shape[0]
                tall = outputs > inputs
                rows, columns = (inputs, outputs) if tall else (outputs, inputs)
                self._stacks.setdefault(f"momentum.{rows}x{columns}", []).append((name, tall))
            else:
                self.state[f"mean.{name}"] = mx.zeros_like(value)
                self.state[f"square.{name}"] = mx.zeros_like(value)
        for key, members in self._stacks.items():
            rows, columns = (int(side) for side in key.split(".")[1].split("x"))
            self.state[key] = mx.zeros((len(members), rows, columns))

    def update(self, model: Any, gradients: Any, matrix_rate: float, rate: float) -> None:
        """Run one step: `matrix_rate` for the matrices of Muon, `rate` for the rest."""
        values = dict(tree_flatten(model.trainable_parameters()))
        flat = dict(tree_flatten(gradients))
        norm = mx.sqrt(sum(((g * g).sum() for g in flat.values()), start=mx.array(0.0)))
        clip = mx.minimum(_MAX_GRADIENT_NORM / (norm + 1e-6), 1.0)
        updated = self._update_matrices(values, flat, matrix_rate)
        updated += self._update_adam(values, flat, clip, rate)
        model.update(tree_unflatten(updated))

    def _update_matrices(
        self, values: Mapping[str, mx.array], gradients: Mapping[str, mx.array], rate: float
    ) -> list[tuple[str, mx.array]]:
        updated = []
        for key, members in self._stacks.items():
            gradient = mx.stack([_as_wide(gradients[name], tall) for name, tall in members])
            momentum = _MOMENTUM * self.state[key] + (1 - _MOMENTUM) * gradient
            self.state[key] = momentum
            directions = orthogonalise((1 - _MOMENTUM) * gradient + _MOMENTUM * momentum)
            rows, columns = momentum.shape[1:]
            for direction, (name, tall) in zip(directions, members, strict=True):
                scale = rate * (columns / rows) ** 0.5 if tall else rate
                decayed = values[name] * (1 - rate * _WEIGHT_DECAY)
                change = (direction.T if tall else direction).reshape(decayed.shape)
                updated.append((name, decayed - scale * change))
        return updated

    def _update_adam(
        self,
        values: Mapping[str, mx.array],
        gradients: Mapping[str, mx.array],
        clip: mx.array,
        rate: float,
    ) -> list[tuple[str, mx.array]]:
        step = self.state["step"] = self.state["step"] + 1
        updated = []
        for key in [key for key in self.state if key.startswith("mean.")]:
            name = key.removeprefix("mean.")
            gradient = gradients[name] * clip
            mean = _BETA1 * self.state[key] + (1 - _BETA1) * gradient
            square = self.state[f"square.{name}"]
            square = _BETA2 * square + (1 - _BETA2) * gradient * gradient
            self.state[key], self.state[f"square.{name}"] = mean, square
            mean = mean / (1 - _BETA1**step)
            root = mx.sqrt(square / (1 - _BETA2**step)) + 1e-8
            updated.append((name, values[name] - rate * mean / root))
        return updated
