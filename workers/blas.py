"""OpenBLAS on Linux: a process restarts under it, before it imports anything slow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.command_line import COMPLETION_VARIABLE


def restart_with_blas(module: str) -> None:
    """On Linux, restart this process once as `python -m module` under OpenBLAS; not for help."""
    already = {"WITH_BLAS", COMPLETION_VARIABLE} & {*os.environ}
    if sys.platform == "linux" and not (already or {"-h", "--help"} & {*sys.argv}):
        script = str(Path(__file__).with_name("with-blas"))
        python = [sys.executable, "-P", "-m", module, *sys.argv[1:]]
        os.execv("/bin/sh", ["/bin/sh", script, *python])  # noqa: S606
