"""`paceline --help` and the help of every command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import COMMANDS

ROOT = Path(__file__).parents[3]


def test_the_main_help_imports_no_command() -> None:
    """The imports of a command use a second of CPU time, which `--help` does not need."""
    program = """
import contextlib, sys
from gateway.cli import main
with contextlib.suppress(SystemExit):
    main(["--help"])
loaded = sorted({name.partition(".")[0] for name in sys.modules})
assert not {"pydantic", "fastapi", "httpx", "rich", "uvicorn"} & set(loaded), loaded
"""
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert all(f"    {name} " in process.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_prints_its_usage(name: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "gateway", name, "--help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert process.stdout.startswith(f"usage: paceline {name}")
