"""OpenBLAS for MLX on Linux, whose wheel brings a reference BLAS many times slower."""

from __future__ import annotations

import ctypes.util
import os
import sys


def preload() -> dict[str, str]:
    """Return the environment that preloads OpenBLAS; empty on macOS and where none is installed."""
    if sys.platform != "linux":
        return {}
    library = ctypes.util.find_library("openblas")
    # One thread: MLX brings its own, and two pools on the same cores get into each other's way.
    return {"LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"} if library else {}


def restart_with_fast_blas(module: str) -> None:
    """Start this process anew, as `python -m module`, if OpenBLAS can be had and is not loaded."""
    fast = preload()
    if not fast.items() <= os.environ.items():
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **fast})
