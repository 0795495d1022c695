"""Weights and optimiser states on disk, written atomically and read by name."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

Tensors = dict[str, mx.array]


def load_tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file."""
    tensors: Any = mx.load(str(path))
    return dict(tensors)


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Replace the file atomically, so that an interrupted run leaves no partial file."""
    fresh = path.with_name(f"new-{path.name}")
    mx.save_safetensors(str(fresh), tensors)
    fresh.replace(path)


def save_module(path: Path, module: Any) -> None:
    """Save all parameters of an mlx module."""
    save_tensors(path, dict(tree_flatten(module.parameters())))


def completed_steps(state: Path) -> int:
    """Return the number of steps of the optimiser state at `state`; 0 without one."""
    steps: Any = load_tensors(state)["step"].item() if state.exists() else 0
    return int(steps)
