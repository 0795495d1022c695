"""OpenBLAS for MLX on Linux, whose wheel brings a reference BLAS many times slower."""

from __future__ import annotations

import ctypes.util
import sys


def preload() -> dict[str, str]:
    """Return the environment that preloads OpenBLAS; empty on macOS and where none is installed."""
    if sys.platform != "linux":
        return {}
    library = ctypes.util.find_library("openblas")
    # One thread: MLX brings its own, and two pools on the same cores get into each other's way.
    return {"LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"} if library else {}
