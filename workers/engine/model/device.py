"""The device that MLX computes on: its number types and memory, and the share that MLX may keep."""

import logging
from typing import Any

import mlx.core as mx

logger = logging.getLogger(__name__)

_FREED_BYTES = 2 << 30
_FREED_SHARE = 0.1
"""MLX keeps freed buffers up to this much, or this share of its memory, to use them again."""
_LEAST_FREED_BYTES = 32 << 20
"""Of a small model: the steps of eight rows of the demo use 22 MB of freed buffers again."""


def cast_for_device(model: Any) -> None:
    """Cast half-precision weights to single precision on a CPU.

    On a CPU, MLX computes a matrix product of bfloat16 in a loop, ten times slower than a
    BLAS in float32, and three tokens take three times as long as one.
    """
    if on_cpu():
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())


def on_cpu() -> bool:
    """Return whether MLX computes on a CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def memory_limit_bytes() -> int:
    """Return the memory that a process may use: on a Mac the working set of the GPU."""
    return int(mx.device_info().get("max_recommended_working_set_size") or mx.get_memory_limit())


def limit_memory() -> None:
    """Wire the allocations of MLX, and limit the freed buffers of a load; affects the process.

    Memory that is not wired may be paged out while a worker is idle, and the next answer waits for
    it. By default MLX keeps freed buffers up to 95% of the working set, so that other programs of
    the Mac swap. A CPU has no working set, and nothing is wired there.
    """
    working_set_bytes = int(mx.device_info().get("max_recommended_working_set_size") or 0)
    if working_set_bytes:
        try:
            mx.set_wired_limit(working_set_bytes)
        except (RuntimeError, ValueError) as error:  # before macOS 15
            logger.warning("memory.not_wired error=%s", error)
    mx.set_cache_limit(_most_freed_bytes())


def limit_freed_buffers(largest_bytes: int = 0) -> None:
    """Limit the freed buffers that MLX keeps, once a model is loaded; affects the process.

    Nobody needs more of them than the model has weights: what a step computes and frees is smaller.
    `largest_bytes` are what else a pass frees; on a CPU they do not count, since there a buffer
    costs little beside what is computed in it. MLX uses a buffer again for almost the same size
    alone, so whoever sends prompts of all lengths fills any limit.
    """
    mx.clear_cache()
    needed_bytes = max(mx.get_active_memory(), _LEAST_FREED_BYTES)
    if not on_cpu():
        needed_bytes = max(needed_bytes, largest_bytes)
    mx.set_cache_limit(min(_most_freed_bytes(), needed_bytes))


def _most_freed_bytes() -> int:
    return min(_FREED_BYTES, int(_FREED_SHARE * memory_limit_bytes()))
