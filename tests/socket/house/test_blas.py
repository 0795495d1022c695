"""The BLAS library for every command on Linux, where MLX's own BLAS is many times slower."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

WITH_BLAS = Path(__file__).parents[3] / "scripts" / "with-blas"
PROCESSOR = Path("/proc/cpuinfo")

pytestmark = pytest.mark.skipif(
    not list(Path("/usr/lib").glob("*/openblas-pthread/libblas.so.3"))
    or " avx2 " not in PROCESSOR.read_text(),
    reason="no OpenBLAS, or a processor without a choice of kernels",
)


def kernels(**environment: str) -> str:
    """Return the kernels that OpenBLAS selects in a command that is run with it."""
    process = subprocess.run(
        [WITH_BLAS, "true"],
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_VERBOSE": "2", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"Core: (\w+)", process.stdout + process.stderr)
    assert match is not None, process
    return match[1]


def test_a_processor_unknown_to_openblas_gets_kernels_of_its_instruction_set() -> None:
    assert kernels() in {"SkylakeX", "Haswell"}


def test_kernels_of_the_environment_variable_are_used() -> None:
    assert kernels(OPENBLAS_CORETYPE="Nehalem") == "Nehalem"
