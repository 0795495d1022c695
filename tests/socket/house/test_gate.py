"""The gate of .ci/run: a test that fails twice is a defect, one that passes alone is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gate import Outcome, needs_a_mend

ROOT = Path(__file__).parents[3]
FLAKE = """
from pathlib import Path

def test_flake():
    seen = Path("seen")
    assert seen.exists() or seen.touch()
"""
ORDER = """
state = []

def test_first():
    state.append(1)

def test_second():
    assert not state
"""
DEFECT = "def test_defect():\n    assert False\n"


def run_gate(folder: Path, **files: str) -> tuple[int, str]:
    """Run the gate over a project of these tests; return its exit code and its last lines."""
    makefile = f"test:\n\t@{sys.executable} -m pytest -p no:cacheprovider $(ARGS)\n"
    (folder / "Makefile").write_text(makefile)
    tests = folder / "tests/socket"
    tests.mkdir(parents=True)
    for name, text in files.items():
        (tests / f"test_{name}.py").write_text(text)
    ran = subprocess.run(
        [sys.executable, "-m", "tools.gate"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "--randomly-dont-reorganize"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_tests_that_pass_alone_are_named_and_the_gate_is_green(tmp_path: Path) -> None:
    """One is a flake, the other a defect of order."""
    code, output = run_gate(tmp_path, flake=FLAKE, order=ORDER)
    assert code == 0, output
    assert output.splitlines()[-2:] == [
        "  tests/socket/test_flake.py::test_flake",
        "  tests/socket/test_order.py::test_second",
    ]
    assert "The slowest of 3 tests, by file:" in output
    assert "A fixed loop of work took" in output


def test_a_test_that_fails_twice_makes_the_gate_red(tmp_path: Path) -> None:
    code, output = run_gate(tmp_path, flake=FLAKE, defect=DEFECT)
    assert code == 1
    assert output.splitlines()[-1] == (
        "Red: tests/socket/test_defect.py::test_defect failed twice."
    )


def test_a_file_that_cannot_be_collected_makes_the_gate_red(tmp_path: Path) -> None:
    code, output = run_gate(tmp_path, broken="import no_such_module\n")
    assert code == 1
    assert output.splitlines()[-1].startswith("Red: ")


def failure(file: str) -> Outcome:
    return Outcome(file=file, test=f"{file}::test", seconds=1.0, failed=True)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["tests/socket/a.py"] * 3, ""),
        (["tests/socket/a.py"] * 4, "4 tests failed, and a flake comes alone"),
        (["tests/socket/a.py", "tests/unit/b.py"], "tests/unit/b.py::test is a unit test"),
        ([""], "a file could not be read, or a process ended"),
    ],
)
def test_more_than_three_failures_or_one_of_a_unit_test_are_no_flakes(
    files: list[str], reason: str
) -> None:
    assert needs_a_mend([failure(file) for file in files]) == reason
