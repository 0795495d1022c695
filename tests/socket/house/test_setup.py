"""What set-up says when it cannot go on: one sentence, and nothing half done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ("sh", "cat", "cksum", "tr", "dirname", "uname", "ls", "id", "head", "find", "env")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone as far as set-up reads it, on a machine with the barest of tools."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    return tmp_path


def set_up(clone: Path, lock: str = "dev", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "scripts" / "setup", lock],
        env={"PATH": str(clone / "bin"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_python_is_one_sentence(clone: Path) -> None:
    ended = set_up(clone)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("paceline: no Python 3.11 or newer found; install one")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs a compiler")
def test_no_compiler_and_nobody_to_install_it_is_one_sentence(clone: Path) -> None:
    ended = set_up(clone, PYTHON=sys.executable)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("paceline: g++ is missing")
    assert not (clone / ".venv").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs a compiler")
def test_a_gateway_alone_needs_no_compiler(clone: Path) -> None:
    """It comes as far as to make the environment, which this Python refuses."""
    python = clone / "bin" / "python3"
    python.write_text(f'#!/bin/sh\n[ "$2" != venv ] || exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (clone / "bin" / "rm").symlink_to(shutil.which("rm") or "")
    ended = set_up(clone, "gateway")
    assert ended.returncode == 1
    assert ended.stderr == f"paceline: '{python} -m venv .venv' failed; see above.\n"
    assert set_up(clone, "worker").stderr.startswith("paceline: g++ is missing")


def test_a_finished_set_up_is_seen_by_its_stamp(clone: Path) -> None:
    """Nothing is installed here, and nothing is found missing: the stamp of a finished run is."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    for program in (clone / ".venv" / "bin" / "paceline", clone / "bin" / "redis-server"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    stamped = "cat locks/dev.txt pyproject.toml scripts/setup | cksum | tr ' ' '-'"
    digest = subprocess.run(
        ["sh", "-c", stamped], cwd=clone, capture_output=True, text=True, check=True
    ).stdout
    stamp = clone / ".venv" / ".ready-dev"
    stamp.write_text(digest)
    assert set_up(clone).returncode == 0
    (clone / "locks" / "dev.txt").write_text("changed\n")
    assert set_up(clone).returncode == 1
