"""`paceline --help` and the help of every command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import COMMANDS

ROOT = Path(__file__).parents[3]


def test_the_help_of_all_commands_loads_no_command() -> None:
    """A command's imports take a second of CPU, so `--help` must not pay for them."""
    program = """
import contextlib, sys
from gateway.cli import main
with contextlib.suppress(SystemExit):
    main(["--help"])
loaded = sorted({name.partition(".")[0] for name in sys.modules})
assert not {"pydantic", "fastapi", "httpx", "rich", "uvicorn"} & set(loaded), loaded
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert all(f"    {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_its_options(name: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "gateway", name, "--help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.startswith(f"usage: paceline {name}")
