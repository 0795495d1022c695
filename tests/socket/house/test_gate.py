"""The gate of .ci/run: a test that fails twice is a defect, one that passes alone is named."""

import re
import sys
from collections.abc import Callable

import pytest

from tools import gate
from tools.gate import Outcome, needs_a_mend

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


@pytest.fixture
def run_gate(tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the gate over a project: its exit code and its output."""
    makefile = f"test:\n\t@{sys.executable} -m pytest -p no:cacheprovider $(ARGS)\n"
    (tmp_path / "Makefile").write_text(makefile)
    tests = tmp_path / "tests/socket"
    tests.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p randomly --randomly-dont-reorganize")
    monkeypatch.setattr(gate, "_LOOP", 1000)

    def run(**files: str) -> tuple[int, str]:
        for name, text in files.items():
            (tests / f"test_{name}.py").write_text(text)
        return gate.main(), capfd.readouterr().out

    return run


def test_tests_that_pass_alone_are_named_and_the_gate_is_green(run_gate) -> None:
    """One is a flake, the other a defect of order."""
    code, output = run_gate(flake=FLAKE, order=ORDER)
    assert code == 0, output
    assert output.splitlines()[-2:] == [
        "  tests/socket/test_flake.py::test_flake",
        "  tests/socket/test_order.py::test_second",
    ]
    assert "The slowest of 3 tests, by file:" in output
    assert "A fixed loop of work took" in output


@pytest.mark.parametrize(
    ("files", "last_line"),
    [
        (
            {"flake": FLAKE, "defect": DEFECT},
            r"Red: tests/socket/test_defect\.py::test_defect failed twice\.",
        ),
        ({"broken": "import no_such_module\n"}, "Red: .*"),
    ],
    ids=["a test that fails twice", "a file that cannot be collected"],
)
def test_a_defect_makes_the_gate_red(run_gate, files, last_line) -> None:
    code, output = run_gate(**files)
    assert code == 1
    assert re.fullmatch(last_line, output.splitlines()[-1])


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
def test_more_than_three_failures_or_one_of_a_unit_test_are_no_flakes(files, reason) -> None:
    assert needs_a_mend([failure(file) for file in files]) == reason
