"""The engines to compare: our worker and its peers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from bench.harness.venvs import Venv

_MLX: Final = "mlx[cpu]==0.32.4" if sys.platform == "linux" else "mlx==0.32.4"
_MLX_VLM: Final = Venv(name="mlx-vlm", pins=("mlx-vlm==0.7.10", _MLX))
_MLX_LM: Final = Venv(name="mlx-lm", pins=("mlx-lm==0.32.2", _MLX))
_VLLM_MLX: Final = Venv(name="vllm-mlx", pins=("vllm-mlx==0.6.0", "mlx-vlm==0.7.10", _MLX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One engine in one mode."""

    name: str
    venv: Venv | None
    """None: this project, in the interpreter that runs the benchmark."""
    arguments: tuple[str, ...]
    """Arguments of `python`; {model} and {port} are replaced."""
    mtp: bool = False

    @property
    def version(self) -> str:
        """Return the package that brings it, and the version."""
        return self.venv.pins[0].replace("==", " ") if self.venv else ""


OURS: Final = Contender(
    name="paceline",
    venv=None,
    arguments=(
        *"-m workers --model {model} --port {port} --id bench".split(),
        *"--prefix-cache-gb 0".split(),  # each run begins without conversations
    ),
    mtp=True,
)
PEERS: Final = (
    Contender(
        name="mlx-vlm",
        venv=_MLX_VLM,
        arguments=(
            *"-m mlx_vlm.server --model {model}".split(),
            *"--host 127.0.0.1 --port {port} --log-level WARNING".split(),
        ),
    ),
    Contender(
        name="mlx-vlm+mtp",
        venv=_MLX_VLM,
        arguments=(
            *"-m mlx_vlm.server --model {model} --draft-model {model} --draft-kind mtp".split(),
            *"--host 127.0.0.1 --port {port} --log-level WARNING".split(),
        ),
        mtp=True,
    ),
    Contender(
        name="mlx-lm",
        venv=_MLX_LM,
        arguments=(
            *"-m mlx_lm server --model {model}".split(),
            *"--host 127.0.0.1 --port {port} --log-level WARNING".split(),
        ),
    ),
    Contender(
        name="vllm-mlx",
        venv=_VLLM_MLX,
        arguments=(
            *"-m vllm_mlx.cli serve {model} --continuous-batching --mllm".split(),
            *"--host 127.0.0.1 --port {port}".split(),
        ),
    ),
    Contender(
        name="vllm-mlx+mtp",
        venv=_VLLM_MLX,
        arguments=(
            *"-m vllm_mlx.cli serve {model} --continuous-batching --mllm --enable-mtp".split(),
            *"--host 127.0.0.1 --port {port}".split(),
        ),
        mtp=True,
    ),
)
