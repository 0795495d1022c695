"""The device that MLX computes on: which number type it takes, and how much memory it has."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def cast_for_device(model: Any) -> None:
    """Cast half-precision weights to single precision on a CPU.

    A CPU has no matrix product for bfloat16: MLX computes it in a loop, ten times slower than a
    BLAS in float32, and three tokens take three times as long as one.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())


def memory_limit_bytes() -> int:
    """Return the memory that a process may use: on a Mac the working set of the GPU."""
    return int(mx.device_info().get("max_recommended_working_set_size") or mx.get_memory_limit())
