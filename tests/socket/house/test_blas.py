"""The BLAS under every command on Linux, where MLX's own is many times slower."""

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
    """Return which kernels OpenBLAS takes in a command that is run with it."""
    ended = subprocess.run(
        [WITH_BLAS, "true"],
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_VERBOSE": "2", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    told = re.search(r"Core: (\w+)", ended.stdout + ended.stderr)
    assert told is not None, ended
    return told[1]


def test_a_processor_gets_kernels_of_its_kind_also_where_the_library_does_not_know_it() -> None:
    assert kernels() in {"SkylakeX", "Haswell"}


def test_kernels_that_somebody_named_are_used() -> None:
    assert kernels(OPENBLAS_CORETYPE="Nehalem") == "Nehalem"
