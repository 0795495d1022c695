"""The engines to compare: our worker and its peers."""

from __future__ import annotations

import sys
from typing import Final

from bench.harness.servers import Contender

_MLX: Final = "mlx[cpu]==0.32.4" if sys.platform == "linux" else "mlx==0.32.4"
_MLX_VLM: Final = ("mlx-vlm==0.7.10", _MLX)
_MLX_LM: Final = ("mlx-lm==0.32.2", _MLX)
_VLLM_MLX: Final = ("vllm-mlx==0.6.0", "mlx-vlm==0.7.10", _MLX)
_AT: Final = "--host 127.0.0.1 --port {port}"
_VLM_SERVER: Final = "{python} -m mlx_vlm.server --model {model} " + _AT + " --log-level WARNING"
_VLLM_SERVER: Final = "{python} -m vllm_mlx.cli serve {model} --continuous-batching --mllm " + _AT

OURS: Final = Contender(
    name="paceline",
    # Each run begins without conversations.
    command="{python} -m workers --model {model} --port {port} --id bench --prefix-cache-gb 0",
    mtp=True,
)
PEERS: Final = (
    Contender(name="mlx-vlm", pins=_MLX_VLM, command=_VLM_SERVER),
    Contender(
        name="mlx-vlm+mtp",
        pins=_MLX_VLM,
        environment="mlx-vlm",
        command=f"{_VLM_SERVER} --draft-model {{model}} --draft-kind mtp",
        mtp=True,
    ),
    Contender(
        name="mlx-lm",
        pins=_MLX_LM,
        command="{python} -m mlx_lm server --model {model} " + _AT + " --log-level WARNING",
    ),
    Contender(name="vllm-mlx", pins=_VLLM_MLX, command=_VLLM_SERVER),
    Contender(
        name="vllm-mlx+mtp",
        pins=_VLLM_MLX,
        environment="vllm-mlx",
        command=f"{_VLLM_SERVER} --enable-mtp",
        mtp=True,
    ),
)
