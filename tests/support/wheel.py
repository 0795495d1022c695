"""The wheel, as `make wheel` builds it."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = version("paceline")
WHEEL = f"paceline-{VERSION}-py3-none-any.whl"


def run_wheel(folder: Path, repository: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/wheel", *([repository] if repository else [])],
        env={**os.environ, "OUT": str(folder), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


def build_wheel(folder: Path, repository: str = "") -> Path:
    """Build the wheel and the files beside it; return the wheel."""
    ended = run_wheel(folder, repository)
    assert (ended.returncode, ended.stderr) == (0, "")
    return folder / WHEEL
