"""The gateway imports no MLX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_gateway_loads_on_a_host_without_mlx() -> None:
    program = """
import sys
for name in ("mlx", "mlx_lm", "mlx_vlm", "transformers", "numpy", "PIL"):
    sys.modules[name] = None
import importlib, pkgutil
import gateway
for module in pkgutil.walk_packages(gateway.__path__, "gateway."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
