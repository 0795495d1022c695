"""A quicker inverse of triangles for the models of tests on a CPU."""

import sys

import mlx.core as mx
from mlx_vlm.models.qwen3_5 import gated_delta


def invert_by_lapack() -> None:
    """Let LAPACK invert the triangles of mlx-vlm's gated delta on Linux.

    Its own substitution takes a CPU 15 ms for each layer and chunk of a prompt. A Mac needs none,
    and a worker in a process of its own has it.
    """
    if sys.platform == "linux":
        gated_delta._invert_unit_lower = lambda triangle, _: mx.linalg.tri_inv(
            triangle, stream=mx.cpu
        )
