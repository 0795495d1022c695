"""OpenBLAS under MLX on Linux, as `scripts/with-blas` gives it to `make up` and `make test`."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

_WITH_BLAS: Final = Path(__file__).parents[2] / "scripts" / "with-blas"
_NAMES: Final = frozenset({"LD_PRELOAD", "WITH_BLAS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE"})


@cache
def preload() -> dict[str, str]:
    """Return the environment that preloads OpenBLAS; empty on macOS or if it is not installed."""
    without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    output = subprocess.run(
        [_WITH_BLAS, "/usr/bin/env", "-0"], env=without, capture_output=True, text=True, check=True
    ).stdout
    environment = dict(line.split("=", 1) for line in output.split("\0") if line)
    return {name: value for name, value in environment.items() if name in _NAMES}


def restart_with_fast_blas(module: str) -> None:
    """Restart this process as `python -m module` if OpenBLAS is available and not loaded."""
    fast = preload()
    if not fast.items() <= os.environ.items():
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **fast})
