"""OpenBLAS for MLX on Linux, whose wheel brings a reference BLAS many times slower."""

from __future__ import annotations

import ctypes.util
import sys


def preload() -> dict[str, str]:
    """Return the environment that preloads OpenBLAS; empty on macOS and where none is installed."""
    if sys.platform != "linux":
        return {}
    library = ctypes.util.find_library("openblas")
    return {"LD_PRELOAD": library} if library else {}
